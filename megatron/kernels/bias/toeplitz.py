"""Differentiable operator `toeplitz_bias` without atomics: from a table over distances to a matrix and back.

H heads, R query rows, C key columns, N distances, S parts of the rows; `x_ptr` points to x.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.runtime import DTYPES, Tile, cdiv, get_arch, launch_context

NUM_WARPS, NUM_STAGES = 4, 2
FWD_TILE = Tile(32, 128, NUM_WARPS, NUM_STAGES)
BWD_TILE = Tile(16, 128, NUM_WARPS, NUM_STAGES)
"""Rows per step, and diagonals per program. Tiles are constants, so that all ranks agree. They matter little, because
the kernels are memory-bound.
"""
INTERPRETED_BLOCK = 16
"""Maximum block size in the interpreter, so that short sequences in tests have several tiles."""
MAX_PARTS = 512
"""Target number of programs for sums: rows are split until it is reached."""


def toeplitz_bias(
    table: Tensor,
    rows: int,
    columns: int,
    *,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    above: float = 0.0,
) -> Tensor:
    """Expand table[h, n] to the matrix [H, R, C] with n = offset + r − c, for attention that takes a bias matrix.

    Args:
        table: float32 [H, N], N ≥ offset + R.
        rows, columns: R and C.
        offset: position of the first row, counted from column 0; at least 0.
        dtype: data type of the result. In float16, finite values beyond ±65504 become ±65504 instead of infinite.
        above: value for c > offset + r, usually 0 or −inf. It has no gradient.

    Returns:
        [H, R, C] in `dtype`. The gradient of the table is the sum over each diagonal, in float32.

    Raises:
        ValueError: if sizes or types are invalid.
        RuntimeError: if tensors are on the CPU outside Triton's interpreter.
    """
    check_sizes(rows, columns, offset, dtype)
    if table.dim() != 2 or table.dtype != torch.float32 or table.shape[1] < offset + rows:
        raise ValueError(
            f"table is {table.dtype} {list(table.shape)}; it must be float32 [heads, at least {offset + rows}]"
        )
    return _toeplitz(table, rows, columns, offset, dtype, float(above))


def choose_tile(arch: int | None, tile: Tile) -> Tile:
    """Return a tile for compute capability `arch`, or for the interpreter (None)."""
    if arch is not None:
        return tile
    return replace(tile, block_m=min(tile.block_m, INTERPRETED_BLOCK), block_n=min(tile.block_n, INTERPRETED_BLOCK))


def split_rows(programs: int, rows: int) -> tuple[int, int]:
    """Split rows into parts with `programs` programs each. Return the number of parts and the rows per part."""
    count = min(max(-(-MAX_PARTS // programs), 1), -(-rows // 64))
    rows_per_part = -(-rows // count)
    return -(-rows // rows_per_part), rows_per_part


def check_sizes(rows: int, columns: int, offset: int, dtype: torch.dtype) -> None:
    if rows < 1 or columns < 1 or offset < 0:
        raise ValueError(f"rows {rows}, columns {columns}, offset {offset}; the minimum is 1, 1 and 0")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}; choose from float16, bfloat16, float32")


@triton.jit
def _toeplitz_fwd_kernel(
    table_ptr,
    out_ptr,
    R,
    C,
    N,
    offset,
    above,
    largest,
    SATURATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute out[h, r, c] = table[h, offset + r − c], or `above` if c > offset + r. Grid (rows, columns, H) in tiles.

    SATURATE: finite values beyond ±largest become ±largest, for types that would turn them into infinity.
    """
    h = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    n = offset + rows - columns
    inside = (rows < R) & (columns < C)
    value = tl.load(table_ptr + h * N + n, mask=inside & (n >= 0), other=0.0)
    if SATURATE:
        infinite = tl.abs(value) == float("inf")
        value = tl.where(infinite, value, tl.clamp(value, -largest, largest, propagate_nan=tl.PropagateNan.ALL))
    value = tl.where(n >= 0, value, above)
    address = out_ptr + h * R * C + rows.to(tl.int64) * C + columns
    tl.store(address, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _toeplitz_bwd_kernel(
    dout_ptr, factor_ptr, partial_ptr, H, R, C, N, offset, rows_per_part, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute partial[s, h, n], the sum over rows r of part s of factor[r] · dout[h, r, offset + r − n].

    Grid (N tiles, H, S). A program owns BLOCK_N diagonals, so no atomics are needed; adjacent diagonals are adjacent
    columns. factor is float32 [R] or None.
    """
    h = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = part * rows_per_part
    last = tl.minimum(R, first + rows_per_part)
    # Rows before n − offset have no column on diagonal n, the first one of this tile.
    first = tl.maximum(first, (tl.maximum(tl.program_id(0) * BLOCK_N - offset, 0)) // BLOCK_M * BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        columns = offset + rows - n[None, :]
        inside = (rows < last) & (columns >= 0) & (columns < C) & (n < N)[None, :]
        address = dout_ptr + h * R * C + rows.to(tl.int64) * C + columns
        value = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        if factor_ptr is not None:
            value *= tl.load(factor_ptr + rows, mask=rows < last, other=0.0)
        total += value
    tl.store(partial_ptr + (part * H + h) * N + n, tl.sum(total, 0), mask=n < N)


def sum_diagonals(grad: Tensor, factor: Tensor | None, size: int, offset: int) -> Tensor:
    """Return float32 [H, size]: sums over the diagonals of grad [H, R, C], each row times its factor."""
    heads, rows, columns = grad.shape
    tile = choose_tile(get_arch(grad), BWD_TILE)
    blocks = cdiv(size, tile.block_n)
    count, rows_per_part = split_rows(blocks * heads, rows)
    partial = torch.empty(count, heads, size, dtype=torch.float32, device=grad.device)
    with launch_context(grad):
        _toeplitz_bwd_kernel[(blocks, heads, count)](
            *(grad, factor, partial, heads, rows, columns, size, offset, rows_per_part), **tile.blocks, **tile.options
        )
    return partial.sum(0)


@torch.library.custom_op("farfield::toeplitz_bias", mutates_args=())
def _toeplitz(table: Tensor, rows: int, columns: int, offset: int, dtype: torch.dtype, above: float) -> Tensor:
    table = table.contiguous()
    heads = table.shape[0]
    out = torch.empty(heads, rows, columns, dtype=dtype, device=table.device)
    tile = choose_tile(get_arch(table), FWD_TILE)
    largest = torch.finfo(dtype).max
    with launch_context(table):
        _toeplitz_fwd_kernel[(cdiv(rows, tile.block_m), cdiv(columns, tile.block_n), heads)](
            *(table, out, rows, columns, table.shape[1], offset, above, largest),
            SATURATE=dtype == torch.float16,
            **tile.blocks,
            **tile.options,
        )
    return out


@_toeplitz.register_fake
def _(table: Tensor, rows: int, columns: int, offset: int, dtype: torch.dtype, above: float) -> Tensor:
    return table.new_empty(table.shape[0], rows, columns, dtype=dtype)


@torch.library.custom_op("farfield::toeplitz_bias_backward", mutates_args=())
def _toeplitz_backward(grad: Tensor, size: int, offset: int) -> Tensor:
    return sum_diagonals(grad.contiguous(), None, size, offset)


@_toeplitz_backward.register_fake
def _(grad: Tensor, size: int, offset: int) -> Tensor:
    return grad.new_empty(grad.shape[0], size, dtype=torch.float32)


def _toeplitz_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.size, ctx.offset = inputs[0].shape[1], inputs[3]


def _toeplitz_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _toeplitz_backward(grad, ctx.size, ctx.offset), None, None, None, None, None


_toeplitz.register_autograd(_toeplitz_gradients, setup_context=_toeplitz_context)

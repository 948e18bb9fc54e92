"""The operators `toeplitz_bias` and `fire_bias`, differentiable, without atomics.

H heads, R query rows, C key columns, N distances, W width of FIRE's network.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.bias import configs
from kernels.bias.fire import _fire_bwd_kernel, _fire_fwd_kernel
from kernels.bias.toeplitz import _toeplitz_bwd_kernel, _toeplitz_fwd_kernel
from kernels.runtime import DTYPES, capability, on_device_of


def toeplitz_bias(
    table: Tensor,
    rows: int,
    columns: int,
    *,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    above: float = 0.0,
) -> Tensor:
    """The matrix [H, R, C] of table[h, n], n = offset + r − c, for attention that takes a bias as a matrix.

    Args:
        table: float32 [H, N], N ≥ offset + R.
        rows, columns: R and C.
        offset: position of the first row, counted from column 0; at least 0.
        dtype: of the result. In float16, finite values beyond ±65504 become ±65504 instead of infinite.
        above: what stands where c > offset + r, usually 0 or −inf. It has no gradient.

    Returns:
        [H, R, C] in `dtype`. The gradient of the table is the sum over each diagonal, in float32.

    Raises:
        ValueError: sizes or types that do not fit.
        RuntimeError: tensors on the CPU outside Triton's interpreter.
    """
    _check_sizes(rows, columns, offset, dtype)
    if table.dim() != 2 or table.dtype != torch.float32 or table.shape[1] < offset + rows:
        raise ValueError(
            f"table is {table.dtype} {list(table.shape)}; it must be float32 [heads, at least {offset + rows}]"
        )
    return _toeplitz(table, rows, columns, offset, dtype, float(above))


def fire_bias(
    c: Tensor,
    multiplier: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    rows: int,
    columns: int,
    *,
    half_length: float,
    offset: int = 0,
    first_column: int = 0,
    dtype: torch.dtype = torch.float32,
    above: float = 0.0,
) -> Tensor:
    """FIRE's bias [H, R, C] (Li et al. 2023, equation 3) with the gradients of all its parameters.

    f(log(1 + c·n) / (log(1 + c·max(L, i)) + 1e-6)), j = first_column + column, n = offset + r − column, i = j + n,
    L = multiplier · half_length.

    Args:
        c, multiplier: float32 [1].
        weight1, bias1: the first layer, float32 [W, 1] and [W], W at most 64.
        weight2, bias2: the second layer, float32 [H, W] and [H], H at most 64.
        rows, columns, offset, dtype, above: as in `toeplitz_bias`; values are not limited in float16.
        half_length: half the training length.
        first_column: position of column 0, where the columns before it have been left out.

    Returns:
        [H, R, C] in `dtype`. In memory besides it, and backward: one float32 [R, C]; never [R, C, W].

    Raises:
        ValueError, RuntimeError: as in `toeplitz_bias`.
    """
    _check_sizes(rows, columns, offset, dtype)
    heads, width = weight2.shape
    if heads > configs.MAX_HEADS or width > configs.MAX_WIDTH:
        raise ValueError(
            f"{heads} heads and width {width}; at most {configs.MAX_HEADS} and {configs.MAX_WIDTH} are possible"
        )
    shapes = {"weight1": (weight1, (width, 1)), "bias1": (bias1, (width,)), "bias2": (bias2, (heads,))}
    shapes |= {"weight2": (weight2, (heads, width)), "c": (c, (1,)), "multiplier": (multiplier, (1,))}
    for name, (x, shape) in shapes.items():
        if x.dtype != torch.float32 or x.shape != shape:
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; it must be float32 {list(shape)}")
    i = first_column + torch.arange(offset, offset + rows, dtype=torch.float32, device=c.device)
    u = torch.log1p(c * torch.arange(offset + rows, dtype=torch.float32, device=c.device))
    z = torch.log1p(c * torch.maximum(multiplier * half_length, i)) + 1e-6
    return _fire(u, z, weight1.squeeze(1), bias1, weight2, bias2, columns, offset, dtype, float(above))


def _check_sizes(rows: int, columns: int, offset: int, dtype: torch.dtype) -> None:
    if rows < 1 or columns < 1 or offset < 0:
        raise ValueError(f"rows {rows}, columns {columns}, offset {offset}; at least 1, 1 and 0 are needed")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}; choose from float16, bfloat16, float32")


def _sum_diagonals(grad: Tensor, factor: Tensor | None, size: int, offset: int) -> Tensor:
    """float32 [H, size]: sums over the diagonals of grad [H, R, C], each row times its factor."""
    heads, rows, columns = grad.shape
    tile = configs.launch_options(capability(grad), configs.TOEPLITZ_BWD)
    blocks = triton.cdiv(size, tile.block_n)
    count, each = configs.split_rows(blocks * heads, rows)
    partial = torch.empty(count, heads, size, dtype=torch.float32, device=grad.device)
    with on_device_of(grad):
        _toeplitz_bwd_kernel[(blocks, heads, count)](
            *(grad, factor, partial, heads, rows, columns, size, offset, each), **tile.blocks, **tile.options
        )
    return partial.sum(0)


@torch.library.custom_op("farfield::toeplitz_bias", mutates_args=())
def _toeplitz(table: Tensor, rows: int, columns: int, offset: int, dtype: torch.dtype, above: float) -> Tensor:
    table = table.contiguous()
    heads = table.shape[0]
    out = torch.empty(heads, rows, columns, dtype=dtype, device=table.device)
    tile = configs.launch_options(capability(table), configs.TOEPLITZ_FWD)
    largest = torch.finfo(dtype).max
    with on_device_of(table):
        _toeplitz_fwd_kernel[(triton.cdiv(rows, tile.block_m), triton.cdiv(columns, tile.block_n), heads)](
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
    return _sum_diagonals(grad.contiguous(), None, size, offset)


@_toeplitz_backward.register_fake
def _(grad: Tensor, size: int, offset: int) -> Tensor:
    return grad.new_empty(grad.shape[0], size, dtype=torch.float32)


def _toeplitz_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.size, ctx.offset = inputs[0].shape[1], inputs[3]


def _toeplitz_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _toeplitz_backward(grad, ctx.size, ctx.offset), None, None, None, None, None


_toeplitz.register_autograd(_toeplitz_gradients, setup_context=_toeplitz_context)


@torch.library.custom_op("farfield::fire_bias", mutates_args=())
def _fire(
    u: Tensor,
    z: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    columns: int,
    offset: int,
    dtype: torch.dtype,
    above: float,
) -> Tensor:
    u, z, w1, b1, w2, b2 = (x.contiguous() for x in (u, z, w1, b1, w2, b2))
    (heads, width), rows = w2.shape, z.shape[0]
    out = torch.empty(heads, rows, columns, dtype=dtype, device=u.device)
    tile = configs.launch_options(capability(u), configs.FIRE_FWD)
    with on_device_of(u):
        _fire_fwd_kernel[(rows, triton.cdiv(columns, tile.block_n))](
            *(u, z, w1, b1, w2, b2, out, heads, rows, columns, width, offset, above),
            **configs.fire_fwd_constants(tile, heads),
            **tile.options,
        )
    return out


@_fire.register_fake
def _(
    u: Tensor,
    z: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    columns: int,
    offset: int,
    dtype: torch.dtype,
    *rest: Any,
) -> Tensor:
    return u.new_empty(w2.shape[0], z.shape[0], columns, dtype=dtype)


@torch.library.custom_op("farfield::fire_bias_backward", mutates_args=())
def _fire_backward(
    grad: Tensor, u: Tensor, z: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, offset: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad, u, z, w1, b1, w2 = (x.contiguous() for x in (grad, u, z, w1, b1, w2))
    heads, rows, columns = grad.shape
    width = w2.shape[1]
    groups = min(rows, configs.MAX_PARTS)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=grad.device)

    dx, dz = empty(1, rows, columns), empty(rows)
    sums = (empty(groups, width), empty(groups, width), empty(groups, heads, width), empty(groups, heads))
    tile = configs.launch_options(capability(grad), configs.FIRE_BWD)
    with on_device_of(grad):
        _fire_bwd_kernel[(groups,)](
            *(grad, u, z, w1, b1, w2, dx, dz, *sums, heads, rows, columns, width, offset),
            **configs.fire_bwd_constants(tile, heads, width),
            **tile.options,
        )
    du = _sum_diagonals(dx, 1 / z, u.shape[0], offset)[0]
    dw1, db1, dw2, db2 = (x.sum(0) for x in sums)
    return du, dz, dw1, db1, dw2, db2


@_fire_backward.register_fake
def _(
    grad: Tensor, u: Tensor, z: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = (u.shape, z.shape, w1.shape, b1.shape, w2.shape, w2.shape[:1])
    first, second, third, fourth, fifth, sixth = (u.new_empty(shape) for shape in shapes)
    return first, second, third, fourth, fifth, sixth


def _fire_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, z, w1, b1, w2, _, _, ctx.offset, _, _ = inputs
    ctx.save_for_backward(u, z, w1, b1, w2)


def _fire_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_fire_backward(grad, *ctx.saved_tensors, ctx.offset), None, None, None, None


_fire.register_autograd(_fire_gradients, setup_context=_fire_context)

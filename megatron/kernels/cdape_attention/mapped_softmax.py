"""Softmax followed by a map between the heads: attention weights P' = P + M·P at each element, with P = softmax(L).

    δ_g = Σ P_g ∘ dP_g        dP = dP' + Mᵀ·dP'        dL = P ∘ (dP − δ)        dM = Σ dP'·Pᵀ

M is [H, H]; its products are over heads, at one row and column. A row of P' needs the maximum and the sum of all heads
of that row, and no output is a product of one head's P. A program therefore takes whole rows of all heads, one after
another, and reads each row's logits twice: first for the sums, then for the result. The products O = P'·V, dV = P'ᵀ·dO
and dP' = dO·Vᵀ are those of `products.py` and `scores.py`.

The chunk's logits are computed as for a processor without such a map.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension. BLOCK_H is H padded for `tl.dot`.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk
from megatron.kernels.cdape_attention.configs import build_product_constants, choose_product_tile
from megatron.kernels.cdape_attention.head_products import AttentionOutput, get_head_strides
from megatron.kernels.cdape_attention.products import _multiply_kernel
from megatron.kernels.cdape_attention.scores import count_padded_channels
from megatron.kernels.cdape_attention.softmax import DO_NOT_SPECIALIZE, LOG2E
from megatron.kernels.cdape_attention.triton_mixer import compute_scores
from megatron.kernels.head_dim import pad_for_dot
from megatron.kernels.runtime import INPUT_PRECISION, Tile, cdiv, launch


@triton.jit
def find_visible_columns(row, extent, BLOCK_N: tl.constexpr):
    """Return the columns that a row sees, first … last − 1, and the start of the first block of columns."""
    _, C, first_row, first_column, window, document_starts_ptr = extent
    own = first_row - first_column + row
    first = tl.maximum(own + 1 - window, 0)
    if document_starts_ptr is not None:
        first = tl.maximum(first, tl.load(document_starts_ptr + row) - first_column)
    return first, tl.minimum(own + 1, C), first // BLOCK_N * BLOCK_N


@triton.jit
def load_logits(logits_ptr, columns, columns_seen, R, C, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load a row's logits of all heads [BLOCK_H, BLOCK_N] in base 2, −∞ in columns that have none."""
    head = tl.arange(0, BLOCK_H)
    pointers = logits_ptr + (head.to(tl.int64) * R * C)[:, None] + columns[None, :]
    seen = (head < H)[:, None] & (columns < C)[None, :]
    x = tl.load(pointers, mask=seen, other=float("-inf"))  # a mask that varies along a row would prevent wide loads
    return tl.where(columns_seen[None, :], x, float("-inf")) * LOG2E


@triton.jit
def load_head_map(head_map_ptr, dtype: tl.constexpr, TRANSPOSED: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load M or its transpose, [BLOCK_H, BLOCK_H] in the compute type, zero outside H."""
    head = tl.arange(0, BLOCK_H)
    inside = (head < H)[:, None] & (head < H)[None, :]
    at = head[None, :] * H + head[:, None] if TRANSPOSED else head[:, None] * H + head[None, :]
    return tl.load(head_map_ptr + at, mask=inside, other=0.0).to(dtype)


@triton.jit
def store_weights(weights_ptr, weights, columns, columns_seen, R, C, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Store a row of P' of all heads where the row sees a column."""
    head = tl.arange(0, BLOCK_H)
    pointers = weights_ptr + (head.to(tl.int64) * R * C)[:, None] + columns[None, :]
    inside = (head < H)[:, None] & columns_seen[None, :]
    tl.store(pointers, weights.to(weights_ptr.dtype.element_ty), mask=inside)


@triton.jit
def compute_row_statistics(
    logits_ptr, sinks_ptr, span, R, C, H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute the maximum (in base 2) and the sum of exponentials of a row, [BLOCK_H] each, including sinks."""
    first, last, start = span
    head = tl.arange(0, BLOCK_H)
    maximum, total = tl.full([BLOCK_H], float("-inf"), tl.float32), tl.zeros([BLOCK_H], tl.float32)
    if sinks_ptr is not None:
        maximum = tl.load(sinks_ptr + head, mask=head < H, other=0.0) * LOG2E
        total = tl.full([BLOCK_H], 1.0, tl.float32)
    for c0 in range(start, last, BLOCK_N):
        columns = c0 + tl.arange(0, BLOCK_N)
        x = load_logits(logits_ptr, columns, (columns >= first) & (columns < last), R, C, H, BLOCK_H)
        higher = tl.maximum(maximum, tl.max(x, 1))
        # Without this, a padding head would compute −∞ − (−∞) = NaN.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(maximum - finite) + tl.sum(tl.exp2(x - finite[:, None]), 1)
        maximum = higher
    return tl.where(head < H, maximum, 0.0), tl.where(head < H, total, 1.0)


@triton.jit
def compute_softmax(
    logits_ptr, columns, columns_seen, maximum, inverse_total, R, C, H: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Compute a row of P of all heads, float32 [BLOCK_H, BLOCK_N], zero in columns hidden from the row."""
    x = load_logits(logits_ptr, columns, columns_seen, R, C, H, BLOCK_H)
    return tl.exp2(x - maximum[:, None]) * inverse_total[:, None]


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _map_weights_kernel(
    logits_ptr,  # [B, H, R, C] float32; entries that a row does not see have no effect
    head_map_ptr,  # M, [H, H] float32
    weights_ptr,  # [B, H, R, C] compute type, P', written where a row sees a column
    stats_ptr,  # [2, B, H, R_total] float32, maximum (in base 2) and sum of exponentials, at the chunk's first row
    sinks_ptr,  # [H] float32, or None: keys with these logits and no value, which the stats include
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    R,
    C,
    first_row,  # position of the chunk's row 0
    first_column,  # position of the maps' column 0
    window,
    R_total,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute a row of P' of all heads. Grid: rows, longest first; batch."""
    row, batch = R - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    if document_starts_ptr is not None:
        document_starts_ptr += batch * R
    of_row = batch * H * R * C + row.to(tl.int64) * C
    logits_ptr += of_row
    weights_ptr += of_row
    span = find_visible_columns(row, (R, C, first_row, first_column, window, document_starts_ptr), BLOCK_N)
    first, last, start = span
    maximum, total = compute_row_statistics(logits_ptr, sinks_ptr, span, R, C, H, BLOCK_H, BLOCK_N)
    head = tl.arange(0, BLOCK_H)
    of_stats = stats_ptr + batch * H * R_total + head * R_total + row
    tl.store(of_stats, maximum, mask=head < H)
    tl.store(of_stats + tl.num_programs(1).to(tl.int64) * H * R_total, total, mask=head < H)
    dtype: tl.constexpr = weights_ptr.dtype.element_ty
    head_map = load_head_map(head_map_ptr, dtype, False, H, BLOCK_H)
    inverse_total = 1.0 / total
    for c0 in range(start, last, BLOCK_N):
        columns = c0 + tl.arange(0, BLOCK_N)
        columns_seen = (columns >= first) & (columns < last)
        p = compute_softmax(logits_ptr, columns, columns_seen, maximum, inverse_total, R, C, H, BLOCK_H)
        mapped = p + tl.dot(head_map, p.to(dtype), input_precision=INPUT_PRECISION)
        store_weights(weights_ptr, mapped, columns, columns_seen, R, C, H, BLOCK_H)


@triton.jit
def load_weight_gradients(dweights_ptr, columns, columns_seen, CHANNELS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load a row of dP' of all heads, [BLOCK_H, BLOCK_N] in the compute type, zero in columns hidden from the row."""
    head = tl.arange(0, BLOCK_H)
    pointers = dweights_ptr + columns[:, None] * CHANNELS + head[None, :]
    return tl.trans(tl.load(pointers, mask=columns_seen[:, None] & (head < CHANNELS)[None, :], other=0.0))


@triton.jit(do_not_specialize=[*DO_NOT_SPECIALIZE, "pair_stride"])
def _differentiate_mapped_kernel(
    logits_ptr,  # [B, H, R, C] float32; entries that a row does not see have no effect
    dweights_ptr,  # dP', [B, R, C, CHANNELS] compute type, zero in channels beyond H
    head_map_ptr,  # M, [H, H] float32
    stats_ptr,  # [2, B, H, R_total] float32, maximum (in base 2) and sum of exponentials, at the chunk's first row
    sums_ptr,  # [B, H, R_total] float32, δ, at the chunk's first row
    weights_ptr,  # [B, H, R, C] compute type, P', written where a row sees a column
    dlogits_ptr,  # dL, [B, R, STORED·C] compute type, written where a row sees a column; heads are in pairs
    dmap_ptr,  # partial sums [programs, BLOCK_H, BLOCK_H] float32, of dM
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    R,
    C,
    first_row,
    first_column,
    window,
    R_total,
    pair_stride,  # elements from one pair of heads to the next in dL
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    STORED: tl.constexpr,  # number of heads in dL, of which those beyond H are zero
    COLUMN_STRIDE: tl.constexpr,  # elements from one column to the next in dL
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute P', δ, dL and partial sums of dM for BLOCK_M rows of all heads. Grid: blocks, longest first; batch."""
    block, batch = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    if document_starts_ptr is not None:
        document_starts_ptr += batch * R
    head = tl.arange(0, BLOCK_H)
    dtype: tl.constexpr = weights_ptr.dtype.element_ty
    head_map = load_head_map(head_map_ptr, dtype, False, H, BLOCK_H)
    transposed_map = load_head_map(head_map_ptr, dtype, True, H, BLOCK_H)
    dmap = tl.zeros([BLOCK_H, BLOCK_H], tl.float32)
    extent = (R, C, first_row, first_column, window, document_starts_ptr)
    of_total = tl.num_programs(1).to(tl.int64) * H * R_total
    for row in range(block * BLOCK_M, tl.minimum(block * BLOCK_M + BLOCK_M, R)):
        of_map = batch * H * R * C + tl.cast(row, tl.int64) * C
        of_pixels = (batch * R + row) * C
        of_row = batch * H * R_total + head * R_total + row
        maximum = tl.load(stats_ptr + of_row, mask=head < H, other=0.0)
        inverse_total = 1.0 / tl.load(stats_ptr + of_total + of_row, mask=head < H, other=1.0)
        first, last, start = find_visible_columns(row, extent, BLOCK_N)
        sums = tl.zeros([BLOCK_H], tl.float32)
        for c0 in range(start, last, BLOCK_N):
            columns = c0 + tl.arange(0, BLOCK_N)
            seen = (columns >= first) & (columns < last)
            p = compute_softmax(logits_ptr + of_map, columns, seen, maximum, inverse_total, R, C, H, BLOCK_H)
            narrow = p.to(dtype)
            mapped = p + tl.dot(head_map, narrow, input_precision=INPUT_PRECISION)
            store_weights(weights_ptr + of_map, mapped, columns, seen, R, C, H, BLOCK_H)
            dmapped = load_weight_gradients(dweights_ptr + of_pixels * CHANNELS, columns, seen, CHANNELS, BLOCK_H)
            dmap = tl.dot(dmapped, tl.trans(narrow), dmap, input_precision=INPUT_PRECISION)
            dp = dmapped.to(tl.float32) + tl.dot(transposed_map, dmapped, input_precision=INPUT_PRECISION)
            sums += tl.sum(p * dp, 1)
        tl.store(sums_ptr + of_row, sums, mask=head < H)
        for c0 in range(start, last, BLOCK_N):
            columns = c0 + tl.arange(0, BLOCK_N)
            seen = (columns >= first) & (columns < last)
            p = compute_softmax(logits_ptr + of_map, columns, seen, maximum, inverse_total, R, C, H, BLOCK_H)
            dmapped = load_weight_gradients(dweights_ptr + of_pixels * CHANNELS, columns, seen, CHANNELS, BLOCK_H)
            dp = dmapped.to(tl.float32) + tl.dot(transposed_map, dmapped, input_precision=INPUT_PRECISION)
            dlogits = tl.trans((p * (dp - sums[:, None])).to(dtype))
            in_row = (head // 2 * pair_stride + head % 2)[None, :] + (columns * COLUMN_STRIDE)[:, None]
            stored = seen[:, None] & (head < STORED)[None, :]
            tl.store(dlogits_ptr + of_pixels * STORED + in_row, dlogits, mask=stored)
    to = dmap_ptr + (batch * tl.num_programs(0) + block) * (BLOCK_H * BLOCK_H)
    tl.store(to + head[:, None] * BLOCK_H + head[None, :], dmap)


@cache
def choose_mapped_tile(heads: int, dtype: torch.dtype, *, is_backward: bool) -> Tile:
    """Return the tile of a kernel. The forward kernel takes one row, the backward kernel several one after another.

    A single warp has no barriers: with four, the backward kernel has 44 of them for 128 columns.
    """
    warps = 1 if heads <= 16 and dtype != torch.float32 else 2
    return Tile(8 if is_backward else 1, 32, warps, 1)


@cache
def build_mapped_constants(heads: int, tile: Tile) -> dict[str, Any]:
    """Return the constants of the forward kernel."""
    return {
        "H": heads,
        "BLOCK_H": pad_for_dot(heads),
        "BLOCK_N": tile.block_n,
        "INPUT_PRECISION": INPUT_PRECISION,
    }


@cache
def build_mapped_gradient_constants(heads: int, tile: Tile, *, in_pairs: bool) -> dict[str, Any]:
    """Return the constants of the backward kernel.

    Args:
        heads: number of heads.
        tile: tile of the kernel.
        in_pairs: True if dL is [B, R, 8, C, 2], False if it is [B, R, C, channels].
    """
    channels = count_padded_channels(heads)
    layout = {"STORED": 16, "COLUMN_STRIDE": 2} if in_pairs else {"STORED": channels, "COLUMN_STRIDE": channels}
    return build_mapped_constants(heads, tile) | {"CHANNELS": channels, "BLOCK_M": tile.block_m, **layout}


def average_mapped_values(
    problem: CdapeProblem, chunk: Chunk, logits: Tensor, v: Tensor, attended: AttentionOutput
) -> None:
    """Write a chunk's output and softmax statistics, from its logits [B, H, R, C]."""
    batch, heads, columns, dim = v.shape
    weights = torch.empty_like(logits, dtype=problem.dtype)
    tile = choose_mapped_tile(heads, problem.dtype, is_backward=False)
    stats = chunk.slice_row_sums(attended.stats)
    launch(
        _map_weights_kernel,
        (chunk.rows, batch, 1),
        (
            *(logits, problem.head_map, weights, stats, problem.sinks, chunk.document_starts),
            *(*chunk.extent, problem.window, problem.rows),
        ),
        build_mapped_constants(heads, tile),
        tile.options,
    )
    output, tile = chunk.slice_rows(attended.output), choose_product_tile(dim, problem.dtype)
    launch(
        _multiply_kernel,
        (cdiv(chunk.rows, tile.block_m), batch * heads, 1),
        (
            *(weights, chunk.slice_columns(v), output, chunk.document_starts, heads, *chunk.extent),
            *(problem.window, columns, *get_head_strides(output)),
        ),
        build_product_constants(dim, tile),
        tile.options,
    )


def differentiate_mapped_softmax(
    problem: CdapeProblem,
    chunk: Chunk,
    logits: Tensor,
    values: Tensor,
    dout: Tensor,
    of_rows: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
) -> Tensor:
    """Compute P' and dL of a chunk, and return the gradient of the map, float32 [H, H].

    Args:
        problem, chunk: the call and its chunk.
        logits: float32 [B, H, R, C].
        values: [B, H, all columns, d], contiguous.
        dout: gradient of the output, [B, H, all rows, d], contiguous.
        of_rows: statistics of the softmax [2, B, H, all rows], and where each row's Σ P ∘ dP is written, [B, H, all
            rows].
        results: where P' is written, [B, H, R, C]; and dL, [B, R, C, channels] or [B, R, 8, C, 2].
    """
    (stats, sums), (weights, dlogits) = of_rows, results
    batch, heads = values.shape[:2]
    dweights = compute_scores(problem, chunk, dout, values)
    in_pairs = dlogits.dim() == 5
    tile = choose_mapped_tile(heads, problem.dtype, is_backward=True)
    blocks, padded = cdiv(chunk.rows, tile.block_m), pad_for_dot(heads)
    partial = torch.empty(blocks * batch, padded, padded, dtype=torch.float32, device=logits.device)
    launch(
        _differentiate_mapped_kernel,
        (blocks, batch, 1),
        (
            *(logits, dweights, problem.head_map, chunk.slice_row_sums(stats), chunk.slice_row_sums(sums)),
            *(weights, dlogits, partial, chunk.document_starts, *chunk.extent, problem.window, problem.rows),
            dlogits.stride(2) if in_pairs else 2,
        ),
        build_mapped_gradient_constants(heads, tile, in_pairs=in_pairs),
        tile.options,
    )
    return partial.sum(0)[:heads, :heads]

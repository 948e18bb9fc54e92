"""Forward mixer kernel: scores and bias of a chunk of rows → logits.

B batch, H heads, R query rows of the chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. BLOCK_H, BLOCK_D: H and D padded for `tl.dot`. Tiles as in `tiles.py`.
"""

import triton
import triton.language as tl

from kernels.cdape_attention.tiles import (
    compute_hidden_tile,
    is_visible_pixel,
    leaky_relu,
    load_map_tile,
    saturate,
    shift_pixels,
)

RUNTIME = ["R", "C", "first_row", "first_column", "share_count", "edge_row", "bias_count", "window"]


@triton.jit(do_not_specialize=RUNTIME)  # these change with every step of decoding
def _mix_fwd_kernel(
    scores_ptr,  # [B, R, C, CHANNELS] compute type, zero in channels beyond H
    logits_ptr,  # [B, H, R, C] float32, written where a row sees a column
    shares_ptr,  # [p + N + rows·p, D] float32, from tables.shares
    bias_ptr,  # [H, bias_count] float32, added to the logits
    w1_ptr,  # [k, BLOCK_H, BLOCK_D] compute type
    w2_ptr,  # [k, BLOCK_D, BLOCK_H] compute type
    b2_ptr,  # [BLOCK_H] float32
    R,
    C,
    first_row,  # position of the chunk's row 0
    first_column,  # position of the maps' column 0
    share_count,  # p + N
    edge_row,  # the chunk's row 0 among the rows of `shares`
    bias_count,
    window,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SATURATE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """One program: BLOCK_M rows, BLOCK_N − 2p distances of them, all heads. Grid: distances, rows, batch."""
    PADDING: tl.constexpr = K // 2
    KEPT: tl.constexpr = BLOCK_N - 2 * PADDING
    PIXELS: tl.constexpr = BLOCK_M * BLOCK_N
    block, row_block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if block * KEPT > first_row + tl.minimum(row_block * BLOCK_M + BLOCK_M, R) - 1:
        return  # left of column 0 for all rows
    pixel = tl.arange(0, PIXELS)
    m = pixel % BLOCK_N
    row = row_block * BLOCK_M + pixel // BLOCK_N
    n = block * KEPT + KEPT - 1 + PADDING - m
    j = first_row + row - n
    alive = (row < R) & (j >= 0)
    logits_ptr += batch.to(tl.int64) * H * R * C
    scores_ptr += batch.to(tl.int64) * R * C * CHANNELS
    extent = (R, C, first_column, share_count, edge_row, window)
    # fmt: off
    hidden = compute_hidden_tile(scores_ptr, shares_ptr, w1_ptr, (row, n, j, alive), extent,
                         CHANNELS, D, K, BLOCK_H, BLOCK_D, INPUT_PRECISION)
    # fmt: on
    hidden = saturate(hidden, SATURATE)
    active = tl.where(alive[:, None], leaky_relu(hidden), 0.0).to(w2_ptr.dtype.element_ty)

    head, width = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    processed = tl.zeros((PIXELS, BLOCK_H), tl.float32) + tl.load(b2_ptr + head)[None, :]
    for tap in tl.static_range(K):
        weight = tl.load(w2_ptr + tap * BLOCK_H * BLOCK_D + width[:, None] * BLOCK_H + head[None, :])
        part = tl.dot(active, weight, input_precision=INPUT_PRECISION)
        if tap != PADDING:
            part = shift_pixels(part, tap - PADDING, PIXELS, BLOCK_H)
        processed += part
    result = saturate(processed, SATURATE)

    kept = is_visible_pixel(row, n, j, R, window) & (m >= PADDING) & (m < BLOCK_N - PADDING)
    result += load_map_tile(scores_ptr, row, j, kept, C, first_column, CHANNELS, BLOCK_H).to(tl.float32)
    stored = kept[:, None] & (head < H)[None, :]
    channel = head.to(tl.int64)
    if HAS_BIAS:
        result += tl.load(bias_ptr + (channel * bias_count)[None, :] + n[:, None], mask=stored, other=0.0)
    place = (channel * R * C)[None, :] + (row * C + j - first_column)[:, None]
    tl.store(logits_ptr + place, result, mask=stored)

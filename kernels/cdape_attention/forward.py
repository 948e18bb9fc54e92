"""Forward processor kernel: scores and bias of a chunk of rows → logits. Before it stands what it shares with the
backward kernels: skewed tiles, and the hidden values on one.

B batch, H heads, R query rows of a chunk, C columns of a chunk's maps, D processor width, k kernel size, p = k//2.
BLOCK_H and BLOCK_D are H and D padded for `tl.dot`. A tile is BLOCK_M rows by BLOCK_N distances, flattened to
PIXELS = BLOCK_M·BLOCK_N: pixel (row, m) stands at distance n = top − m and column j = i − n, so that j grows with m and
one table entry serves a column of the tile. A tap t reads column j + t − p, at distance n − t + p.

Device functions take as tuples what belongs together: `pixels` is (row, n, j, alive), alive being the pixels that have
a hidden value; `extent` is (R, C, first_column, edge_start, edge_row, window), the runtime sizes.
"""

import triton
import triton.language as tl

NEGATIVE_SLOPE = tl.constexpr(0.01)  # of LeakyReLU
FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def saturate(x, SATURATE: tl.constexpr):
    """x held within float16's range where the compute type is float16."""
    if SATURATE:
        x = tl.minimum(tl.maximum(x, -FLOAT16_MAX), FLOAT16_MAX)
    return x


@triton.jit
def leaky_relu(x):
    """LeakyReLU, for a slope below 1."""
    return tl.maximum(x, x * NEGATIVE_SLOPE)


@triton.jit
def shift_pixels(x, by, PIXELS: tl.constexpr, BLOCK_H: tl.constexpr):
    """x [PIXELS, BLOCK_H] read `by` pixels further on. What crosses a row's end lands in the halo, not kept."""
    pixel = tl.minimum(tl.maximum(tl.arange(0, PIXELS) + by, 0), PIXELS - 1)
    return tl.gather(x, tl.broadcast_to(pixel[:, None], (PIXELS, BLOCK_H)), 0)


@triton.jit
def is_visible_pixel(row, n, j, R, window):
    """May the row see the column: within the chunk, the triangle, the window and the sequence."""
    return (row < R) & (n >= 0) & (n < window) & (j >= 0)


@triton.jit
def load_map_tile(map_ptr, row, j, seen, C, first_column, CHANNELS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Entries (row, j) of a map [R, C, CHANNELS] as [PIXELS, BLOCK_H], zero where not seen."""
    channel = tl.arange(0, BLOCK_H)
    offsets = (row * C + j - first_column) * CHANNELS
    mask = seen[:, None]
    if CHANNELS < BLOCK_H:
        mask = mask & (channel < CHANNELS)[None, :]
    return tl.load(map_ptr + offsets[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def load_contribution_tile(
    bias_contributions_ptr,
    row,
    n,
    j,
    alive,
    edge_start,
    edge_row,
    PADDING: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Conv1's bias half and constant as [PIXELS, BLOCK_D]: by distance, by row and column at the left edge."""
    width = tl.arange(0, BLOCK_D)
    entry = tl.where(j < PADDING, edge_start + (edge_row + row) * PADDING + j, n + PADDING)
    offsets = entry.to(tl.int64) * D
    return tl.load(
        bias_contributions_ptr + offsets[:, None] + width[None, :],
        mask=alive[:, None] & (width < D)[None, :],
        other=0.0,
    )


@triton.jit
def compute_hidden_tile(
    scores_ptr,
    bias_contributions_ptr,
    w1_ptr,
    pixels,
    extent,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Conv1 on a tile, float32 [PIXELS, BLOCK_D], before saturation and LeakyReLU."""
    row, n, j, alive = pixels
    R, C, first_column, edge_start, edge_row, window = extent
    head, width = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    hidden = load_contribution_tile(bias_contributions_ptr, row, n, j, alive, edge_start, edge_row, K // 2, D, BLOCK_D)
    for tap in tl.static_range(K):
        reach = tap - K // 2
        seen = is_visible_pixel(row, n - reach, j + reach, R, window)
        scores = load_map_tile(scores_ptr, row, j + reach, seen, C, first_column, CHANNELS, BLOCK_H)
        weight = tl.load(w1_ptr + tap * BLOCK_H * BLOCK_D + head[:, None] * BLOCK_D + width[None, :])
        hidden = tl.dot(scores, weight, hidden, input_precision=INPUT_PRECISION)
    return hidden


DO_NOT_SPECIALIZE = ["R", "C", "first_row", "first_column", "edge_start", "edge_row", "bias_count", "window"]


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)  # these change with every step of decoding
def _processor_fwd_kernel(
    scores_ptr,  # [B, R, C, CHANNELS] compute type, zero in channels beyond H
    logits_ptr,  # [B, H, R, C] float32, written where a row sees a column
    bias_contributions_ptr,  # [p + N + rows·p, D] float32, from bias_term.compute_bias_contributions
    bias_ptr,  # [H, bias_count] float32, added to the logits
    w1_ptr,  # [k, BLOCK_H, BLOCK_D] compute type
    w2_ptr,  # [k, BLOCK_D, BLOCK_H] compute type
    b2_ptr,  # [BLOCK_H] float32
    R,
    C,
    first_row,  # position of the chunk's row 0
    first_column,  # position of the maps' column 0
    edge_start,  # p + N, the row of the contributions where those of the left edge begin
    edge_row,  # the chunk's row 0 among the rows of the left edge's contributions
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
    KEPT_DISTANCES: tl.constexpr = BLOCK_N - 2 * PADDING
    PIXELS: tl.constexpr = BLOCK_M * BLOCK_N
    block, row_block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if block * KEPT_DISTANCES > first_row + tl.minimum(row_block * BLOCK_M + BLOCK_M, R) - 1:
        return  # left of column 0 for all rows
    pixel = tl.arange(0, PIXELS)
    m = pixel % BLOCK_N
    row = row_block * BLOCK_M + pixel // BLOCK_N
    n = block * KEPT_DISTANCES + KEPT_DISTANCES - 1 + PADDING - m
    j = first_row + row - n
    alive = (row < R) & (j >= 0)
    logits_ptr += batch.to(tl.int64) * H * R * C
    scores_ptr += batch.to(tl.int64) * R * C * CHANNELS
    extent = (R, C, first_column, edge_start, edge_row, window)
    # fmt: off
    hidden = compute_hidden_tile(scores_ptr, bias_contributions_ptr, w1_ptr, (row, n, j, alive), extent,
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

    is_kept = is_visible_pixel(row, n, j, R, window) & (m >= PADDING) & (m < BLOCK_N - PADDING)
    result += load_map_tile(scores_ptr, row, j, is_kept, C, first_column, CHANNELS, BLOCK_H).to(tl.float32)
    stored = is_kept[:, None] & (head < H)[None, :]
    channel = head.to(tl.int64)
    if HAS_BIAS:
        result += tl.load(bias_ptr + (channel * bias_count)[None, :] + n[:, None], mask=stored, other=0.0)
    offsets = (channel * R * C)[None, :] + (row * C + j - first_column)[:, None]
    tl.store(logits_ptr + offsets, result, mask=stored)

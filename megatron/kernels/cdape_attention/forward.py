"""Forward processor kernel: scores and bias of a chunk of rows → logits.

Shape letters are those of `skewed_tiles.py`.
"""

import triton
import triton.language as tl

from megatron.kernels.cdape_attention.skewed_tiles import (
    compute_hidden_tile,
    copy_as_product,
    find_depths,
    is_visible_pixel,
    is_whole_tile,
    leaky_relu,
    load_contribution_tile,
    load_contributions,
    locate_columns,
    map_pointers,
    repeat_rows,
    saturate,
    shift_pixels,
)


@triton.jit
def _processor_fwd_tile(
    pointers,
    first,
    top,
    extent,
    MASKED: tl.constexpr,
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
    SLOPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute the logits of rows `first` … at distances `top`, top − 1, …. Unless MASKED, the tile must be whole."""
    scores_ptr, logits_ptr, bias_contributions_ptr, bias_ptr, w1_ptr, w2_ptr, b2_ptr = pointers
    R, C, first_row, first_column, edge_start, edge_row, bias_count, window, document_starts_ptr = extent
    PADDING: tl.constexpr = K // 2
    PIXELS: tl.constexpr = BLOCK_M * BLOCK_N
    pixel = tl.arange(0, PIXELS)
    m = pixel % BLOCK_N
    row = first + pixel // BLOCK_N
    n = top - m
    j, edge_index = locate_columns(row, n, R, first_row, edge_row, document_starts_ptr)
    alive = (row < R) & (j >= 0)
    origin = tl.cast(first, tl.int64) * (C + 1) + (first_row - first_column - top)
    if MASKED:
        hidden = load_contribution_tile(
            bias_contributions_ptr, n, j, edge_index, alive, edge_start, PADDING, D, BLOCK_D
        )
    else:
        line = load_contributions(bias_contributions_ptr, top, PADDING, D, BLOCK_D, BLOCK_N)
        hidden = repeat_rows(line, BLOCK_M, BLOCK_N)
    of_scores = map_pointers(scores_ptr, origin, C, CHANNELS, BLOCK_H, BLOCK_M, BLOCK_N)
    # fmt: off
    hidden, scores = compute_hidden_tile(hidden, of_scores, w1_ptr, (row, n, j, alive), R, window, MASKED,
                                         CHANNELS, K, BLOCK_H, BLOCK_D, INPUT_PRECISION)
    # fmt: on
    active = leaky_relu(saturate(hidden, SATURATE), SLOPE)
    if MASKED:
        active = tl.where(alive[:, None], active, 0.0)
    active = active.to(w2_ptr.dtype.element_ty)

    head, width = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    processed = tl.zeros((PIXELS, BLOCK_H), tl.float32) + tl.load(b2_ptr + head)[None, :]
    for tap in tl.static_range(K):
        weight = tl.load(w2_ptr + tap * BLOCK_H * BLOCK_D + width[:, None] * BLOCK_H + head[None, :])
        part = tl.dot(active, weight, input_precision=INPUT_PRECISION)
        if tap != PADDING:
            part = shift_pixels(part, tap - PADDING, PIXELS, BLOCK_H)
        processed += part
    result = saturate(processed, SATURATE) + copy_as_product(scores, BLOCK_H, INPUT_PRECISION)

    channel = head.to(tl.int64)
    if HAS_BIAS:
        n_line = top - tl.arange(0, BLOCK_N)
        known = ((n_line >= 0) & (n_line < bias_count))[:, None] & (head < H)[None, :]
        bias = tl.load(bias_ptr + (channel * bias_count)[None, :] + n_line[:, None], mask=known, other=0.0)
        result += repeat_rows(bias, BLOCK_M, BLOCK_N)
    is_kept = (m >= PADDING) & (m < BLOCK_N - PADDING)
    if MASKED:
        is_kept = is_kept & is_visible_pixel(row, n, j, R, window)
    line = (pixel // BLOCK_N).to(tl.int64) * (C + 1)
    to = (logits_ptr + origin) + m[:, None] + (line[:, None] + (channel * R * C)[None, :])
    tl.store(to, result, mask=is_kept[:, None] & (head < H)[None, :])


DO_NOT_SPECIALIZE = ["R", "C", "first_row", "first_column", "edge_start", "edge_row", "bias_count", "window"]


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)  # these change with every decoding step
def _processor_fwd_kernel(
    scores_ptr,  # [B, R, C, CHANNELS] compute type, zero in channels beyond H
    logits_ptr,  # [B, H, R, C] float32, written where a row sees a column
    bias_contributions_ptr,  # [p + N + rows·p, D] float32, from bias_product.BiasProduct
    bias_ptr,  # [H, bias_count] float32, added to the logits
    w1_ptr,  # [k, BLOCK_H, BLOCK_D] compute type
    w2_ptr,  # [k, BLOCK_D, BLOCK_H] compute type
    b2_ptr,  # [BLOCK_H] float32
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
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
    SLOPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute the logits of BLOCK_M rows and BLOCK_N − 2p distances, all heads. Grid: distances, rows, batch."""
    PADDING: tl.constexpr = K // 2
    KEPT_DISTANCES: tl.constexpr = BLOCK_N - 2 * PADDING
    block, row_block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    distance = block * KEPT_DISTANCES
    most = first_row + tl.minimum(row_block * BLOCK_M + BLOCK_M, R) - 1
    least = 0
    if document_starts_ptr is not None:
        document_starts_ptr += batch.to(tl.int64) * R
        least, most = find_depths(row_block * BLOCK_M, R, first_row, document_starts_ptr, BLOCK_M)
    if distance > most:
        return  # left of column 0, or of their documents, for all rows
    top = distance + KEPT_DISTANCES - 1 + PADDING
    first = row_block * BLOCK_M
    scores_ptr += batch.to(tl.int64) * R * C * CHANNELS
    logits_ptr += batch.to(tl.int64) * H * R * C
    pointers = (scores_ptr, logits_ptr, bias_contributions_ptr, bias_ptr, w1_ptr, w2_ptr, b2_ptr)
    extent = (R, C, first_row, first_column, edge_start, edge_row, bias_count, window, document_starts_ptr)
    if document_starts_ptr is None:
        least = first_row + first
    # fmt: off
    if is_whole_tile(top, least, first + BLOCK_M, R, window, PADDING, BLOCK_N):
        _processor_fwd_tile(pointers, first, top, extent, False, H, CHANNELS, D, K, BLOCK_H, BLOCK_D, BLOCK_M, BLOCK_N,
                            HAS_BIAS, SATURATE, SLOPE, INPUT_PRECISION)
    else:
        _processor_fwd_tile(pointers, first, top, extent, True, H, CHANNELS, D, K, BLOCK_H, BLOCK_D, BLOCK_M, BLOCK_N,
                            HAS_BIAS, SATURATE, SLOPE, INPUT_PRECISION)
    # fmt: on

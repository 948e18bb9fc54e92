"""Forward processor kernel: scores and bias of a chunk of rows → logits.

The first part of the module is shared with the backward kernels: skewed tiles, and the hidden values on them.

B batch, H heads, R query rows of a chunk, C columns of a chunk's maps, D processor width, k kernel size, p = k//2.
BLOCK_H and BLOCK_D are H and D padded for `tl.dot`. A tile is BLOCK_M rows by BLOCK_N distances, flattened to PIXELS =
BLOCK_M·BLOCK_N: pixel (row, m) is at distance n = top − m and column j = i − n, so that j grows with m and one table
entry serves a column of the tile. A tap t reads column j + t − p, at distance n − t + p.

Device functions take related values as tuples: `pixels` is (row, n, j, alive), where alive is True for pixels with a
hidden value; `extent` is (R, C, first_column, edge_start, edge_row, window), the runtime sizes.

With packed documents, j is relative to the start of the row's document (`locate_columns`), which then replaces column 0
as the left edge. The location of a pixel in a map does not depend on j.
"""

import triton
import triton.language as tl

NEGATIVE_SLOPE = tl.constexpr(0.01)  # of LeakyReLU
FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def saturate(x, SATURATE: tl.constexpr):
    """Clamp x to float16's range if that is the compute type."""
    if SATURATE:
        x = tl.minimum(tl.maximum(x, -FLOAT16_MAX), FLOAT16_MAX)
    return x


@triton.jit
def leaky_relu(x):
    """Apply LeakyReLU with a slope below 1."""
    return tl.maximum(x, x * NEGATIVE_SLOPE)


@triton.jit
def shift_pixels(x, by, PIXELS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Shift x [PIXELS, BLOCK_H] by `by` pixels. Values that cross a row's end land in the halo, which is not kept.

    The gather is along one flattened axis. Along the first of two axes it would change the layout before and after.
    """
    pixel = (tl.arange(0, PIXELS) + by) & (PIXELS - 1)
    index = pixel[:, None] * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    moved = tl.gather(tl.reshape(x, [PIXELS * BLOCK_H]), tl.reshape(index, [PIXELS * BLOCK_H]), 0)
    return tl.reshape(moved, [PIXELS, BLOCK_H])


@triton.jit
def locate_columns(row, n, R, first_row, edge_row, document_starts_ptr):
    """Return the columns j at the distances n, and the index of each row among the left edge's values."""
    j = first_row + row - n
    place = edge_row + row
    if document_starts_ptr is not None:
        begin = tl.load(document_starts_ptr + row, mask=row < R, other=0)
        j -= begin
        place += first_row - begin
    return j, place


@triton.jit
def find_depths(first, R, first_row, document_starts_ptr, BLOCK_M: tl.constexpr):
    """Return the smallest and largest distance of rows `first` … from their documents' starts.

    Rows that do not exist are ignored.
    """
    rows = first + tl.arange(0, BLOCK_M)
    begin = tl.load(document_starts_ptr + rows, mask=rows < R, other=0)
    depths = first_row + rows - begin
    least = tl.min(tl.where(rows < R, depths, 1 << 30), 0)
    return least, tl.max(tl.where(rows < R, depths, -(1 << 30)), 0)


@triton.jit
def is_visible_pixel(row, n, j, R, window):
    """Return True for visible pixels: within the chunk, the triangle, the window and the sequence."""
    return (row < R) & (n >= 0) & (n < window) & (j >= 0)


@triton.jit
def map_pointers(map_ptr, origin, C, CHANNELS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M, BLOCK_N: tl.constexpr):
    """Return the pointers of the tile's pixels in a map [R, C, CHANNELS], [PIXELS, BLOCK_H]; pixel 0 is entry `origin`.

    The next row is C + 1 entries further, since the tile is skewed. The part of the offset that is known at compile
    time is added last, in 32 bits, so that it becomes part of the load instruction.
    """
    pixel = tl.arange(0, BLOCK_M * BLOCK_N)
    line = (pixel // BLOCK_N).to(tl.int64) * ((C + 1) * CHANNELS)
    place = (pixel % BLOCK_N * CHANNELS)[:, None] + tl.arange(0, BLOCK_H)[None, :]
    return (map_ptr + origin * CHANNELS) + line[:, None] + place


@triton.jit
def load_map_tile(pointers, seen, MASKED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load the entries of a map at `pointers`, [PIXELS, BLOCK_H]. With MASKED, entries that are not `seen` are zero."""
    exists = (tl.arange(0, BLOCK_H) < CHANNELS)[None, :]
    if MASKED:
        mask = seen[:, None] & exists if CHANNELS < BLOCK_H else seen[:, None]
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(pointers, mask=exists, other=0.0) if CHANNELS < BLOCK_H else tl.load(pointers)


@triton.jit
def repeat_rows(line, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Repeat a function of the distance [BLOCK_N, ·] for all rows of a tile: [PIXELS, ·]."""
    WIDTH: tl.constexpr = line.shape[1]
    tile = tl.broadcast_to(line[None, :, :], (BLOCK_M, BLOCK_N, WIDTH))
    return tl.reshape(tile, (BLOCK_M * BLOCK_N, WIDTH))


@triton.jit
def load_contributions(
    bias_contributions_ptr, top, PADDING: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load Conv1's bias half and constant at distances top, top − 1, …, away from the left edge: [BLOCK_N, BLOCK_D]."""
    n, width = top - tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    pointers = bias_contributions_ptr + ((n + PADDING).to(tl.int64) * D)[:, None] + width[None, :]
    return tl.load(pointers, mask=(width < D)[None, :], other=0.0) if D < BLOCK_D else tl.load(pointers)


@triton.jit
def load_contribution_tile(
    bias_contributions_ptr,
    n,
    j,
    place,
    alive,
    edge_start,
    PADDING: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load Conv1's bias half and constant as [PIXELS, BLOCK_D]: by distance, or by row and column at the left edge."""
    width = tl.arange(0, BLOCK_D)
    entry = tl.where(j < PADDING, edge_start + place * PADDING + j, n + PADDING)
    offsets = entry.to(tl.int64) * D
    return tl.load(
        bias_contributions_ptr + offsets[:, None] + width[None, :],
        mask=alive[:, None] & (width < D)[None, :],
        other=0.0,
    )


@triton.jit
def compute_hidden_tile(
    hidden,
    pointers,
    w1_ptr,
    pixels,
    R,
    window,
    MASKED: tl.constexpr,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add Conv1 of the scores to `hidden`, float32 [PIXELS, BLOCK_D], before saturation and LeakyReLU.

    Also return the scores of the pixels themselves.
    """
    row, n, j, _ = pixels
    head, width = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    own = ()
    for tap in tl.static_range(K):
        reach = tap - K // 2
        seen = is_visible_pixel(row, n - reach, j + reach, R, window)
        scores = load_map_tile(pointers + reach * CHANNELS, seen, MASKED, CHANNELS, BLOCK_H)
        if tap == K // 2:
            own = (scores,)  # type: ignore[assignment]
        weight = tl.load(w1_ptr + tap * BLOCK_H * BLOCK_D + head[:, None] * BLOCK_D + width[None, :])
        hidden = tl.dot(scores, weight, hidden, input_precision=INPUT_PRECISION)
    return hidden, own[0]  # type: ignore[misc]


@triton.jit
def copy_as_product(x, BLOCK_H: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """Convert x [PIXELS, BLOCK_H] to float32 by a product with the identity: exact, and in the layout of products."""
    head = tl.arange(0, BLOCK_H)
    identity = (head[:, None] == head[None, :]).to(x.dtype)
    return tl.dot(x, identity, input_precision=INPUT_PRECISION)


@triton.jit
def is_whole_tile(top, least_depth, rows_end, R, window, PADDING: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return True if all rows see everything that the tile's taps read, outside the left edge's columns.

    Args:
        top: largest distance of the tile.
        least_depth: smallest distance of its rows from their left edge.
        rows_end: the row after its last one.
    """
    inside = (top + PADDING < window) & (top - (BLOCK_N - 1) >= PADDING)
    return inside & (least_depth - top >= PADDING) & (rows_end <= R)


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
    j, place = locate_columns(row, n, R, first_row, edge_row, document_starts_ptr)
    alive = (row < R) & (j >= 0)
    origin = tl.cast(first, tl.int64) * (C + 1) + (first_row - first_column - top)
    if MASKED:
        hidden = load_contribution_tile(bias_contributions_ptr, n, j, place, alive, edge_start, PADDING, D, BLOCK_D)
    else:
        line = load_contributions(bias_contributions_ptr, top, PADDING, D, BLOCK_D, BLOCK_N)
        hidden = repeat_rows(line, BLOCK_M, BLOCK_N)
    of_scores = map_pointers(scores_ptr, origin, C, CHANNELS, BLOCK_H, BLOCK_M, BLOCK_N)
    # fmt: off
    hidden, scores = compute_hidden_tile(hidden, of_scores, w1_ptr, (row, n, j, alive), R, window, MASKED,
                                         CHANNELS, K, BLOCK_H, BLOCK_D, INPUT_PRECISION)
    # fmt: on
    active = leaky_relu(saturate(hidden, SATURATE))
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
    bias_contributions_ptr,  # [p + N + rows·p, D] float32, from bias_term.compute_bias_contributions
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
                            HAS_BIAS, SATURATE, INPUT_PRECISION)
    else:
        _processor_fwd_tile(pointers, first, top, extent, True, H, CHANNELS, D, K, BLOCK_H, BLOCK_D, BLOCK_M, BLOCK_N,
                            HAS_BIAS, SATURATE, INPUT_PRECISION)
    # fmt: on

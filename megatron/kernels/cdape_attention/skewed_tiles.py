"""Skewed tiles of the processor kernels: locating and loading their pixels, and the hidden values on them.

B batch, H heads, R query rows of a chunk, C columns of a chunk's maps, D processor width, k kernel size, p = k//2.
BLOCK_H and BLOCK_D are H and D padded for `tl.dot`. A tile is BLOCK_M rows by BLOCK_N distances, flattened to PIXELS =
BLOCK_M·BLOCK_N: pixel (row, m) is at distance n = top − m and column j = i − n, so that j grows with m and one table
entry serves a column of the tile. A tap t reads column j + t − p, at distance n − t + p.

Device functions take related values as tuples: `pixels` is (row, n, j, alive), where alive is True for pixels with a
hidden value; `extent` is (R, C, first_row, first_column, edge_start, edge_row, window, document_starts_ptr), the sizes
known at run time, as described at the kernels' arguments.

With packed documents, j is relative to the start of the row's document (`locate_columns`), which then replaces column 0
as the left edge. The location of a pixel in a map does not depend on j.
"""

import triton
import triton.language as tl

FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def saturate(x, SATURATE: tl.constexpr):
    """Clamp x to float16's range if that is the compute type. NaN stays NaN, so that the loss shows it."""
    if SATURATE:
        x = tl.clamp(x, -FLOAT16_MAX, FLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def leaky_relu(x, SLOPE: tl.constexpr):
    """Apply LeakyReLU with a slope of at most 1; with 1 it changes nothing."""
    return tl.maximum(x, x * SLOPE)


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
    edge_index = edge_row + row
    if document_starts_ptr is not None:
        begin = tl.load(document_starts_ptr + row, mask=row < R, other=0)
        j -= begin
        edge_index += first_row - begin
    return j, edge_index


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
    offset = (pixel % BLOCK_N * CHANNELS)[:, None] + tl.arange(0, BLOCK_H)[None, :]
    return (map_ptr + origin * CHANNELS) + line[:, None] + offset


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
    edge_index,
    alive,
    edge_start,
    PADDING: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load Conv1's bias half and constant as [PIXELS, BLOCK_D]: by distance, or by row and column at the left edge."""
    width = tl.arange(0, BLOCK_D)
    entry = tl.where(j < PADDING, edge_start + edge_index * PADDING + j, n + PADDING)
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
def split_row_blocks(
    split, split_blocks, top, extent, PADDING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return a split's row blocks for tiles that start at distance `top`: (first, whole, last whole + 1, last + 1).

    Rows before the first are left of column 0. A tile is whole if all its rows see everything that its taps read,
    outside the left edge's columns.
    """
    R, _, first_row, _, _, _, window, _ = extent
    first = tl.maximum(split * split_blocks, (top - (BLOCK_N - 1) - first_row) // BLOCK_M)
    last = tl.maximum(tl.minimum((split + 1) * split_blocks, tl.cdiv(R, BLOCK_M)), first)
    whole = tl.cdiv(tl.maximum(top + PADDING - first_row, 0), BLOCK_M)
    inside = (top + PADDING < window) & (top - (BLOCK_N - 1) >= PADDING)
    whole = tl.where(inside, tl.minimum(tl.maximum(whole, first), last), last)
    return first, whole, tl.maximum(tl.minimum(R // BLOCK_M, last), whole), last


@triton.jit
def begin_documents(
    bias_contributions_ptr,
    split,
    split_blocks,
    top,
    extent,
    PADDING: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return a split's row blocks with packed documents, (first, last + 1), and the contributions for its whole tiles.

    The range is empty if no row reaches back to a distance of the tiles that start at `top`. The contributions by
    distance [BLOCK_N, BLOCK_D] are zero if no tile is whole.
    """
    R, _, first_row, _, _, _, window, document_starts_ptr = extent
    first = split * split_blocks
    last = tl.minimum(first + split_blocks, tl.cdiv(R, BLOCK_M))
    depth = first * 0 - 1
    for row in range(first * BLOCK_M, last * BLOCK_M, 128):
        _, deepest = find_depths(row, R, first_row, document_starts_ptr, 128)
        depth = tl.maximum(depth, deepest)
    last = tl.where(depth < top - (BLOCK_N - 1), first, last)
    line = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if is_whole_tile(top, depth, 0, R, window, PADDING, BLOCK_N):
        line = load_contributions(bias_contributions_ptr, top, PADDING, D, BLOCK_D, BLOCK_N)
    return first, last, line


@triton.jit
def inspect_row_block(index, top, extent, PADDING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return whether a row block's tile is whole, and whether any of its rows reaches back to the tile's distances.

    The tile starts at distance `top`. Documents can start at any row, so each block is inspected.
    """
    R, _, first_row, _, _, _, window, document_starts_ptr = extent
    least, deepest = find_depths(index * BLOCK_M, R, first_row, document_starts_ptr, BLOCK_M)
    whole = is_whole_tile(top, least, index * BLOCK_M + BLOCK_M, R, window, PADDING, BLOCK_N)
    return whole, deepest >= top - (BLOCK_N - 1)

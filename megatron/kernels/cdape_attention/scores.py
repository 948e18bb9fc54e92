"""Scores of all heads of a chunk, S = q·k, and heads-last maps [B, R, C, channels], channels = 8·⌈H/8⌉.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension, in two blocks as in
`kernels.head_dim`. The processor reads all heads of a pixel at once; if they are adjacent, eight heads are one load of
16 bytes. A tile contains rows by columns of each head, as a matrix product leaves them, and is stored eight heads at a
time: `join_tiles` moves no data between threads.
"""

import triton
import triton.language as tl

from megatron.kernels.head_dim import load_rows

DO_NOT_SPECIALIZE = ["R", "C", "first_row", "first_column", "window", "R_total", "C_total"]
GROUP = tl.constexpr(8)
"""Number of heads stored together: 16 bytes of a half type."""
SMALL_GROUP = tl.constexpr(2)
"""Number of heads stored together by code with masks or per-element addresses, where eight would spill registers."""


def count_padded_channels(heads: int) -> int:
    """Return the number of channels of a map: the heads, padded with zeros to a whole group."""
    return -(-heads // GROUP.value) * GROUP.value


@triton.jit
def join_tiles(tiles):
    """Join two, four or eight tiles [BLOCK_M, BLOCK_N] along a new last axis."""
    SHAPE: tl.constexpr = (tiles[0].shape[0], tiles[0].shape[1], len(tiles))
    even, odd = tiles[0], tiles[1]
    if len(tiles) == 4:
        even, odd = tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3])
    elif len(tiles) == 8:
        even = tl.join(tl.join(tiles[0], tiles[4]), tl.join(tiles[2], tiles[6]))
        odd = tl.join(tl.join(tiles[1], tiles[5]), tl.join(tiles[3], tiles[7]))
    return tl.reshape(tl.join(even, odd), SHAPE)


@triton.jit
def head_products(
    a_ptr,
    b_ptr,
    row,
    column,
    R,
    C,
    a_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Multiply rows of a [R, d] from `row` on with rows of b [C, d] from `column` on: float32 [BLOCK_M, BLOCK_N].

    Rows of a are `a_stride` apart, those of b contiguous. Not MASKED: all of them exist.
    """
    a = load_rows(a_ptr, row, a_stride, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M, MASKED)
    b = load_rows(b_ptr, column, HEAD_DIM, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N, MASKED)
    products = tl.dot(a, tl.trans(b), input_precision=INPUT_PRECISION)
    if BLOCK_DB:
        a = load_rows(a_ptr, row, a_stride, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M, MASKED)
        b = load_rows(b_ptr, column, HEAD_DIM, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N, MASKED)
        products = tl.dot(a, tl.trans(b), products, input_precision=INPUT_PRECISION)
    return products


@triton.jit
def store_group(
    map_ptr,
    group,
    row,
    column,
    R,
    C,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store `group` [BLOCK_M, BLOCK_N, heads] as channels of a map [R, C, CHANNELS], starting at `row` and `column`.

    `map_ptr` points to the group's first channel. Unless MASKED, the map has all of these rows and columns.
    """
    r, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offsets = ((row + r)[:, None] * C + (column + c)[None, :]) * CHANNELS
    to = map_ptr + offsets[:, :, None] + tl.arange(0, group.shape[2])[None, None, :]
    group = group.to(map_ptr.dtype.element_ty)
    if MASKED:
        stored = (row + r < R)[:, None] & (column + c < C)[None, :]
        tl.store(to, group, mask=stored[:, :, None])
    else:
        tl.store(to, group)


@triton.jit
def is_visible(
    row, column, R, first_row, first_column, window, document_starts_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return True if any of BLOCK_M rows attends to any of BLOCK_N columns, both relative to the chunk's first."""
    position = first_row - first_column + row
    last = position + tl.minimum(BLOCK_M, R - row) - 1
    visible = (column <= last) & (column + BLOCK_N > position - window + 1)
    if document_starts_ptr is not None:  # nondecreasing over the rows
        visible = visible & (column + BLOCK_N > tl.load(document_starts_ptr + row) - first_column)
    return visible


@triton.jit
def column_ranges(start, extent, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first, whole, end, last), which bound the column blocks that BLOCK_M rows attend to.

    Column blocks from first to last have visible elements; those from whole to end are fully visible.
    """
    R, C, first_row, first_column, window, document_starts_ptr = extent
    stop = first_row - first_column + 1 + start  # of the first row
    first = tl.maximum(stop - window, 0) // BLOCK_N * BLOCK_N
    last = tl.minimum(stop + tl.minimum(BLOCK_M, R - start) - 1, C)
    whole = tl.cdiv(tl.maximum(stop + BLOCK_M - 1 - window, 0), BLOCK_N) * BLOCK_N
    if document_starts_ptr is not None:
        first_key = tl.load(document_starts_ptr + start) - first_column
        first = tl.maximum(first, first_key // BLOCK_N * BLOCK_N)
        last_key = tl.load(document_starts_ptr + tl.minimum(start + BLOCK_M, R) - 1) - first_column
        whole = tl.maximum(whole, tl.cdiv(last_key, BLOCK_N) * BLOCK_N)
    end = tl.where(start + BLOCK_M <= R, tl.minimum(stop, C) // BLOCK_N * BLOCK_N, 0)
    return first, whole, tl.maximum(end, whole), last


@triton.jit
def load_visible(map_ptr, row, column, extent, OTHER: tl.constexpr, MASKED: tl.constexpr):
    """Load a map's tile [BLOCK_M, BLOCK_N], OTHER if masked. Unless MASKED, all rows attend to all columns.

    Masked elements are loaded and replaced: a mask that varies along a row would prevent wide loads.
    """
    R, C, first_row, first_column, window, document_starts_ptr = extent
    pointers = map_ptr + row[:, None] * C + column[None, :]
    if MASKED:
        x = tl.load(pointers, mask=(row < R)[:, None] & (column < C)[None, :], other=0.0)
        stop = (first_row - first_column + 1 + row)[:, None]
        seen = (column[None, :] >= stop - window) & (column[None, :] < tl.minimum(stop, C))
        if document_starts_ptr is not None:
            document_starts = tl.load(document_starts_ptr + row, mask=row < R, other=0) - first_column
            seen = seen & (column[None, :] >= document_starts[:, None])
        x = tl.where(seen, x, OTHER)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def store_map_tile(ptr, tile, rows, columns, R, C, MASKED: tl.constexpr):
    """Store a tile of a map [R, C]. Unless MASKED, the map has all of these rows and columns."""
    to, tile = ptr + rows[:, None] * C + columns[None, :], tile.to(ptr.dtype.element_ty)
    if MASKED:
        tl.store(to, tile, mask=(rows < R)[:, None] & (columns < C)[None, :])
    else:
        tl.store(to, tile)


@triton.jit
def head_scores(
    q_ptr,
    k_ptr,
    row,
    column,
    extent,
    MEMBER: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Compute S for a group's head on a tile; zeros for a padding channel."""
    R, C, R_total, C_total = extent
    if MEMBER < HEADS:
        q_ptr += tl.cast(R_total, tl.int64) * (MEMBER * HEAD_DIM)
        k_ptr += tl.cast(C_total, tl.int64) * (MEMBER * HEAD_DIM)
        # fmt: off
        scores = head_products(q_ptr, k_ptr, row, column, R, C, HEAD_DIM, HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M,
                               BLOCK_N, INPUT_PRECISION, MASKED)
        # fmt: on
    else:
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    return scores.to(q_ptr.dtype.element_ty)


@triton.jit
def _store_group_scores(
    pointers,
    row,
    column,
    extent,
    first_head,
    HEADS: tl.constexpr,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store S of a group of HEADS heads, at most COUNT, starting at `first_head`, on a tile."""
    q_ptr, k_ptr, scores_ptr = pointers
    R, C, R_total, C_total = extent
    q_ptr += tl.cast(R_total, tl.int64) * (first_head * HEAD_DIM)
    k_ptr += tl.cast(C_total, tl.int64) * (first_head * HEAD_DIM)
    tiles = ()
    for member in tl.static_range(COUNT):
        # fmt: off
        tile = head_scores(q_ptr, k_ptr, row, column, extent, member, HEADS,
                           HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, MASKED)
        # fmt: on
        tiles += (tile,)  # type: ignore[assignment]
    store_group(scores_ptr + first_head, join_tiles(tiles), row, column, R, C, CHANNELS, BLOCK_M, BLOCK_N, MASKED)


@triton.jit
def _store_scores(
    pointers,
    row,
    column,
    extent,
    H: tl.constexpr,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store S of all heads on a tile. Unless MASKED, all of its rows and columns exist.

    The groups are a runtime loop instead of unrolled code: ptxas would start a group's loads in the registers of the
    previous group.
    """
    WHOLE: tl.constexpr = H // COUNT * COUNT
    # fmt: off
    for first_head in range(0, WHOLE, COUNT):
        _store_group_scores(pointers, row, column, extent, first_head, COUNT, COUNT, CHANNELS,
                            HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, MASKED)
    for first_head in tl.static_range(WHOLE, CHANNELS, COUNT):
        _store_group_scores(pointers, row, column, extent, first_head, H - first_head, COUNT, CHANNELS,
                            HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, MASKED)
    # fmt: on


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _scores_kernel(
    q_ptr,  # [B, H, R_total, d] compute type, scaled, at the chunk's first row
    k_ptr,  # [B, H, C_total, d] compute type, at the maps' column 0
    scores_ptr,  # [B, R, C, CHANNELS] compute type, written in tiles with a column that a row sees
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    R,
    C,
    first_row,  # position of the chunk's row 0
    first_column,  # position of the maps' column 0
    window,
    R_total,
    C_total,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COUNT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute S for BLOCK_M rows by BLOCK_N columns of all heads. Grid: columns, rows, batch."""
    column, row, batch = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M, tl.program_id(2).to(tl.int64)
    if document_starts_ptr is not None:
        document_starts_ptr += batch * R
    if not is_visible(row, column, R, first_row, first_column, window, document_starts_ptr, BLOCK_M, BLOCK_N):
        return
    q_ptr += batch * H * R_total * HEAD_DIM
    k_ptr += batch * H * C_total * HEAD_DIM
    scores_ptr += batch * R * C * CHANNELS
    extent = (R, C, R_total, C_total)
    pointers = (q_ptr, k_ptr, scores_ptr)
    # fmt: off
    if (row + BLOCK_M <= R) & (column + BLOCK_N <= C):
        _store_scores(pointers, row, column, extent, H, COUNT, CHANNELS,
                      HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, False)
    else:
        _store_scores(pointers, row, column, extent, H, SMALL_GROUP, CHANNELS,
                      HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, True)
    # fmt: on

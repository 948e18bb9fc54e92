"""Scores of all heads of a chunk, S = q·k, heads last (`heads.py`).

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension.
"""

import triton
import triton.language as tl

from kernels.cdape_attention.heads import GROUP, head_products, is_visible, join_tiles, store_group

RUNTIME = ["R", "C", "first_row", "first_column", "window", "R_total", "C_total"]


@triton.jit
def head_scores(
    q_ptr,
    k_ptr,
    row,
    column,
    extent,
    HEAD: tl.constexpr,
    H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """S of a head on a tile; zeros for a head that only fills up the last group."""
    R, C, R_total, C_total = extent
    if HEAD < H:
        q_ptr += tl.cast(R_total, tl.int64) * (HEAD * HEAD_DIM)
        k_ptr += tl.cast(C_total, tl.int64) * (HEAD * HEAD_DIM)
        # fmt: off
        found = head_products(q_ptr, k_ptr, row, column, R, C, HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N,
                         INPUT_PRECISION)
        # fmt: on
    else:
        found = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    return found.to(q_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=RUNTIME)
def _scores_kernel(
    q_ptr,  # [B, H, R_total, d] compute type, scaled, at the chunk's first row
    k_ptr,  # [B, H, C_total, d] compute type, at the maps' column 0
    scores_ptr,  # [B, R, C, CHANNELS] compute type, written where a tile holds a column that a row sees
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
    INPUT_PRECISION: tl.constexpr,
):
    """One program: BLOCK_M rows by BLOCK_N columns of all heads. Grid: columns, rows, batch."""
    column, row, batch = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M, tl.program_id(2).to(tl.int64)
    if not is_visible(row, column, R, first_row, first_column, window, BLOCK_M, BLOCK_N):
        return
    q_ptr += batch * H * R_total * HEAD_DIM
    k_ptr += batch * H * C_total * HEAD_DIM
    scores_ptr += batch * R * C * CHANNELS
    extent = (R, C, R_total, C_total)
    for group in tl.static_range(CHANNELS // GROUP):
        tiles = ()
        for member in tl.static_range(GROUP):
            # fmt: off
            tile = head_scores(q_ptr, k_ptr, row, column, extent, group * GROUP + member, H,
                               HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION)
            # fmt: on
            tiles += (tile,)  # type: ignore[assignment]
        store_group(scores_ptr, join_tiles(tiles), row, column, R, C, group, CHANNELS, BLOCK_M, BLOCK_N)

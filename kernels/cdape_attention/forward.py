"""Forward mixer kernel: scores and bias of a chunk of rows → logits.

B batch, H heads, R query rows of the chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. HP, DP: H and D padded for `tl.dot`. Tiles as in `tiles.py`.
"""

import triton
import triton.language as tl

from kernels.cdape_attention.tiles import SLOPE, hidden_tile, is_seen, map_tile, saturate, shifted

RUNTIME = ["ROWS", "COLUMNS", "first_row", "first_column", "share_count", "edge_row", "bias_count", "window"]


@triton.jit(do_not_specialize=RUNTIME)  # these change with every step of decoding
def mix(
    scores,  # [B, H, R, C] compute type
    logits,  # [B, H, R, C] float32, written where a row sees a column
    shares,  # [p + N + rows·p, D] float32, from tables.shares
    bias,  # [H, bias_count] float32, added to the logits
    w1,  # [k, HP, DP] compute type
    w2,  # [k, DP, HP] compute type
    b2,  # [HP] float32
    ROWS,
    COLUMNS,
    first_row,  # position of the chunk's row 0
    first_column,  # position of the maps' column 0
    share_count,  # p + N
    edge_row,  # the chunk's row 0 among the rows of `shares`
    bias_count,
    window,
    H: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    HP: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SATURATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BM rows, BN − 2p distances of them, all heads. Grid: distances, rows, batch."""
    PADDING: tl.constexpr = K // 2
    KEPT: tl.constexpr = BN - 2 * PADDING
    P: tl.constexpr = BM * BN
    block, row_block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if block * KEPT > first_row + tl.minimum(row_block * BM + BM, ROWS) - 1:
        return  # left of column 0 for all rows
    pixel = tl.arange(0, P)
    m = pixel % BN
    row = row_block * BM + pixel // BN
    n = block * KEPT + KEPT - 1 + PADDING - m
    j = first_row + row - n
    alive = (row < ROWS) & (j >= 0)
    maps = batch.to(tl.int64) * H * ROWS * COLUMNS
    hidden = hidden_tile(
        scores + maps,
        shares,
        w1,
        row,
        n,
        j,
        alive,
        ROWS,
        COLUMNS,
        first_column,
        share_count,
        edge_row,
        window,
        H,
        D,
        K,
        HP,
        DP,
        PRECISION,
    )
    hidden = saturate(hidden, SATURATE)
    active = tl.where(alive[:, None], tl.where(hidden > 0, hidden, SLOPE * hidden), 0.0).to(w2.dtype.element_ty)

    head, width = tl.arange(0, HP), tl.arange(0, DP)
    processed = tl.zeros((P, HP), tl.float32) + tl.load(b2 + head)[None, :]
    for tap in tl.static_range(K):
        weight = tl.load(w2 + tap * HP * DP + width[:, None] * HP + head[None, :])
        part = tl.dot(active, weight, input_precision=PRECISION)
        if tap != PADDING:
            part = shifted(part, tap - PADDING, P, HP)
        processed += part
    result = saturate(processed, SATURATE)

    kept = is_seen(row, n, j, ROWS, window) & (m >= PADDING) & (m < BN - PADDING)
    result += map_tile(scores + maps, row, j, kept, ROWS, COLUMNS, first_column, H, HP).to(tl.float32)
    stored = kept[:, None] & (head < H)[None, :]
    channel = head.to(tl.int64)
    if HAS_BIAS:
        result += tl.load(bias + (channel * bias_count)[None, :] + n[:, None], mask=stored, other=0.0)
    place = (channel * ROWS * COLUMNS)[None, :] + (row * COLUMNS + j - first_column)[:, None]
    tl.store(logits + maps + place, result, mask=stored)

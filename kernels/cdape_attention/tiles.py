"""What the forward and the backward mixer kernels share: skewed tiles and the hidden values on one.

B batch, H heads, R query rows of a chunk, C columns of a chunk's maps, D processor width, k kernel size, p = k//2.
HP and DP are H and D padded for `tl.dot`. A tile is BM rows by BN distances, flattened to P = BM·BN pixels: pixel
(row, m) stands at distance n = top − m and column j = i − n, so that j grows with m and one table entry serves a
column of the tile. A tap t reads column j + t − p, at distance n − t + p.
"""

import triton
import triton.language as tl

SLOPE = tl.constexpr(0.01)  # of LeakyReLU, below zero
LARGEST = tl.constexpr(65504.0)  # of float16


@triton.jit
def saturate(x, SATURATE: tl.constexpr):
    """x held within float16's range where the compute type is float16."""
    if SATURATE:
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return x


@triton.jit
def shifted(x, by, P: tl.constexpr, HP: tl.constexpr):
    """x [P, HP] read `by` pixels further on. What crosses a row's end lands in the halo, which nobody keeps."""
    pixel = tl.minimum(tl.maximum(tl.arange(0, P) + by, 0), P - 1)
    return tl.gather(x, tl.broadcast_to(pixel[:, None], (P, HP)), 0)


@triton.jit
def is_seen(row, n, j, ROWS, window):
    """May the row see the column: within the chunk, the triangle, the window and the sequence."""
    return (row < ROWS) & (n >= 0) & (n < window) & (j >= 0)


@triton.jit
def map_tile(maps, row, j, seen, ROWS, COLUMNS, first_column, H: tl.constexpr, HP: tl.constexpr):
    """Entries (h, row, j) of a map [H, R, C] as [P, HP], zero where not seen."""
    head = tl.arange(0, HP)
    channel = head.to(tl.int64) * ROWS * COLUMNS
    place = row * COLUMNS + j - first_column
    return tl.load(maps + channel[None, :] + place[:, None], mask=seen[:, None] & (head < H)[None, :], other=0.0)


@triton.jit
def share_tile(
    shares, row, n, j, alive, share_count, edge_row, PADDING: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Conv1's bias half and constant as [P, DP]: by distance, by row and column at the left edge."""
    width = tl.arange(0, DP)
    entry = tl.where(j < PADDING, share_count + (edge_row + row) * PADDING + j, n + PADDING)
    place = entry.to(tl.int64) * D
    return tl.load(shares + place[:, None] + width[None, :], mask=alive[:, None] & (width < D)[None, :], other=0.0)


@triton.jit
def hidden_tile(
    scores,
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
    H: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    HP: tl.constexpr,
    DP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Conv1 on a tile, float32 [P, DP], before saturation and LeakyReLU."""
    head, width = tl.arange(0, HP), tl.arange(0, DP)
    hidden = share_tile(shares, row, n, j, alive, share_count, edge_row, K // 2, D, DP)
    for tap in tl.static_range(K):
        reach = tap - K // 2
        seen = is_seen(row, n - reach, j + reach, ROWS, window)
        taken = map_tile(scores, row, j + reach, seen, ROWS, COLUMNS, first_column, H, HP)
        weight = tl.load(w1 + tap * HP * DP + head[:, None] * DP + width[None, :])
        hidden = tl.dot(taken, weight, hidden, input_precision=PRECISION)
    return hidden

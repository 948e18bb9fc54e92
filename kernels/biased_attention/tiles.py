"""Pieces that the forward and the backward kernels share.

B batch, H heads, R query rows, C key columns, d head dimension, N distances; BM rows and BN columns of a tile.
"""

import triton
import triton.language as tl


@triton.jit
def table_tile(TABLE, base, N, factor, BM: tl.constexpr, BN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """factor · TABLE[base + r − c] as [BM, BN], or as [BN, BM] when transposed; zero outside 0 … N − 1.

    A tile needs BM + BN − 1 entries only. They are loaded once and gathered by r − c through shared memory: a load with
    a pointer for every element of the tile would be pipelined as 4-byte asynchronous copies of the whole tile.
    """
    WINDOW: tl.constexpr = 2 * (BM if BM > BN else BN)
    n = base - (BN - 1) + tl.arange(0, WINDOW)
    values = tl.load(TABLE + n, mask=(n >= 0) & (n < N), other=0.0) * factor
    if TRANSPOSED:
        index = tl.arange(0, BM)[None, :] - tl.arange(0, BN)[:, None] + (BN - 1)
        tile = tl.reshape(tl.gather(values, tl.reshape(index, [BN * BM]), 0), [BN, BM])
    else:
        index = tl.arange(0, BM)[:, None] - tl.arange(0, BN)[None, :] + (BN - 1)
        tile = tl.reshape(tl.gather(values, tl.reshape(index, [BM * BN]), 0), [BM, BN])
    return tile


@triton.jit
def visible(distance, columns, C, window, WINDOWED: tl.constexpr):
    """Which (row, column) pairs of a tile attend: causal, inside the keys, inside the window."""
    mask = (distance >= 0) & (columns < C)
    if WINDOWED:
        mask = mask & (distance < window)
    return mask


@triton.jit
def column_ranges(top, C, window, BM: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr):
    """Where the tiles of BM rows begin, where they need no mask any more, where they do again, and where they end.

    Args:
        top: the last column that the first of the rows sees, not limited by C.
    """
    stop = tl.minimum(C, top + BM)
    full_stop = tl.minimum(C, top + 1) // BN * BN
    start = top * 0
    full = top * 0
    if WINDOWED:
        start = tl.maximum(top - window + 1, 0) // BN * BN
        full = tl.minimum((tl.maximum(top + BM - window, 0) + BN - 1) // BN * BN, stop)
    return start, full, tl.maximum(full_stop, full), stop

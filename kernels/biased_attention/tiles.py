"""Pieces that the forward and the backward kernels share.

B batch, H heads, R query rows, C key columns, d head dimension, N distances; a tile has BLOCK_M rows and BLOCK_N
columns.
"""

import triton
import triton.language as tl


@triton.jit
def load_table_tile(table_ptr, base, N, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """factor · table[base + r − c] as [BLOCK_M, BLOCK_N], or transposed; zero outside 0 … N − 1.

    A tile needs BLOCK_M + BLOCK_N − 1 entries only. They are loaded once and gathered by r − c through shared memory: a
    load with a pointer for every element of the tile would be pipelined as 4-byte asynchronous copies of all of it.
    """
    WINDOW: tl.constexpr = 2 * (BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N)
    n = base - (BLOCK_N - 1) + tl.arange(0, WINDOW)
    values = tl.load(table_ptr + n, mask=(n >= 0) & (n < N), other=0.0) * factor
    if TRANSPOSED:
        index = tl.arange(0, BLOCK_M)[None, :] - tl.arange(0, BLOCK_N)[:, None] + (BLOCK_N - 1)
        tile = tl.reshape(tl.gather(values, tl.reshape(index, [BLOCK_N * BLOCK_M]), 0), [BLOCK_N, BLOCK_M])
    else:
        index = tl.arange(0, BLOCK_M)[:, None] - tl.arange(0, BLOCK_N)[None, :] + (BLOCK_N - 1)
        tile = tl.reshape(tl.gather(values, tl.reshape(index, [BLOCK_M * BLOCK_N]), 0), [BLOCK_M, BLOCK_N])
    return tile


@triton.jit
def visible_mask(distance, columns, C, window, HAS_WINDOW: tl.constexpr):
    """Which (row, column) pairs of a tile attend: causal, inside the keys, inside the window."""
    mask = (distance >= 0) & (columns < C)
    if HAS_WINDOW:
        mask = mask & (distance < window)
    return mask


@triton.jit
def column_ranges(top, C, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Where the tiles of BLOCK_M rows begin, where they need no mask any more, where they do again, and where they end.

    Args:
        top: the last column that the first of the rows sees, not limited by C.
    """
    stop = tl.minimum(C, top + BLOCK_M)
    full_stop = tl.minimum(C, top + 1) // BLOCK_N * BLOCK_N
    start = top * 0
    full = top * 0
    if HAS_WINDOW:
        start = tl.maximum(top - window + 1, 0) // BLOCK_N * BLOCK_N
        full = tl.minimum((tl.maximum(top + BLOCK_M - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, stop)
    return start, full, tl.maximum(full_stop, full), stop

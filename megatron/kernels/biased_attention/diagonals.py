"""Sums over the diagonals of score tiles, for the gradients of tables by distance."""

import triton
import triton.language as tl


@triton.jit
def shift_last(x, first, COUNT: tl.constexpr):
    """Shift x [a, b, c, COUNT] by one along its last axis and insert `first` [a, b, c]. Return (shifted, last element).

    It splits and joins pairs, which moves no data between threads if each thread has the whole axis.
    """
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    D: tl.constexpr = x.shape[2]
    LEVELS: tl.constexpr = 3 if COUNT == 8 else 2 if COUNT == 4 else 1
    tl.static_assert(COUNT == 1 << LEVELS)
    even = ()
    for level in tl.static_range(LEVELS):
        left, x = tl.split(tl.reshape(x, [A, B, D, COUNT >> (level + 1), 2]))
        even += (left,)  # type: ignore[assignment]
    shifted = tl.reshape(first, [A, B, D, 1])
    for level in tl.static_range(LEVELS):
        shifted = tl.reshape(tl.join(shifted, even[LEVELS - 1 - level]), [A, B, D, 2 << level])
    return shifted, tl.reshape(x, [A, B, D])


@triton.jit
def fold_rows(tile, carried, BLOCK_M: tl.constexpr):
    """Add rows of a square tile that are 8 apart along diagonals. Return ([BLOCK_M / 2, BLOCK_M], carry).

    Entries (16w + r, c − 8) and (16w + r + 8, c) are on one diagonal, and matrix products leave both in one thread. Row
    8w + r of the result contains at column c the diagonal 16w + r + 8 − c. The carry is [BLOCK_M / 16, 8, 8]: the last
    8 columns of the upper rows, whose partners are in the next tile.
    """
    PAIRS: tl.constexpr = BLOCK_M // 16
    rows = tl.reshape(tile, [PAIRS, 2, 8, BLOCK_M])
    upper, lower = tl.split(tl.permute(rows, (0, 2, 3, 1)))
    upper = tl.permute(tl.reshape(upper, [PAIRS, 8, BLOCK_M // 8, 8]), (0, 1, 3, 2))
    upper, carried = shift_last(upper, carried, BLOCK_M // 8)
    upper = tl.reshape(tl.permute(upper, (0, 1, 3, 2)), [PAIRS * 8, BLOCK_M])
    return upper + tl.reshape(lower, [PAIRS * 8, BLOCK_M]), carried


@triton.jit
def compute_diagonal_shifts(BLOCK_M: tl.constexpr):
    """Return the diagonal at column 0 of each row of `fold_rows`, [BLOCK_M / 2, 1]."""
    r = tl.arange(0, BLOCK_M // 2)
    return (r // 8 * 16 + r % 8 + 8)[:, None]


@triton.jit
def sum_diagonals(tile, carry, BLOCK_M: tl.constexpr):
    """Sum the diagonals t = 0 … BLOCK_M − 1 of a square tile, including those carried over. Return (sums, carry).

    A tile to the right starts BLOCK_M diagonals earlier: its diagonal t continues diagonal t − BLOCK_M of this tile,
    whose folded rows are carried over. Side by side with the new ones, they contain every diagonal in one piece.
    """
    upper_rows, last = carry
    folded, upper_rows = fold_rows(tile, upper_rows, BLOCK_M)
    r = tl.arange(0, BLOCK_M // 2)[:, None]
    t = tl.arange(0, BLOCK_M)[None, :]
    # No index wraps, so each thread has one address, with constant offsets.
    index = (r * 2 + 1) * BLOCK_M + (compute_diagonal_shifts(BLOCK_M) - t)
    SIZE: tl.constexpr = BLOCK_M // 2 * BLOCK_M
    both = tl.permute(tl.join(last, folded), (0, 2, 1))
    turned = tl.gather(tl.reshape(both, [SIZE * 2]), tl.reshape(index, [SIZE]), 0)
    return tl.sum(tl.reshape(turned, [BLOCK_M // 2, BLOCK_M]), 0), (upper_rows, folded)


@triton.jit
def add_without_atomics(ptr, n, values, N):
    """Add `values` to ptr[n]. Only the calling program accesses these addresses."""
    mask = (n >= 0) & (n < N)
    tl.store(ptr + n, tl.load(ptr + n, mask=mask, other=0.0) + values, mask=mask)

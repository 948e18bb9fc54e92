"""Kernels between a table over distances and a matrix over rows and columns.

H heads, R query rows, C key columns, N distances, S parts that the rows are split into.
"""

import triton
import triton.language as tl


@triton.jit
def spread_kernel(
    TABLE, OUT, R, C, N, offset, above, largest, LIMITED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """OUT[h, r, c] = TABLE[h, offset + r − c], or `above` where c > offset + r. Grid (rows, columns, H) in tiles.

    LIMITED: finite values beyond ±largest become ±largest, for types that would turn them into infinity.
    """
    h = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    columns = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    n = offset + rows - columns
    inside = (rows < R) & (columns < C)
    value = tl.load(TABLE + h * N + n, mask=inside & (n >= 0), other=0.0)
    if LIMITED:
        infinite = tl.abs(value) == float("inf")
        value = tl.where(infinite, value, tl.minimum(tl.maximum(value, -largest), largest))
    value = tl.where(n >= 0, value, above)
    address = OUT + h * R * C + rows.to(tl.int64) * C + columns
    tl.store(address, value.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def diagonal_sum_kernel(GRAD, FACTOR, PARTIAL, H, R, C, N, offset, rows_per_part, BM: tl.constexpr, BN: tl.constexpr):
    """PARTIAL[s, h, n] = sum over the rows of part s of FACTOR[r] · GRAD[h, r, offset + r − n]. Grid (N tiles, H, S).

    A program owns BN diagonals, so nothing is added atomically; neighbouring diagonals are neighbouring columns.
    FACTOR is float32 [R] or None.
    """
    h = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    first = part * rows_per_part
    last = tl.minimum(R, first + rows_per_part)
    # Rows before n − offset have no column on diagonal n: the first one of this tile.
    first = tl.maximum(first, (tl.maximum(tl.program_id(0) * BN - offset, 0)) // BM * BM)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(first, last, BM):
        rows = start + tl.arange(0, BM)[:, None]
        columns = offset + rows - n[None, :]
        inside = (rows < last) & (columns >= 0) & (columns < C) & (n < N)[None, :]
        address = GRAD + h * R * C + rows.to(tl.int64) * C + columns
        value = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        if FACTOR is not None:
            value *= tl.load(FACTOR + rows, mask=rows < last, other=0.0)
        total += value
    tl.store(PARTIAL + (part * H + h) * N + n, tl.sum(total, 0), mask=n < N)

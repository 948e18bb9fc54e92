"""Kernels between a table over distances and a matrix over rows and columns.

H heads, R query rows, C key columns, N distances, S parts that the rows are split into; `x_ptr` points to x.
"""

import triton
import triton.language as tl


@triton.jit
def _toeplitz_fwd_kernel(
    table_ptr,
    out_ptr,
    R,
    C,
    N,
    offset,
    above,
    largest,
    SATURATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[h, r, c] = table[h, offset + r − c], or `above` where c > offset + r. Grid (rows, columns, H) in tiles.

    SATURATE: finite values beyond ±largest become ±largest, for types that would turn them into infinity.
    """
    h = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    n = offset + rows - columns
    inside = (rows < R) & (columns < C)
    value = tl.load(table_ptr + h * N + n, mask=inside & (n >= 0), other=0.0)
    if SATURATE:
        infinite = tl.abs(value) == float("inf")
        value = tl.where(infinite, value, tl.minimum(tl.maximum(value, -largest), largest))
    value = tl.where(n >= 0, value, above)
    address = out_ptr + h * R * C + rows.to(tl.int64) * C + columns
    tl.store(address, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _toeplitz_bwd_kernel(
    dout_ptr, factor_ptr, partial_ptr, H, R, C, N, offset, rows_per_part, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """partial[s, h, n] = sum over the rows of part s of factor[r] · dout[h, r, offset + r − n]. Grid (N tiles, H, S).

    A program owns BLOCK_N diagonals, so nothing is added atomically; neighbouring diagonals are neighbouring columns.
    factor is float32 [R] or None.
    """
    h = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = part * rows_per_part
    last = tl.minimum(R, first + rows_per_part)
    # Rows before n − offset have no column on diagonal n: the first one of this tile.
    first = tl.maximum(first, (tl.maximum(tl.program_id(0) * BLOCK_N - offset, 0)) // BLOCK_M * BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        columns = offset + rows - n[None, :]
        inside = (rows < last) & (columns >= 0) & (columns < C) & (n < N)[None, :]
        address = dout_ptr + h * R * C + rows.to(tl.int64) * C + columns
        value = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        if factor_ptr is not None:
            value *= tl.load(factor_ptr + rows, mask=rows < last, other=0.0)
        total += value
    tl.store(partial_ptr + (part * H + h) * N + n, tl.sum(total, 0), mask=n < N)

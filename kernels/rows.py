"""Sizes that matrix products accept, and rows of matrices [count, d] whose head dimension d is none of them.

A head dimension that is none is split into DA + DB (80 = 64 + 16), DB = 0 where it is one.
"""

import triton
import triton.language as tl

MAX_HEAD_DIM = 128
"""Larger ones would need other tiles in every kernel."""


def padded(size: int) -> int:
    """The next size that a matrix product accepts: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """(DA, DB): powers of two of at least 16, or DB = 0, that hold `head_dim` with little padding: 80 = 64 + 16."""
    whole = padded(head_dim)
    if whole == 16 or head_dim == whole:
        return whole, 0
    rest = padded(head_dim - whole // 2)
    return (whole, 0) if rest == whole // 2 else (whole // 2, rest)


@triton.jit
def load_rows(
    pointer,
    start,
    stride,
    count,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows start … start + BLOCK − 1 of a [count, DIM] matrix, columns FIRST … FIRST + WIDTH − 1; zero outside."""
    rows = tl.arange(0, BLOCK)
    columns = FIRST + tl.arange(0, WIDTH)
    mask = (start + rows < count)[:, None]
    if FIRST + WIDTH > DIM:
        mask = mask & (columns < DIM)[None, :]
    pointer += tl.cast(start, tl.int64) * stride
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(
    pointer,
    tile,
    start,
    count,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The counterpart of `load_rows` for a contiguous [count, DIM] matrix."""
    rows = tl.arange(0, BLOCK)
    columns = FIRST + tl.arange(0, WIDTH)
    mask = (start + rows < count)[:, None]
    if FIRST + WIDTH > DIM:
        mask = mask & (columns < DIM)[None, :]
    pointer += tl.cast(start, tl.int64) * DIM
    tl.store(pointer + rows[:, None] * DIM + columns[None, :], tile.to(pointer.dtype.element_ty), mask=mask)

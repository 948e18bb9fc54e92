"""Sizes that matrix products accept, and row access for matrices [count, d] of any head dimension d.

A head dimension that products do not accept is split into BLOCK_DA + BLOCK_DB (80 = 64 + 16). Otherwise BLOCK_DB is 0.
"""

import triton
import triton.language as tl

MAX_HEAD_DIM = 128
"""Larger head dimensions would need other tiles in every kernel."""


def pad_for_dot(size: int) -> int:
    """Round up to a size that a matrix product accepts: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Return (BLOCK_DA, BLOCK_DB).

    Both are powers of two of at least 16 that cover `head_dim` with little padding; BLOCK_DB is 0 if one block
    suffices.
    """
    whole = pad_for_dot(head_dim)
    if whole == 16 or head_dim == whole:
        return whole, 0
    rest = pad_for_dot(head_dim - whole // 2)
    return (whole, 0) if rest == whole // 2 else (whole // 2, rest)


def build_head_dim_constants(head_dim: int) -> dict[str, int]:
    """Return the constants of a kernel that reads rows of this head dimension."""
    first, second = split_head_dim(head_dim)
    return {"HEAD_DIM": head_dim, "BLOCK_DA": first, "BLOCK_DB": second}


@triton.jit
def load_rows(
    ptr,
    start,
    stride,
    count,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr = True,
):
    """Load rows start … start + BLOCK − 1, columns FIRST … FIRST + WIDTH − 1 of a [count, HEAD_DIM] matrix.

    Elements outside the matrix are zero. Unless MASKED, all rows are inside.
    """
    rows = tl.arange(0, BLOCK)
    columns = FIRST + tl.arange(0, WIDTH)
    ptr += tl.cast(start, tl.int64) * stride
    pointers = ptr + rows[:, None] * stride + columns[None, :]
    if MASKED:
        mask = (start + rows < count)[:, None]
        if FIRST + WIDTH > HEAD_DIM:
            mask = mask & (columns < HEAD_DIM)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif FIRST + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(
    ptr,
    tile,
    start,
    count,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    stride=None,
):
    """Store a tile at the position that `load_rows` reads. The matrix is contiguous unless `stride` is given."""
    if stride is None:
        stride = HEAD_DIM
    rows = tl.arange(0, BLOCK)
    columns = FIRST + tl.arange(0, WIDTH)
    mask = (start + rows < count)[:, None]
    if FIRST + WIDTH > HEAD_DIM:
        mask = mask & (columns < HEAD_DIM)[None, :]
    ptr += tl.cast(start, tl.int64) * stride
    tl.store(ptr + rows[:, None] * stride + columns[None, :], tile.to(ptr.dtype.element_ty), mask=mask)

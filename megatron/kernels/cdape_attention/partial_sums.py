"""Sums of the partial results of programs, several in one launch.

The backward kernels leave gradients of tables and weights by program. PyTorch would sum each kind with a launch of its
own, which costs the host as much as a kernel that computes for a hundred times as long.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.runtime import Tile, cdiv, launch

TILE = Tile(32, 64, 4, 1)
"""Partial results and entries that a program loads at a time."""


@cache
def build_constants(tile: Tile, *, add: bool) -> dict[str, Any]:
    """Return the constants of the kernel; `add`: to the sums of other chunks."""
    return {"ADD": add, **tile.blocks}


@triton.jit
def _sum_entries(output, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum BLOCK_N entries of one output over all partial results."""
    total_ptr, partial_ptr, count, rows, columns, partial_stride, row_stride, total_stride = output
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, column = (entry // columns).to(tl.int64), entry % columns
    inside = row < rows
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, count, BLOCK_M):
        part = first + tl.arange(0, BLOCK_M)[:, None]
        pointers = partial_ptr + part.to(tl.int64) * partial_stride + (row * row_stride + column)[None]
        sums += tl.load(pointers, (part < count) & inside[None], 0.0)
    result = tl.sum(sums, 0)
    pointers = total_ptr + row * total_stride + column
    if ADD:
        result += tl.load(pointers, inside)
    tl.store(pointers, result, inside)


@triton.jit
def _partial_sums_kernel(
    outputs,  # for each: total, partial results, number of these, rows, columns, strides of both rows
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum partial results in a fixed order. Grid: blocks of the largest output's entries; outputs."""
    for i in tl.static_range(len(outputs)):
        if tl.program_id(1) == i:
            _sum_entries(outputs[i], ADD, BLOCK_M, BLOCK_N)


def add_sums(pairs: Sequence[tuple[Tensor, Tensor]], *, is_first: bool) -> None:
    """Add the sum of partial results [P, n, m] to each total [n, m], float32, in one launch.

    Args:
        pairs: totals and partial results, whose last dimensions are contiguous. Rows and columns that only one of both
            has are left out.
        is_first: True to overwrite the totals.
    """
    outputs: list[tuple[Any, ...]] = []
    for total, partial in pairs:
        count, rows, columns = partial.shape
        all_rows, all_columns = total.shape
        sizes = count, min(rows, all_rows), min(columns, all_columns)
        outputs.append((total, partial, *sizes, *partial.stride()[:2], total.stride(0)))
    blocks = max(cdiv(output[3] * output[4], TILE.block_n) for output in outputs)
    launch(
        _partial_sums_kernel,
        (blocks, len(outputs), 1),
        (tuple(outputs),),
        build_constants(TILE, add=not is_first),
        TILE.options,
    )

"""Sums of partial results that the backward kernels leave by program.

Programs of another kernel sum them (`products.py`), because a separate launch would cost the host as much as that of a
kernel with a hundred times the work.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = (32, 64)
"""Numbers of partial results and of entries that a program loads at a time."""


def build_sum_arguments(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[tuple[Any, ...], ...]:
    """Return the arguments with which a kernel adds the sum of partial results [P, n, m] to each total [n, m], float32.

    Args:
        pairs: totals and partial results, whose last dimensions are contiguous. Rows and columns that only one of the
            two has are ignored.

    Returns:
        For each pair: total, partial results, their number, rows and columns; stride of partial results, and strides of
        the rows of these and of the total.
    """
    outputs: list[tuple[Any, ...]] = []
    for total, partial in pairs:
        count, rows, columns = partial.shape
        all_rows, all_columns = total.shape
        sizes = count, min(rows, all_rows), min(columns, all_columns)
        outputs.append((total, partial, *sizes, *partial.stride()[:2], total.stride(0)))
    return tuple(outputs)


@triton.jit
def _sum_entries(output, block, ADD: tl.constexpr, SUMS_M: tl.constexpr, SUMS_N: tl.constexpr):
    """Sum SUMS_N entries of one output over all partial results, in a fixed order."""
    total_ptr, partial_ptr, count, rows, columns, partial_stride, row_stride, total_stride = output
    entry = block * SUMS_N + tl.arange(0, SUMS_N)
    row, column = (entry // columns).to(tl.int64), entry % columns
    inside = row < rows
    sums = tl.zeros([SUMS_M, SUMS_N], tl.float32)
    for first in range(0, count, SUMS_M):
        part = first + tl.arange(0, SUMS_M)[:, None]
        pointers = partial_ptr + part.to(tl.int64) * partial_stride + (row * row_stride + column)[None]
        sums += tl.load(pointers, (part < count) & inside[None], 0.0)
    result = tl.sum(sums, 0)
    pointers = total_ptr + row * total_stride + column
    if ADD:
        result += tl.load(pointers, inside)
    tl.store(pointers, result, inside)


@triton.jit
def add_partial_sums(outputs, program, programs, ADD: tl.constexpr, SUMS_M: tl.constexpr, SUMS_N: tl.constexpr):
    """Sum a program's share of the blocks of all outputs. `programs` programs take the blocks in turn.

    Args:
        outputs: from `build_sum_arguments`.
    """
    block = program
    for i in tl.static_range(len(outputs)):
        blocks = tl.cdiv(outputs[i][3] * outputs[i][4], SUMS_N)
        for own in range(block, blocks, programs):
            _sum_entries(outputs[i], own, ADD, SUMS_M, SUMS_N)
        block = (block + programs - blocks % programs) % programs

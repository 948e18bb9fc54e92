"""Softmax over the columns that a row sees, and its backward pass, in place on the chunk's maps.

B batch, H heads, R query rows of the chunk, C columns of its maps. One program per row of one head.
"""

import triton
import triton.language as tl

RUNTIME = ["ROWS", "COLUMNS", "first_row", "first_column", "window", "all_rows", "sum_stride"]


@triton.jit(do_not_specialize=RUNTIME)
def softmax(
    logits,  # [B, H, R, C] float32; what a row does not see is not read
    probabilities,  # [B, H, R, C] compute type, written whole
    statistics,  # [2, B, H, all_rows] float32, maximum and sum of exponentials, at the chunk's first row
    ROWS,
    COLUMNS,
    first_row,
    first_column,
    window,
    all_rows,
    sum_stride,  # from a maximum to its sum
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = program % ROWS
    stop = first_row + row - first_column + 1
    start = tl.maximum(stop - window, 0)
    stop = tl.minimum(stop, COLUMNS)
    place = program.to(tl.int64) * COLUMNS
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range((start // BLOCK) * BLOCK, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        seen = (column >= start) & (column < stop)
        x = tl.load(logits + place + column, mask=seen, other=float("-inf"))
        higher = tl.maximum(highest, x)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - finite) + tl.exp(x - finite)
        highest = higher
    top = tl.max(highest, 0)
    total = tl.sum(total * tl.exp(highest - top), 0)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        seen = (column >= start) & (column < stop)
        x = tl.load(logits + place + column, mask=seen, other=float("-inf"))
        p = tl.where(seen, tl.exp(x - top) / total, 0.0)
        tl.store(probabilities + place + column, p.to(probabilities.dtype.element_ty), mask=column < COLUMNS)
    of_row = statistics + (program // ROWS).to(tl.int64) * all_rows + row
    tl.store(of_row, top)
    tl.store(of_row + sum_stride, total)


@triton.jit(do_not_specialize=RUNTIME)
def softmax_backward(
    logits,  # [B, H, R, C] float32; holds their gradient afterwards, where a row sees the column
    products,  # [B, H, R, C] compute type, dO·Vᵀ; holds the probabilities afterwards, all of them
    statistics,  # [2, B, H, all_rows] float32, maximum and sum of exponentials, at the chunk's first row
    ROWS,
    COLUMNS,
    first_row,
    first_column,
    window,
    all_rows,
    sum_stride,  # from a maximum to its sum
    BLOCK: tl.constexpr,
):
    """dL = P ∘ (dP − Σ P ∘ dP).

    The sum is taken over the row's own products and not as dO·O: where one probability is nearly 1 the difference
    cancels, and the rounding of O to a half type would stay (four to eight times plain PyTorch's error in float16).
    Maximum and sum are kept apart and not as one logarithm, whose rounding scales a whole row of P: then the row of dL
    no longer sums to zero, on which Conv1's constant depends.
    """
    program = tl.program_id(0)
    row = program % ROWS
    stop = first_row + row - first_column + 1
    start = tl.maximum(stop - window, 0)
    stop = tl.minimum(stop, COLUMNS)
    of_row = statistics + (program // ROWS).to(tl.int64) * all_rows + row
    top, total = tl.load(of_row), tl.load(of_row + sum_stride)
    place = program.to(tl.int64) * COLUMNS
    weighted = tl.zeros((BLOCK,), tl.float32)
    for first in range((start // BLOCK) * BLOCK, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        seen = (column >= start) & (column < stop)
        p = tl.exp(tl.load(logits + place + column, mask=seen, other=float("-inf")) - top) / total
        weighted += p * tl.load(products + place + column, mask=seen, other=0.0).to(tl.float32)
    mean = tl.sum(weighted, 0)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        seen = (column >= start) & (column < stop)
        p = tl.exp(tl.load(logits + place + column, mask=seen, other=float("-inf")) - top) / total
        product = tl.load(products + place + column, mask=seen, other=0.0).to(tl.float32)
        tl.store(logits + place + column, p * (product - mean), mask=seen)
        tl.store(products + place + column, p.to(products.dtype.element_ty), mask=column < COLUMNS)

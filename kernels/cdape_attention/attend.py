"""From the logits of a chunk to its output, and from the output's gradient to that of the logits.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension, in two parts DA and DB as in
`kernels.rows`. One program: BM rows of one head, in blocks of BN columns. Grid: row blocks · H · B.
The softmax is online (Dao 2023, FlashAttention-2, algorithm 1), its maximum and its sum kept apart.
"""

import triton
import triton.language as tl

from kernels.rows import load_rows, store_rows

RUNTIME = ["ROWS", "first_row", "first_column", "window", "all_rows", "all_columns"]
"""COLUMNS is not among them: a compiler that knows it to be a multiple of 16 reads four logits at a time."""


@triton.jit
def place_of_program(ROWS, BM: tl.constexpr):
    """The (batch, head) of a program, how many of these there are, and the program's first row."""
    blocks = tl.cdiv(ROWS, BM)
    program = tl.program_id(0)
    pairs = (tl.num_programs(0) // blocks).to(tl.int64)
    return (program // blocks).to(tl.int64), pairs, program % blocks * BM


@triton.jit
def column_range(start, ROWS, COLUMNS, first_row, first_column, window, BM: tl.constexpr, BN: tl.constexpr):
    """Where the blocks of columns begin and end of which one of BM rows sees something."""
    stop = first_row - first_column + 1 + start  # of the first row
    first = tl.maximum(stop - window, 0) // BN * BN
    return first, tl.minimum(stop + tl.minimum(BM, ROWS - start) - 1, COLUMNS)


@triton.jit
def seen_logits(logits, row, column, ROWS, COLUMNS, first_row, first_column, window):
    """Logits [BM, BN], −∞ where a row does not see the column.

    What it does not see is loaded all the same and dropped: a mask that differs along a row would forbid wide loads.
    """
    stored = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    x = tl.load(logits + row[:, None] * COLUMNS + column[None, :], mask=stored, other=0.0)
    stop = (first_row - first_column + 1 + row)[:, None]
    seen = (column[None, :] >= stop - window) & (column[None, :] < tl.minimum(stop, COLUMNS))
    return tl.where(seen, x, float("-inf"))


@triton.jit(do_not_specialize=RUNTIME)
def attend(
    logits,  # [B, H, R, C] float32; what a row does not see has no effect
    v,  # [B, H, all_columns, d] compute type, at the maps' column 0
    output,  # [B, H, all_rows, d] compute type, at the chunk's first row
    statistics,  # [2, B, H, all_rows] float32, maximum and sum of exponentials, at the chunk's first row
    ROWS,
    COLUMNS,
    first_row,  # position of the chunk's row 0
    first_column,  # position of the maps' column 0
    window,
    all_rows,
    all_columns,
    DIM: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pair, pairs, start = place_of_program(ROWS, BM)
    row = start + tl.arange(0, BM)
    logits += pair * ROWS * COLUMNS
    v += pair * all_columns * DIM
    maximum = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    out_a = tl.zeros([BM, DA], tl.float32)
    out_b = out_a
    if DB:
        out_b = tl.zeros([BM, DB], tl.float32)
    first, last = column_range(start, ROWS, COLUMNS, first_row, first_column, window, BM, BN)
    for c0 in range(first, last, BN):
        column = c0 + tl.arange(0, BN)
        x = seen_logits(logits, row, column, ROWS, COLUMNS, first_row, first_column, window)
        higher = tl.maximum(maximum, tl.max(x, 1))
        # A row may not have met a column that it sees: −∞ − (−∞) would be NaN.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(x - finite[:, None])
        shrink = tl.exp(maximum - finite)
        total = total * shrink + tl.sum(p, 1)
        maximum = higher
        p = p.to(v.dtype.element_ty)
        va = load_rows(v, c0, DIM, COLUMNS, 0, DA, DIM, BN)
        out_a = tl.dot(p, va, out_a * shrink[:, None], input_precision=PRECISION)
        if DB:
            vb = load_rows(v, c0, DIM, COLUMNS, DA, DB, DIM, BN)
            out_b = tl.dot(p, vb, out_b * shrink[:, None], input_precision=PRECISION)
    total = tl.where(row < ROWS, total, 1.0)
    output += pair * all_rows * DIM
    store_rows(output, out_a / total[:, None], start, ROWS, 0, DA, DIM, BM)
    if DB:
        store_rows(output, out_b / total[:, None], start, ROWS, DA, DB, DIM, BM)
    of_row = statistics + pair * all_rows + row
    tl.store(of_row, maximum, mask=row < ROWS)
    tl.store(of_row + pairs * all_rows, total, mask=row < ROWS)


@triton.jit
def probabilities_and_products(
    logits,
    v,
    ga,
    gb,
    top,
    total,
    c0,
    row,
    ROWS,
    COLUMNS,
    first_row,
    first_column,
    window,
    DIM: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P, zero where a row does not see the column, and dP = dO·Vᵀ, both float32 [BM, BN], from column c0 on."""
    va = load_rows(v, c0, DIM, COLUMNS, 0, DA, DIM, BN)
    products = tl.dot(ga, tl.trans(va), input_precision=PRECISION)
    if DB:
        vb = load_rows(v, c0, DIM, COLUMNS, DA, DB, DIM, BN)
        products = tl.dot(gb, tl.trans(vb), products, input_precision=PRECISION)
    x = seen_logits(logits, row, c0 + tl.arange(0, BN), ROWS, COLUMNS, first_row, first_column, window)
    return tl.exp(x - top[:, None]) / total[:, None], products


@triton.jit
def store_zeros(tiles, row, first, last, ROWS, COLUMNS, BM: tl.constexpr, BN: tl.constexpr):
    """Zeros in the columns first … last − 1 of BM rows of a map [R, C]."""
    zeros = tl.zeros([BM, BN], tiles.dtype.element_ty)
    for c0 in range(first, last, BN):
        column = c0 + tl.arange(0, BN)
        stored = (row < ROWS)[:, None] & (column < last)[None, :]
        tl.store(tiles + row[:, None] * COLUMNS + column[None, :], zeros, mask=stored)


@triton.jit(do_not_specialize=RUNTIME)
def attend_backward(
    logits,  # [B, H, R, C] float32; holds their gradient afterwards, where a row sees the column
    probabilities,  # [B, H, R, C] compute type, written whole: zero where a row does not see the column
    v,  # [B, H, all_columns, d] compute type, at the maps' column 0
    output_gradient,  # [B, H, all_rows, d] compute type, at the chunk's first row
    statistics,  # [2, B, H, all_rows] float32, maximum and sum of exponentials, at the chunk's first row
    ROWS,
    COLUMNS,
    first_row,
    first_column,
    window,
    all_rows,
    all_columns,
    DIM: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dL = P ∘ (dP − Σ P ∘ dP), dP = dO·Vᵀ computed twice rather than stored.

    The sum is taken over the row's own products and not as dO·O: where one probability is nearly 1 the difference
    cancels, and the rounding of O to a half type would stay (four to eight times plain PyTorch's error in float16).
    Maximum and sum are kept apart and not as one logarithm, whose rounding scales a whole row of P: then the row of dL
    no longer sums to zero, on which Conv1's constant depends.
    """
    pair, pairs, start = place_of_program(ROWS, BM)
    row = start + tl.arange(0, BM)
    maps = pair * ROWS * COLUMNS
    logits += maps
    probabilities += maps
    v += pair * all_columns * DIM
    output_gradient += pair * all_rows * DIM
    of_row = statistics + pair * all_rows + row
    top = tl.load(of_row, mask=row < ROWS, other=0.0)
    total = tl.load(of_row + pairs * all_rows, mask=row < ROWS, other=1.0)
    ga = load_rows(output_gradient, start, DIM, ROWS, 0, DA, DIM, BM)
    gb = ga
    if DB:
        gb = load_rows(output_gradient, start, DIM, ROWS, DA, DB, DIM, BM)
    first, last = column_range(start, ROWS, COLUMNS, first_row, first_column, window, BM, BN)
    # fmt: off
    mean = tl.zeros([BM], tl.float32)
    for c0 in range(first, last, BN):
        p, products = probabilities_and_products(logits, v, ga, gb, top, total, c0, row, ROWS, COLUMNS, first_row,
                                                 first_column, window, DIM, DA, DB, BN, PRECISION)
        mean += tl.sum(p * products, 1)
    for c0 in range(first, last, BN):
        p, products = probabilities_and_products(logits, v, ga, gb, top, total, c0, row, ROWS, COLUMNS, first_row,
                                                 first_column, window, DIM, DA, DB, BN, PRECISION)
        # fmt: on
        column = c0 + tl.arange(0, BN)
        stored = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        place = row[:, None] * COLUMNS + column[None, :]
        tl.store(logits + place, p * (products - mean[:, None]), mask=stored)
        tl.store(probabilities + place, p.to(probabilities.dtype.element_ty), mask=stored)
    store_zeros(probabilities, row, 0, first, ROWS, COLUMNS, BM, BN)
    store_zeros(probabilities, row, first + tl.cdiv(last - first, BN) * BN, COLUMNS, ROWS, COLUMNS, BM, BN)

"""From the logits of a chunk to its output, and from the output's gradient to that of the logits.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension, in two parts as
in `kernels.rows`. One program: BLOCK_M rows of one head, in blocks of BLOCK_N columns. Grid: row blocks · H · B.
The softmax is online (Dao 2023, FlashAttention-2, algorithm 1), its maximum and its sum kept apart.
"""

import triton
import triton.language as tl

from kernels.rows import load_rows, store_rows

RUNTIME = ["R", "first_row", "first_column", "window", "R_total", "C_total"]
"""C is not among them: a compiler that knows it to be a multiple of 16 reads four logits at a time."""


@triton.jit
def place_of_program(R, BLOCK_M: tl.constexpr):
    """The (batch, head) of a program, how many of these there are, and the program's first row."""
    blocks = tl.cdiv(R, BLOCK_M)
    program = tl.program_id(0)
    pairs = (tl.num_programs(0) // blocks).to(tl.int64)
    return (program // blocks).to(tl.int64), pairs, program % blocks * BLOCK_M


@triton.jit
def column_range(start, R, C, first_row, first_column, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the blocks of columns begin and end of which one of BLOCK_M rows sees something."""
    stop = first_row - first_column + 1 + start  # of the first row
    first = tl.maximum(stop - window, 0) // BLOCK_N * BLOCK_N
    return first, tl.minimum(stop + tl.minimum(BLOCK_M, R - start) - 1, C)


@triton.jit
def seen_logits(logits_ptr, row, column, R, C, first_row, first_column, window):
    """Logits [BLOCK_M, BLOCK_N], −∞ where a row does not see the column.

    What it does not see is loaded all the same and dropped: a mask that differs along a row would forbid wide loads.
    """
    stored = (row < R)[:, None] & (column < C)[None, :]
    x = tl.load(logits_ptr + row[:, None] * C + column[None, :], mask=stored, other=0.0)
    stop = (first_row - first_column + 1 + row)[:, None]
    seen = (column[None, :] >= stop - window) & (column[None, :] < tl.minimum(stop, C))
    return tl.where(seen, x, float("-inf"))


@triton.jit(do_not_specialize=RUNTIME)
def _attend_fwd_kernel(
    logits_ptr,  # [B, H, R, C] float32; what a row does not see has no effect
    v_ptr,  # [B, H, C_total, d] compute type, at the maps' column 0
    o_ptr,  # [B, H, R_total, d] compute type, at the chunk's first row
    stats_ptr,  # [2, B, H, R_total] float32, maximum and sum of exponentials, at the chunk's first row
    R,
    C,
    first_row,  # position of the chunk's row 0
    first_column,  # position of the maps' column 0
    window,
    R_total,
    C_total,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """O = softmax(L)·V."""
    pair, pairs, start = place_of_program(R, BLOCK_M)
    row = start + tl.arange(0, BLOCK_M)
    logits_ptr += pair * R * C
    v_ptr += pair * C_total * HEAD_DIM
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    o_a = tl.zeros([BLOCK_M, BLOCK_DA], tl.float32)
    o_b = o_a
    if BLOCK_DB:
        o_b = tl.zeros([BLOCK_M, BLOCK_DB], tl.float32)
    first, last = column_range(start, R, C, first_row, first_column, window, BLOCK_M, BLOCK_N)
    for c0 in range(first, last, BLOCK_N):
        column = c0 + tl.arange(0, BLOCK_N)
        x = seen_logits(logits_ptr, row, column, R, C, first_row, first_column, window)
        higher = tl.maximum(maximum, tl.max(x, 1))
        # A row may not have met a column that it sees: −∞ − (−∞) would be NaN.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(x - finite[:, None])
        shrink = tl.exp(maximum - finite)
        total = total * shrink + tl.sum(p, 1)
        maximum = higher
        p = p.to(v_ptr.dtype.element_ty)
        v_a = load_rows(v_ptr, c0, HEAD_DIM, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
        o_a = tl.dot(p, v_a, o_a * shrink[:, None], input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            v_b = load_rows(v_ptr, c0, HEAD_DIM, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)
            o_b = tl.dot(p, v_b, o_b * shrink[:, None], input_precision=INPUT_PRECISION)
    total = tl.where(row < R, total, 1.0)
    o_ptr += pair * R_total * HEAD_DIM
    store_rows(o_ptr, o_a / total[:, None], start, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
    if BLOCK_DB:
        store_rows(o_ptr, o_b / total[:, None], start, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
    of_row = stats_ptr + pair * R_total + row
    tl.store(of_row, maximum, mask=row < R)
    tl.store(of_row + pairs * R_total, total, mask=row < R)


@triton.jit
def probabilities_and_products(
    logits_ptr,
    v_ptr,
    block,
    extent,
    c0,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """P, zero where a row does not see the column, and dP = dO·Vᵀ, both float32, from column c0 on."""
    do_a, do_b, top, total, row = block
    R, C, first_row, first_column, window = extent
    v_a = load_rows(v_ptr, c0, HEAD_DIM, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
    products = tl.dot(do_a, tl.trans(v_a), input_precision=INPUT_PRECISION)
    if BLOCK_DB:
        v_b = load_rows(v_ptr, c0, HEAD_DIM, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)
        products = tl.dot(do_b, tl.trans(v_b), products, input_precision=INPUT_PRECISION)
    x = seen_logits(logits_ptr, row, c0 + tl.arange(0, BLOCK_N), R, C, first_row, first_column, window)
    return tl.exp(x - top[:, None]) / total[:, None], products


@triton.jit
def store_zeros(ptr, row, first, last, R, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros in the columns first … last − 1 of BLOCK_M rows of a map [R, C]."""
    zeros = tl.zeros([BLOCK_M, BLOCK_N], ptr.dtype.element_ty)
    for c0 in range(first, last, BLOCK_N):
        column = c0 + tl.arange(0, BLOCK_N)
        stored = (row < R)[:, None] & (column < last)[None, :]
        tl.store(ptr + row[:, None] * C + column[None, :], zeros, mask=stored)


@triton.jit(do_not_specialize=RUNTIME)
def _attend_bwd_kernel(
    logits_ptr,  # [B, H, R, C] float32, L; dL is written over it where a row sees the column
    p_ptr,  # [B, H, R, C] compute type, P, written whole: zero where a row does not see the column
    v_ptr,  # [B, H, C_total, d] compute type, at the maps' column 0
    do_ptr,  # [B, H, R_total, d] compute type, at the chunk's first row
    stats_ptr,  # [2, B, H, R_total] float32, maximum and sum of exponentials, at the chunk's first row
    R,
    C,
    first_row,
    first_column,
    window,
    R_total,
    C_total,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """dL = P ∘ (dP − Σ P ∘ dP), dP = dO·Vᵀ computed twice rather than stored.

    The sum is taken over the row's own products and not as dO·O: where one probability is nearly 1 the difference
    cancels, and the rounding of O to a half type would stay (four to eight times plain PyTorch's error in float16).
    Maximum and sum are kept apart and not as one logarithm, whose rounding scales a whole row of P: then the row of dL
    no longer sums to zero, on which Conv1's constant depends.
    """
    pair, pairs, start = place_of_program(R, BLOCK_M)
    row = start + tl.arange(0, BLOCK_M)
    maps = pair * R * C
    logits_ptr += maps
    p_ptr += maps
    v_ptr += pair * C_total * HEAD_DIM
    do_ptr += pair * R_total * HEAD_DIM
    of_row = stats_ptr + pair * R_total + row
    top = tl.load(of_row, mask=row < R, other=0.0)
    total = tl.load(of_row + pairs * R_total, mask=row < R, other=1.0)
    do_a = load_rows(do_ptr, start, HEAD_DIM, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
    do_b = do_a
    if BLOCK_DB:
        do_b = load_rows(do_ptr, start, HEAD_DIM, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
    first, last = column_range(start, R, C, first_row, first_column, window, BLOCK_M, BLOCK_N)
    block, extent = (do_a, do_b, top, total, row), (R, C, first_row, first_column, window)
    # fmt: off
    mean = tl.zeros([BLOCK_M], tl.float32)
    for c0 in range(first, last, BLOCK_N):
        p, products = probabilities_and_products(logits_ptr, v_ptr, block, extent, c0, HEAD_DIM, BLOCK_DA, BLOCK_DB,
                                                 BLOCK_N, INPUT_PRECISION)
        mean += tl.sum(p * products, 1)
    for c0 in range(first, last, BLOCK_N):
        p, products = probabilities_and_products(logits_ptr, v_ptr, block, extent, c0, HEAD_DIM, BLOCK_DA, BLOCK_DB,
                                                 BLOCK_N, INPUT_PRECISION)
        # fmt: on
        column = c0 + tl.arange(0, BLOCK_N)
        stored = (row < R)[:, None] & (column < C)[None, :]
        place = row[:, None] * C + column[None, :]
        tl.store(logits_ptr + place, p * (products - mean[:, None]), mask=stored)
        tl.store(p_ptr + place, p.to(p_ptr.dtype.element_ty), mask=stored)
    store_zeros(p_ptr, row, 0, first, R, C, BLOCK_M, BLOCK_N)
    store_zeros(p_ptr, row, first + tl.cdiv(last - first, BLOCK_N) * BLOCK_N, C, R, C, BLOCK_M, BLOCK_N)

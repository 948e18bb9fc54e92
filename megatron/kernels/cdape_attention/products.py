"""Products of a chunk's maps with head rows over visible elements: dV = PᵀdO, dK = dSᵀQ, dQ = dS·K and O = P'·V.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension, in two blocks as in
`kernels.head_dim`. PyTorch's matrix product reads whole maps, half of which are masked. These kernels skip fully masked
tiles, and treat masked elements of other tiles as zero, so that no kernel has to write zeros.
"""

import triton
import triton.language as tl

from megatron.kernels.cdape_attention.partial_sums import add_partial_sums
from megatron.kernels.cdape_attention.scores import column_ranges, load_visible
from megatron.kernels.head_dim import load_rows, store_rows

DO_NOT_SPECIALIZE = ["H", "R", "C", "first_row", "first_column", "window", "R_total", "C_total", "scale"]


@triton.jit
def _add_columns(
    state,
    first,
    last,
    skipped_from,
    skipped,
    pointers,
    row,
    extent,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add columns first … last − 1 to a product's two blocks; those from `skipped_from` on are shifted by `skipped`."""
    out_a, out_b = state
    map_ptr, x_ptr = pointers
    C = extent[1]
    for step in range(first, last, BLOCK_N):
        c0 = step
        if MASKED:
            c0 = tl.where(step < skipped_from, step, step + skipped)
        tile = load_visible(map_ptr, row, c0 + tl.arange(0, BLOCK_N), extent, 0.0, MASKED)
        x = load_rows(x_ptr, c0, HEAD_DIM, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N, MASKED)
        out_a = tl.dot(tile, x, out_a, input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            x = load_rows(x_ptr, c0, HEAD_DIM, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N, MASKED)
            out_b = tl.dot(tile, x, out_b, input_precision=INPUT_PRECISION)
    return out_a, out_b


@triton.jit
def _multiply_rows(
    start,
    pair,
    pointers,
    extent,
    sizes,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute scale · map · x for BLOCK_M rows of a head.

    `pointers` point to the map, to x and to the head's result. `sizes` are the number of rows of x and the row stride
    of the result, in elements.
    """
    map_ptr, x_ptr, out_ptr = pointers
    R, C = extent[0], extent[1]
    map_ptr += pair * R * C
    x_ptr += pair * sizes[0] * HEAD_DIM
    row = start + tl.arange(0, BLOCK_M)
    state = (tl.zeros([BLOCK_M, BLOCK_DA], tl.float32), tl.zeros([BLOCK_M, max(BLOCK_DB, 16)], tl.float32))
    pointers = (map_ptr, x_ptr)
    # fmt: off
    first, whole, end, last = column_ranges(start, extent, BLOCK_M, BLOCK_N)
    state = _add_columns(state, first, last - (end - whole), whole, end - whole, pointers, row, extent, True,
                         HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_N, INPUT_PRECISION)
    state = _add_columns(state, whole, end, 0, 0, pointers, row, extent, False,
                         HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_N, INPUT_PRECISION)
    # fmt: on
    store_rows(out_ptr, state[0] * scale, start, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M, sizes[1])
    if BLOCK_DB:
        store_rows(out_ptr, state[1] * scale, start, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M, sizes[1])


@triton.jit
def row_ranges(start, extent, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first, whole, end, last), which bound the rows that attend to some or all of BLOCK_N columns.

    Rows first … last − 1 attend to some of the columns, rows whole … end − 1 to all.
    With packed documents, no row counts as whole.
    """
    R, C, first_row, first_column, window, document_starts_ptr = extent
    own = first_column - first_row + start  # row of the first column's token
    first = tl.maximum(own, 0) // BLOCK_M * BLOCK_M
    last = tl.maximum(tl.minimum(own + BLOCK_N - 1 + window, R), first)
    whole = tl.cdiv(tl.maximum(own + BLOCK_N - 1, 0), BLOCK_M) * BLOCK_M
    end = tl.where(start + BLOCK_N <= C, tl.minimum(own + window, R) // BLOCK_M * BLOCK_M, 0)
    if document_starts_ptr is not None:
        end = 0 * end
    whole = tl.minimum(whole, last)
    return first, whole, tl.maximum(end, whole), last


@triton.jit
def _add_rows(
    state,
    first,
    last,
    skipped_from,
    skipped,
    pointers,
    start,
    extent,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add rows first … last − 1 to a transposed product's two blocks; rows from `skipped_from` on are shifted."""
    out_a, out_b = state
    map_ptr, x_ptr, x_stride = pointers
    R, _, _, first_column, _, document_starts_ptr = extent
    for step in range(first, last, BLOCK_M):
        r0 = step
        if MASKED:
            r0 = tl.where(step < skipped_from, step, step + skipped)
        is_seen = True
        if document_starts_ptr is not None:  # document starts are nondecreasing, so all of the block's rows start later
            is_seen = tl.load(document_starts_ptr + r0) - first_column < start + BLOCK_N
        if is_seen:
            row = r0 + tl.arange(0, BLOCK_M)
            tile = tl.trans(load_visible(map_ptr, row, start + tl.arange(0, BLOCK_N), extent, 0.0, MASKED))
            x = load_rows(x_ptr, r0, x_stride, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M, MASKED)
            out_a = tl.dot(tile, x, out_a, input_precision=INPUT_PRECISION)
            if BLOCK_DB:
                x = load_rows(x_ptr, r0, x_stride, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M, MASKED)
                out_b = tl.dot(tile, x, out_b, input_precision=INPUT_PRECISION)
    return out_a, out_b


@triton.jit
def _multiply_columns(
    start,
    pointers,
    stride_row,
    extent,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADD: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute mapᵀ · x, or add it to the result, for BLOCK_N columns of a head.

    Pointers are those of the head's map, of x and of the result.
    """
    map_ptr, x_ptr, out_ptr = pointers
    C = extent[1]
    out_a = tl.zeros([BLOCK_N, BLOCK_DA], tl.float32)
    out_b = tl.zeros([BLOCK_N, max(BLOCK_DB, 16)], tl.float32)
    if ADD:
        out_a += load_rows(out_ptr, start, HEAD_DIM, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
        if BLOCK_DB:
            out_b += load_rows(out_ptr, start, HEAD_DIM, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)
    pointers = (map_ptr, x_ptr, stride_row)
    # fmt: off
    first, whole, end, last = row_ranges(start, extent, BLOCK_M, BLOCK_N)
    state = _add_rows((out_a, out_b), first, last - (end - whole), whole, end - whole, pointers, start, extent, True,
                      HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION)
    state = _add_rows(state, whole, end, 0, 0, pointers, start, extent, False,
                      HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION)
    # fmt: on
    store_rows(out_ptr, state[0], start, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
    if BLOCK_DB:
        store_rows(out_ptr, state[1], start, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)


@triton.jit(do_not_specialize=["H", "R", "C", "first_row", "first_column", "window", "C_total"])
def _multiply_kernel(
    map_ptr,  # [B, H, R, C] compute type, read where a row sees the column
    x_ptr,  # [B, H, C_total, d] compute type, at the maps' column 0
    out_ptr,  # [B, H, R, d] compute type, the chunk's rows; the last dimension is contiguous
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    H,
    R,
    C,
    first_row,
    first_column,
    window,
    C_total,
    stride_batch,
    stride_head,
    stride_row,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute out = map · x for BLOCK_M rows of a head. Grid: rows, longest first; heads of the whole batch."""
    start, pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M, tl.program_id(1).to(tl.int64)
    out_ptr += pair // H * stride_batch + pair % H * stride_head
    if document_starts_ptr is not None:
        document_starts_ptr += pair // H * R
    extent = (R, C, first_row, first_column, window, document_starts_ptr)
    # fmt: off
    _multiply_rows(start, pair, (map_ptr, x_ptr, out_ptr), extent, (C_total, stride_row), 1.0,
                   HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION)
    # fmt: on


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _differentiate_qkv_kernel(
    dscores_ptr,  # dS, [B, H, R, C] compute type, read where a row sees the column
    probabilities_ptr,  # P, like dS
    q_ptr,  # scaled queries [B, H, R_total, d] compute type, at the chunk's first row
    k_ptr,  # [B, H, C_total, d] compute type, at the maps' column 0
    dout_ptr,  # [B, H, R, d] compute type, the chunk's rows; the last dimension is contiguous
    dq_ptr,  # like q: written
    dk_ptr,  # like k, compute type or float32: written, or added to
    dv_ptr,  # like dk
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    partial_sums,  # sums of partial results, from `partial_sums.build_sum_arguments`
    H,
    R,
    C,
    first_row,
    first_column,
    window,
    R_total,
    C_total,
    scale,
    stride_batch,
    stride_head,
    stride_row,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADD: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    SUMS_M: tl.constexpr,
    SUMS_N: tl.constexpr,
):
    """Compute a chunk's dq = scale · dS · k, dk = dSᵀ · q and dv = Pᵀ · dO, and sum partial results.

    Grid: twice the blocks of rows or columns; heads of the whole batch; 2. The first half of a head's programs computes
    dq and the second dk, so that dS is read from memory once and then from the L2 cache. Programs of dv and of the sums
    follow, in two halves again, while the last programs of dq still run. The last rows and the first columns have the
    most entries, so the longest programs of each product start first.
    """
    blocks = tl.num_programs(0) // 2
    index, pair = tl.program_id(0) % blocks, tl.program_id(1).to(tl.int64)
    result = tl.program_id(0) // blocks + 2 * tl.program_id(2)
    if document_starts_ptr is not None:
        document_starts_ptr += pair // H * R
    extent = (R, C, first_row, first_column, window, document_starts_ptr)
    of_columns = pair * C_total * HEAD_DIM
    # fmt: off
    if result == 0:
        start = (tl.cdiv(R, BLOCK_M) - 1 - index) * BLOCK_M
        if start >= 0:
            pointers = (dscores_ptr, k_ptr, dq_ptr + pair * R_total * HEAD_DIM)
            _multiply_rows(start, pair, pointers, extent, (C_total, HEAD_DIM), scale,
                           HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION)
    elif result == 1:
        if index * BLOCK_N < C:
            pointers = (dscores_ptr + pair * R * C, q_ptr + pair * R_total * HEAD_DIM, dk_ptr + of_columns)
            _multiply_columns(index * BLOCK_N, pointers, HEAD_DIM, extent,
                              HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, ADD, INPUT_PRECISION)
    elif result == 2:
        if index * BLOCK_N < C:
            dout_ptr += pair // H * stride_batch + pair % H * stride_head
            pointers = (probabilities_ptr + pair * R * C, dout_ptr, dv_ptr + of_columns)
            _multiply_columns(index * BLOCK_N, pointers, stride_row, extent,
                              HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, ADD, INPUT_PRECISION)
    else:
        add_partial_sums(partial_sums, tl.program_id(1) * blocks + index, tl.num_programs(1) * blocks,
                         ADD, SUMS_M, SUMS_N)
    # fmt: on

"""Softmax kernels: from a chunk's logits to its output, and from the output's gradient to the logits' gradient.

B batch, H heads, R query rows of the chunk, C columns of its maps, d head dimension, in two blocks as in
`kernels.head_dim`. A program of the first two kernels processes BLOCK_M rows of one head in blocks of BLOCK_N columns;
their grid is row blocks · H · B. The third kernel has one program per tile of all heads, since it stores heads last
(`scores.py`). The softmax is online (Dao 2023, FlashAttention-2, algorithm 1), with separate maximum and sum. The
maximum is in base 2 and is rounded once for both passes; the sum cancels the rounding error.
"""

import triton
import triton.language as tl

from megatron.kernels.cdape_attention.scores import (
    SMALL_GROUP,
    column_ranges,
    head_products,
    is_visible,
    join_tiles,
    load_visible,
    store_group,
    store_map_tile,
)
from megatron.kernels.head_dim import load_rows, store_rows

LOG2E = tl.constexpr(1.4426950408889634)
DO_NOT_SPECIALIZE = ["R", "first_row", "first_column", "window", "R_total", "C_total"]
"""Arguments not specialized. C is specialized: if it is a multiple of 16, the compiler loads four logits at a time."""


@triton.jit
def program_position(R, BLOCK_M: tl.constexpr):
    """Return the (batch, head) index of a program, the number of such pairs, and the program's first row."""
    blocks = tl.cdiv(R, BLOCK_M)
    program = tl.program_id(0)
    pairs = (tl.num_programs(0) // blocks).to(tl.int64)
    return (program // blocks).to(tl.int64), pairs, program % blocks * BLOCK_M


@triton.jit
def _attend_fwd_columns(
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
    """Add columns first … last − 1 to (maximum, sums, output in two blocks); those from `skipped_from` on are shifted.

    The maximum is in base 2. A row's sums, one for each column of a block, are added after the last block, so that no
    block needs shuffles for them.
    """
    maximum, totals, o_a, o_b = state
    logits_ptr, v_ptr = pointers
    C = extent[1]
    for step in range(first, last, BLOCK_N):
        c0 = step
        if MASKED:
            c0 = tl.where(step < skipped_from, step, step + skipped)
        column = c0 + tl.arange(0, BLOCK_N)
        x = load_visible(logits_ptr, row, column, extent, float("-inf"), MASKED)
        higher = tl.maximum(maximum, tl.max(x, 1) * LOG2E)
        # Without this, a row that has no visible column yet would compute −∞ − (−∞) = NaN.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(x * LOG2E - finite[:, None])
        shrink = tl.exp2(maximum - finite)
        maximum = higher
        weights = p.to(v_ptr.dtype.element_ty)
        v_a = load_rows(v_ptr, c0, HEAD_DIM, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N, MASKED)
        o_a = tl.dot(weights, v_a, o_a * shrink[:, None], input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            v_b = load_rows(v_ptr, c0, HEAD_DIM, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N, MASKED)
            o_b = tl.dot(weights, v_b, o_b * shrink[:, None], input_precision=INPUT_PRECISION)
        totals = totals * shrink[:, None] + p
    return maximum, totals, o_a, o_b


@triton.jit
def find_residue(x, ptr):
    """Return the rounding error of float32 x in the type that `ptr` points to: x minus its rounded value."""
    return x - x.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _attend_fwd_kernel(
    logits_ptr,  # [B, H, R, C] float32; entries that a row does not see have no effect
    v_ptr,  # [B, H, C_total, d] compute type, at the maps' column 0
    o_ptr,  # [B, H, R_total, d] compute type, of any strides but the last, at the chunk's first row
    residue_ptr,  # rounding error of O, in its type and with its strides, or None
    stats_ptr,  # [2, B, H, R_total] float32, maximum (in base 2) and sum of exponentials, at the chunk's first row
    sinks_ptr,  # [H] float32, or None: keys with these logits and no value, which the stats include
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    R,
    C,
    first_row,  # position of the chunk's row 0
    first_column,  # position of the maps' column 0
    window,
    R_total,
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
    H: tl.constexpr,
):
    """Compute O = softmax(L)·V."""
    pair, pairs, start = program_position(R, BLOCK_M)
    if document_starts_ptr is not None:
        document_starts_ptr += pair // H * R
    extent = (R, C, first_row, first_column, window, document_starts_ptr)
    row = start + tl.arange(0, BLOCK_M)
    logits_ptr += pair * R * C
    v_ptr += pair * C_total * HEAD_DIM
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if sinks_ptr is not None:
        maximum = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + pair % H) * LOG2E
        totals += tl.where(tl.arange(0, BLOCK_N)[None, :] == 0, 1.0, 0.0)
    o_a = tl.zeros([BLOCK_M, BLOCK_DA], tl.float32)
    o_b = o_a
    if BLOCK_DB:
        o_b = tl.zeros([BLOCK_M, BLOCK_DB], tl.float32)
    # fmt: off
    first, whole, end, last = column_ranges(start, extent, BLOCK_M, BLOCK_N)
    state = (maximum, totals, o_a, o_b)
    pointers = (logits_ptr, v_ptr)
    state = _attend_fwd_columns(state, first, last - (end - whole), whole, end - whole, pointers, row, extent, True,
                                HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_N, INPUT_PRECISION)
    state = _attend_fwd_columns(state, whole, end, 0, 0, pointers, row, extent, False,
                                HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_N, INPUT_PRECISION)
    # fmt: on
    maximum, totals, o_a, o_b = state
    total = tl.where(row < R, tl.sum(totals, 1), 1.0)
    of_head = pair // H * stride_batch + pair % H * stride_head
    o_ptr += of_head
    store_rows(o_ptr, o_a / total[:, None], start, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M, stride_row)
    if BLOCK_DB:
        store_rows(o_ptr, o_b / total[:, None], start, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M, stride_row)
    if residue_ptr is not None:
        residue_ptr += of_head
        o_a = find_residue(o_a / total[:, None], o_ptr)
        store_rows(residue_ptr, o_a, start, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M, stride_row)
        if BLOCK_DB:
            o_b = find_residue(o_b / total[:, None], o_ptr)
            store_rows(residue_ptr, o_b, start, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M, stride_row)
    of_row = stats_ptr + pair * R_total + row
    tl.store(of_row, maximum, mask=row < R)
    tl.store(of_row + pairs * R_total, total, mask=row < R)


@triton.jit
def _attend_sums_columns(
    products,
    first,
    last,
    skipped_from,
    skipped,
    pointers,
    of_rows,
    extent,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add exp(L − maximum) ∘ dP of columns to `products`, the columns and sums as in `_attend_fwd_columns`."""
    logits_ptr, v_ptr = pointers
    row, top, do_a, do_b = of_rows
    C = extent[1]
    for step in range(first, last, BLOCK_N):
        c0 = step
        if MASKED:
            c0 = tl.where(step < skipped_from, step, step + skipped)
        v_a = load_rows(v_ptr, c0, HEAD_DIM, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N, MASKED)
        dp = tl.dot(do_a, tl.trans(v_a), input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            v_b = load_rows(v_ptr, c0, HEAD_DIM, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N, MASKED)
            dp = tl.dot(do_b, tl.trans(v_b), dp, input_precision=INPUT_PRECISION)
        column = c0 + tl.arange(0, BLOCK_N)
        x = load_visible(logits_ptr, row, column, extent, float("-inf"), MASKED)
        products += tl.exp2(x * LOG2E - top[:, None]) * dp
    return products


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _attend_sums_kernel(
    logits_ptr,  # [B, H, R, C] float32; entries that a row does not see have no effect
    v_ptr,  # [B, H, C_total, d] compute type, at the maps' column 0
    do_ptr,  # [B, H, R_total, d] compute type, of any strides but the last, at the chunk's first row
    stats_ptr,  # [2, B, H, R_total] float32, maximum (in base 2) and sum of exponentials, at the chunk's first row
    sums_ptr,  # [B, H, R_total] float32, at the chunk's first row
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    R,
    C,
    first_row,
    first_column,
    window,
    R_total,
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
    H: tl.constexpr,
):
    """Compute each row's Σ P ∘ dP, dP = dO·Vᵀ.

    It is summed over the row's own products instead of dO·O. If one probability is nearly 1, the difference dP − Σ
    cancels, and the rounding error of O in a half type would remain (four to eight times plain PyTorch's error in
    float16).
    """
    pair, pairs, start = program_position(R, BLOCK_M)
    if document_starts_ptr is not None:
        document_starts_ptr += pair // H * R
    extent = (R, C, first_row, first_column, window, document_starts_ptr)
    row = start + tl.arange(0, BLOCK_M)
    logits_ptr += pair * R * C
    v_ptr += pair * C_total * HEAD_DIM
    do_ptr += pair // H * stride_batch + pair % H * stride_head
    of_row = pair * R_total + row
    top = tl.load(stats_ptr + of_row, mask=row < R, other=0.0)
    total = tl.load(stats_ptr + pairs * R_total + of_row, mask=row < R, other=1.0)
    do_a = load_rows(do_ptr, start, stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
    do_b = do_a
    if BLOCK_DB:
        do_b = load_rows(do_ptr, start, stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
    products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # fmt: off
    first, whole, end, last = column_ranges(start, extent, BLOCK_M, BLOCK_N)
    pointers = (logits_ptr, v_ptr)
    of_rows = (row, top, do_a, do_b)
    products = _attend_sums_columns(products, first, last - (end - whole), whole, end - whole, pointers, of_rows,
                                    extent, True, HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_N, INPUT_PRECISION)
    products = _attend_sums_columns(products, whole, end, 0, 0, pointers, of_rows,
                                    extent, False, HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_N, INPUT_PRECISION)
    # fmt: on
    tl.store(sums_ptr + of_row, tl.sum(products, 1) / total, mask=row < R)


@triton.jit
def head_gradient(
    pointers,
    row,
    column,
    extent,
    MEMBER: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Compute dL of a group's head on a tile, in the compute type, and store P. Zeros for a padding channel."""
    logits_ptr, v_ptr, do_ptr, stats_ptr, sums_ptr, p_ptr, pairs = pointers
    R, C, first_row, first_column, window, document_starts_ptr, R_total, C_total, stride_head, stride_row = extent
    if MEMBER < HEADS:
        v_ptr += tl.cast(C_total, tl.int64) * (MEMBER * HEAD_DIM)
        do_ptr += tl.cast(stride_head, tl.int64) * MEMBER
        map_start = tl.cast(R, tl.int64) * C * MEMBER
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        of_row = tl.cast(R_total, tl.int64) * MEMBER + rows
        top = tl.load(stats_ptr + of_row, mask=rows < R, other=0.0)
        inverse_sum = 1.0 / tl.load(stats_ptr + pairs * R_total + of_row, mask=rows < R, other=1.0)
        mean = tl.load(sums_ptr + of_row, mask=rows < R, other=0.0)
        # fmt: off
        dp = head_products(do_ptr, v_ptr, row, column, R, C, stride_row, HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M,
                           BLOCK_N, INPUT_PRECISION, MASKED)
        # fmt: on
        of_map = (R, C, first_row, first_column, window, document_starts_ptr)
        x = load_visible(logits_ptr + map_start, rows, columns, of_map, float("-inf"), MASKED)
        p = tl.exp2(x * LOG2E - top[:, None]) * inverse_sum[:, None]
        store_map_tile(p_ptr + map_start, p, rows, columns, R, C, MASKED)
        dlogits = p * (dp - mean[:, None])
    else:
        dlogits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    return dlogits.to(do_ptr.dtype.element_ty)


@triton.jit
def _store_group_gradient(
    dlogits_ptr,
    pointers,
    row,
    column,
    extent,
    first_head,
    HEADS: tl.constexpr,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store P and dL of a group of HEADS heads, at most COUNT, starting at `first_head`, on a tile."""
    logits_ptr, v_ptr, do_ptr, stats_ptr, sums_ptr, p_ptr, pairs = pointers
    R, C, _, _, _, _, R_total, C_total, stride_head, _ = extent
    map_start = tl.cast(R, tl.int64) * C * first_head
    of_rows = tl.cast(R_total, tl.int64) * first_head
    pointers = (
        logits_ptr + map_start,
        v_ptr + tl.cast(C_total, tl.int64) * (first_head * HEAD_DIM),
        do_ptr + tl.cast(stride_head, tl.int64) * first_head,
        stats_ptr + of_rows,
        sums_ptr + of_rows,
        p_ptr + map_start,
        pairs,
    )
    tiles = ()
    for member in tl.static_range(COUNT):
        # fmt: off
        tile = head_gradient(pointers, row, column, extent, member, HEADS,
                             HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, MASKED)
        # fmt: on
        tiles += (tile,)  # type: ignore[assignment]
    store_group(dlogits_ptr + first_head, join_tiles(tiles), row, column, R, C, CHANNELS, BLOCK_M, BLOCK_N, MASKED)


@triton.jit
def _store_gradient(
    dlogits_ptr,
    pointers,
    row,
    column,
    extent,
    H: tl.constexpr,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store P and dL of all heads on a tile, by groups as in `scores.py`.

    Unless MASKED, all rows attend to all columns.
    """
    WHOLE: tl.constexpr = H // COUNT * COUNT
    # fmt: off
    for first_head in range(0, WHOLE, COUNT):
        _store_group_gradient(dlogits_ptr, pointers, row, column, extent, first_head, COUNT, COUNT, CHANNELS,
                              HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, MASKED)
    for first_head in tl.static_range(WHOLE, CHANNELS, COUNT):
        _store_group_gradient(dlogits_ptr, pointers, row, column, extent, first_head, H - first_head, COUNT, CHANNELS,
                              HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, MASKED)
    # fmt: on


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _attend_bwd_kernel(
    logits_ptr,  # [B, H, R, C] float32; entries that a row does not see have no effect
    v_ptr,  # [B, H, C_total, d] compute type, at the maps' column 0
    do_ptr,  # [B, H, R_total, d] compute type, of any strides but the last, at the chunk's first row
    stats_ptr,  # [2, B, H, R_total] float32, maximum (in base 2) and sum of exponentials, at the chunk's first row
    sums_ptr,  # [B, H, R_total] float32, from _attend_sums_kernel, at the chunk's first row
    p_ptr,  # [B, H, R, C] compute type, P, written in tiles with a column that a row sees
    dlogits_ptr,  # [B, R, C, CHANNELS] compute type, dL, written in tiles with a column that a row sees
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    R,
    C,
    first_row,
    first_column,
    window,
    R_total,
    C_total,
    stride_batch,
    stride_head,
    stride_row,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COUNT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute dL = P ∘ (dP − Σ P ∘ dP), dP = dO·Vᵀ, for a tile of all heads. Grid: columns, rows, batch.

    Maximum and sum are separate instead of one logarithm, whose rounding error scales a whole row of P: the row of dL
    would no longer sum to zero, which Conv1's constant relies on.
    """
    column, row, batch = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M, tl.program_id(2).to(tl.int64)
    pairs = tl.num_programs(2).to(tl.int64) * H
    maps = batch * H * R * C
    p_ptr += maps
    if document_starts_ptr is not None:
        document_starts_ptr += batch * R
    if is_visible(row, column, R, first_row, first_column, window, document_starts_ptr, BLOCK_M, BLOCK_N):
        of_rows = batch * H * R_total
        pointers = (
            logits_ptr + maps,
            v_ptr + batch * H * C_total * HEAD_DIM,
            do_ptr + batch * stride_batch,
            stats_ptr + of_rows,
            sums_ptr + of_rows,
            p_ptr,
            pairs,
        )
        dlogits_ptr += batch * R * C * CHANNELS
        # fmt: off
        extent = (R, C, first_row, first_column, window, document_starts_ptr, R_total, C_total, stride_head, stride_row)
        # fmt: on
        stop = first_row - first_column + row + 1  # of the first row
        whole = (column + BLOCK_N <= stop) & (column >= stop + BLOCK_M - 1 - window)
        whole = whole & (row + BLOCK_M <= R) & (column + BLOCK_N <= C)
        if document_starts_ptr is not None:
            last_key = tl.load(document_starts_ptr + tl.minimum(row + BLOCK_M, R) - 1)
            whole = whole & (column >= last_key - first_column)
        # fmt: off
        if whole:
            _store_gradient(dlogits_ptr, pointers, row, column, extent, H, COUNT, CHANNELS,
                            HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, False)
        else:
            _store_gradient(dlogits_ptr, pointers, row, column, extent, H, SMALL_GROUP, CHANNELS,
                            HEAD_DIM, BLOCK_DA, BLOCK_DB, BLOCK_M, BLOCK_N, INPUT_PRECISION, True)
        # fmt: on

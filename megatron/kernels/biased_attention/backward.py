"""Backward kernels: gradients of q and the tables by row blocks, of k and v by column blocks. No atomics.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, G groups of row blocks. P are the
probabilities, delta_i = dout_i · out_i − log2(e) dlse_i (lse in base 2) and dS = P ∘ (dout·vᵀ − delta)
(FlashAttention-2, Dao 2023, algorithm 2). With S = weight(n) · scale · q·k + bias(n) and n = i − j:

    dbias[n] = sum of dS over the diagonal n
    dweight[n] = sum of dS ∘ scale·q·k over the diagonal n
    dq = (dS ∘ weight) k · scale

The gradient of a key's own bias is the sum of dS over its column.
"""

import triton
import triton.language as tl

from megatron.kernels.biased_attention.diagonals import accumulate, sum_diagonals
from megatron.kernels.biased_attention.forward import (
    column_ranges,
    finish_scores,
    load_center,
    load_document_starts,
    load_key_bias,
    select_head,
    visible_mask,
)
from megatron.kernels.biased_attention.tables import (
    LOG2E,
    Tables,
    is_relative,
    joins_bias,
    load_window,
    select_table,
    spread_window,
)
from megatron.kernels.head_dim import load_rows, store_rows

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _bwd_dq_inner(
    state,
    first,
    last,
    block,
    k,
    v,
    tables,
    dtables,
    row,
    sizes,
    document_starts_ptr,
    key_bias_ptr,
    center,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add columns first … last − 1 to dq and the table gradients of the row block at `row`.

    `block` contains q, do, lse and delta of the rows. The state's carries are diagonals of the previous tile that the
    next tile completes.
    """
    dq_a, dq_b, carry_bias, carry_weight = state
    q_a, q_b, do_a, do_b, lse, delta = block
    scale, C, N, window = sizes.scale, sizes.C, sizes.N, sizes.window
    top = sizes.offset + row
    dbias_ptr, dweight_ptr = dtables
    t = tl.arange(0, BLOCK_M)
    IS_RELATIVE: tl.constexpr = is_relative(*tables)
    JOINS_BIAS: tl.constexpr = joins_bias(q_a.dtype)
    values = 0.0
    if IS_RELATIVE:
        values = load_window(tables.bias_ptr, top - first, N, BLOCK_M, BLOCK_N, False)
    for c0 in range(first, last, BLOCK_N):
        k_a = load_rows(k.ptr, c0, k.stride_row, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N, MASKED)
        v_a = load_rows(v.ptr, c0, v.stride_row, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N, MASKED)
        k_b, v_b = k_a, v_a
        products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if IS_RELATIVE:
            bias = spread_window(values, BLOCK_M, BLOCK_N, False)
            if JOINS_BIAS:
                products = bias
            # Triton does not prefetch values that a product is added to, so this loads them one tile ahead.
            next_base = top - c0 - BLOCK_N
            values = load_window(tables.bias_ptr, next_base, N, BLOCK_M, BLOCK_N, False)
        products = tl.dot(q_a, tl.trans(k_a), products, input_precision=INPUT_PRECISION)
        dp = tl.dot(do_a, tl.trans(v_a), input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            k_b = load_rows(k.ptr, c0, k.stride_row, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N, MASKED)
            v_b = load_rows(v.ptr, c0, v.stride_row, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N, MASKED)
            products = tl.dot(q_b, tl.trans(k_b), products, input_precision=INPUT_PRECISION)
            dp = tl.dot(do_b, tl.trans(v_b), dp, input_precision=INPUT_PRECISION)
        if IS_RELATIVE and not JOINS_BIAS:
            products += bias
        scores, weight = finish_scores(products, tables, top - c0, sizes, BLOCK_M, BLOCK_N, False)
        if key_bias_ptr is not None:
            scores += load_key_bias(key_bias_ptr, c0 + tl.arange(0, BLOCK_N), C, center)[None, :]
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            columns = c0 + tl.arange(0, BLOCK_N)[None, :]
            distance = top + tl.arange(0, BLOCK_M)[:, None] - columns
            document_starts = load_document_starts(document_starts_ptr, row + tl.arange(0, BLOCK_M)[:, None], sizes.R)
            p = tl.where(visible_mask(distance, columns, C, window, document_starts, HAS_WINDOW), p, 0.0)
        ds = p * (dp - delta[:, None])
        if dbias_ptr is not None:
            sums, carry_bias = sum_diagonals(ds, carry_bias, BLOCK_M)
            accumulate(dbias_ptr, top - c0 + t, sums, N)
        if dweight_ptr is not None:
            sums, carry_weight = sum_diagonals(ds * products, carry_weight, BLOCK_M)
            accumulate(dweight_ptr, top - c0 + t, sums * scale, N)
        if tables.weight_ptr is not None:
            ds *= weight
        ds = ds.to(k_a.dtype)
        dq_a = tl.dot(ds, k_a, dq_a, input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            dq_b = tl.dot(ds, k_b, dq_b, input_precision=INPUT_PRECISION)
    return dq_a, dq_b, carry_bias, carry_weight


@triton.jit
def _bwd_dq_kernel(
    q,
    k,
    v,
    do,
    tables,
    dtables,
    o,
    lse_ptr,
    dlse_ptr,
    dq_ptr,
    delta_ptr,
    document_starts_ptr,
    key_bias_ptr,
    sizes,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    DO_STRIDE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute dq, delta and partial table gradients. Grid (G groups, B · H).

    A program processes the row blocks of its group in sequence and adds to its own dbias and dweight [B, H, G, N],
    which are zero initially. Partial sums therefore take memory linear in N for any number of row blocks. Tiles are
    square. delta [B, H, R] is written for `_bwd_dkdv_kernel`. lse is in base 2, and so is its gradient dlse [B, H, R],
    which may be absent.
    """
    group, groups = tl.program_id(0), tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    scale, R, N = sizes.scale, sizes.R, sizes.N
    b, h = pair // sizes.H, pair % sizes.H
    q, k = select_head(q, b, h, Q_STRIDE), select_head(k, b, h, K_STRIDE)
    v, do = select_head(v, b, h, V_STRIDE), select_head(do, b, h, DO_STRIDE)
    o = select_head(o, b, h, o.stride_row)
    dq_ptr += pair * R * HEAD_DIM
    tables = Tables(
        select_table(tables.bias_ptr, h, N) if tables.bias_ptr is not None else None,
        select_table(tables.weight_ptr, h, N) if tables.weight_ptr is not None else None,
    )
    own = (pair * groups + group) * N
    dtables = Tables(
        dtables.bias_ptr + own if dtables.bias_ptr is not None else None,
        dtables.weight_ptr + own if dtables.weight_ptr is not None else None,
    )
    if document_starts_ptr is not None:
        document_starts_ptr += b * R
    if key_bias_ptr is not None:
        key_bias_ptr += pair * sizes.C
    blocks = tl.cdiv(R, BLOCK_M)
    t = tl.arange(0, BLOCK_M)
    for step in range(0, tl.cdiv(blocks, groups)):
        # Alternate the direction over the groups, so that each gets long and short rows; the longest come first.
        turn = step % 2
        index = step * groups + turn * (groups - 1 - 2 * group) + group
        start = (blocks - 1 - index) * BLOCK_M
        if index < blocks:
            rows = start + t
            q_a = load_rows(q.ptr, start, q.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
            do_a = load_rows(do.ptr, start, do.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
            o_a = load_rows(o.ptr, start, o.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
            delta = tl.sum(do_a.to(tl.float32) * o_a.to(tl.float32), 1)
            dq_a = tl.zeros([BLOCK_M, BLOCK_DA], tl.float32)
            q_b, do_b, dq_b = q_a, do_a, dq_a
            if BLOCK_DB:
                q_b = load_rows(q.ptr, start, q.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
                do_b = load_rows(do.ptr, start, do.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
                o_b = load_rows(o.ptr, start, o.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
                delta += tl.sum(do_b.to(tl.float32) * o_b.to(tl.float32), 1)
                dq_b = tl.zeros([BLOCK_M, BLOCK_DB], tl.float32)
            if dlse_ptr is not None:
                delta -= tl.load(dlse_ptr + pair * R + rows, mask=rows < R, other=0.0) * LOG2E
            tl.store(delta_ptr + pair * R + rows, delta, mask=rows < R)
            # Rows beyond R: exp2(… − inf) = 0.
            lse = tl.load(lse_ptr + pair * R + rows, mask=rows < R, other=float("inf"))
            carry = (tl.zeros([BLOCK_M // 16, 8, 8], tl.float32), tl.zeros([BLOCK_M // 2, BLOCK_M], tl.float32))
            state = (dq_a, dq_b, carry, carry)
            top = sizes.offset + start
            center = load_center(key_bias_ptr, top, sizes.C)
            if key_bias_ptr is not None:
                lse += load_key_bias(key_bias_ptr, top + t, sizes.C, center)
            first, full, partial, last = column_ranges(start, sizes, document_starts_ptr, BLOCK_M, BLOCK_N, HAS_WINDOW)
            block = (q_a, q_b, do_a, do_b, lse, delta)
            # fmt: off
            if HAS_WINDOW or document_starts_ptr is not None:
                state = _bwd_dq_inner(state, first, full, block, k, v, tables, dtables, start, sizes,
                                      document_starts_ptr,
                                      key_bias_ptr, center, True, HAS_WINDOW, BLOCK_M, BLOCK_N,
                                      BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
            state = _bwd_dq_inner(state, full, partial, block, k, v, tables, dtables, start, sizes, document_starts_ptr,
                                  key_bias_ptr, center, False, HAS_WINDOW, BLOCK_M, BLOCK_N,
                                  BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
            state = _bwd_dq_inner(state, partial, last, block, k, v, tables, dtables, start, sizes, document_starts_ptr,
                                  key_bias_ptr, center, True, HAS_WINDOW, BLOCK_M, BLOCK_N,
                                  BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
            # fmt: on
            dq_a, dq_b, carry_bias, carry_weight = state
            # Add the diagonals left by the last tile, which started at the last multiple of BLOCK_N before `last`.
            n = top - tl.cdiv(last, BLOCK_N) * BLOCK_N + t
            nothing = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
            if dtables.bias_ptr is not None:
                sums, _ = sum_diagonals(nothing, carry_bias, BLOCK_M)
                accumulate(dtables.bias_ptr, n, sums, N)
            if dtables.weight_ptr is not None:
                sums, _ = sum_diagonals(nothing, carry_weight, BLOCK_M)
                accumulate(dtables.weight_ptr, n, sums * scale, N)
            # Factor not yet applied in the tiles: scale, or ln(2) if the weights include scale · log2(e).
            factor = scale
            if tables.weight_ptr is not None:
                factor = LN2
            store_rows(dq_ptr, dq_a * factor, start, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
            if BLOCK_DB:
                store_rows(dq_ptr, dq_b * factor, start, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
        # The next row block adds to the same addresses from other threads.
        tl.debug_barrier()


@triton.jit
def count_rows(document_starts_ptr, column, R):
    """Count the rows whose first key is at most `column`; these rows come first.

    The search divides the range by 128 per step, because its loads depend on each other.
    """
    PIECES: tl.constexpr = 128
    count = column * 0
    step = count + tl.cdiv(R, PIECES)
    while step > 0:
        # Compare the last row of each piece of `step` rows: the whole piece counts if its last row does.
        rows = count + (tl.arange(0, PIECES) + 1) * step - 1
        document_starts = tl.load(document_starts_ptr + rows, mask=rows < R, other=column + 1)
        count += tl.sum((document_starts <= column).to(tl.int32), 0) * step
        step = tl.where(step > 1, tl.cdiv(step, PIECES), 0)
    return count


@triton.jit
def _bwd_dkdv_inner(
    state,
    first,
    last,
    skipped_from,
    skipped,
    block,
    q,
    do,
    lse_ptr,
    delta_ptr,
    tables,
    c0,
    sizes,
    document_starts_ptr,
    key_bias_ptr,
    dkey_bias_ptr,
    center,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add rows first … last − 1 to dk, dv and the key bias gradient of one column block.

    Rows from `skipped_from` on are shifted by `skipped`. Tiles are transposed: [BLOCK_N, BLOCK_M]. Unless MASKED, all
    rows exist and attend to all columns.
    """
    dk_a, dk_b, dv_a, dv_b, dkey_bias = state
    k_a, k_b, v_a, v_b = block
    R, C, N, offset, window = sizes.R, sizes.C, sizes.N, sizes.offset, sizes.window
    IS_RELATIVE: tl.constexpr = is_relative(*tables)
    JOINS_BIAS: tl.constexpr = joins_bias(q.ptr.dtype.element_ty)
    values = 0.0
    if IS_RELATIVE:
        r0 = first
        if MASKED:
            r0 = tl.where(first < skipped_from, first, first + skipped)
        values = load_window(tables.bias_ptr, offset + r0 - c0, N, BLOCK_M, BLOCK_N, True)
    for step in range(first, last, BLOCK_M):
        r0 = step
        next_r0 = step + BLOCK_M
        if MASKED:
            r0 = tl.where(r0 < skipped_from, r0, r0 + skipped)
            next_r0 = tl.where(next_r0 < skipped_from, next_r0, next_r0 + skipped)
        rows = r0 + tl.arange(0, BLOCK_M)
        if MASKED:
            lse = tl.load(lse_ptr + rows, mask=rows < R, other=float("inf"))
            delta = tl.load(delta_ptr + rows, mask=rows < R, other=0.0)
        else:
            lse, delta = tl.load(lse_ptr + rows), tl.load(delta_ptr + rows)
        q_a = load_rows(q.ptr, r0, q.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M, MASKED)
        do_a = load_rows(do.ptr, r0, do.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M, MASKED)
        q_b, do_b = q_a, do_a
        products = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if IS_RELATIVE:
            bias = spread_window(values, BLOCK_M, BLOCK_N, True)
            if JOINS_BIAS:
                products = bias
            next_base = offset + next_r0 - c0
            values = load_window(tables.bias_ptr, next_base, N, BLOCK_M, BLOCK_N, True)
        products = tl.dot(k_a, tl.trans(q_a), products, input_precision=INPUT_PRECISION)
        dp = tl.dot(v_a, tl.trans(do_a), input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            q_b = load_rows(q.ptr, r0, q.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M, MASKED)
            do_b = load_rows(do.ptr, r0, do.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M, MASKED)
            products = tl.dot(k_b, tl.trans(q_b), products, input_precision=INPUT_PRECISION)
            dp = tl.dot(v_b, tl.trans(do_b), dp, input_precision=INPUT_PRECISION)
        if IS_RELATIVE and not JOINS_BIAS:
            products += bias
        scores, weight = finish_scores(products, tables, offset + r0 - c0, sizes, BLOCK_M, BLOCK_N, True)
        if key_bias_ptr is not None:
            scores += load_key_bias(key_bias_ptr, c0 + tl.arange(0, BLOCK_N), C, center)[:, None]
            lse += load_key_bias(key_bias_ptr, offset + rows, C, center)
        p = tl.exp2(scores - lse[None, :])
        if MASKED:
            columns = c0 + tl.arange(0, BLOCK_N)[:, None]
            document_starts = load_document_starts(document_starts_ptr, rows[None, :], R)
            distance = offset + rows[None, :] - columns
            p = tl.where(visible_mask(distance, columns, C, window, document_starts, HAS_WINDOW), p, 0.0)
        dv_a = tl.dot(p.to(do_a.dtype), do_a, dv_a, input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            dv_b = tl.dot(p.to(do_b.dtype), do_b, dv_b, input_precision=INPUT_PRECISION)
        ds = p * (dp - delta[None, :])
        if dkey_bias_ptr is not None:
            dkey_bias += tl.sum(ds, 1)
        if tables.weight_ptr is not None:
            ds *= weight
        ds = ds.to(q_a.dtype)
        dk_a = tl.dot(ds, q_a, dk_a, input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            dk_b = tl.dot(ds, q_b, dk_b, input_precision=INPUT_PRECISION)
    return dk_a, dk_b, dv_a, dv_b, dkey_bias


@triton.jit
def _bwd_dkdv_kernel(
    q,
    k,
    v,
    do,
    tables,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    document_starts_ptr,
    key_bias_ptr,
    dkey_bias_ptr,
    sizes,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    DO_STRIDE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute dk and dv [B, H, C, d], contiguous, and the key bias gradient [B, H, C] or None.

    Grid (blocks of BLOCK_N columns, B · H). The longest columns come first.
    """
    c0 = tl.program_id(0) * BLOCK_N
    pair = tl.program_id(1).to(tl.int64)
    scale, H, R, C, N, offset, window = sizes
    b, h = pair // H, pair % H
    q, k = select_head(q, b, h, Q_STRIDE), select_head(k, b, h, K_STRIDE)
    v, do = select_head(v, b, h, V_STRIDE), select_head(do, b, h, DO_STRIDE)
    lse_ptr += pair * R
    delta_ptr += pair * R
    tables = Tables(
        select_table(tables.bias_ptr, h, N) if tables.bias_ptr is not None else None,
        select_table(tables.weight_ptr, h, N) if tables.weight_ptr is not None else None,
    )
    k_a = load_rows(k.ptr, c0, k.stride_row, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
    v_a = load_rows(v.ptr, c0, v.stride_row, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
    dk_a = tl.zeros([BLOCK_N, BLOCK_DA], tl.float32)
    dv_a = tl.zeros([BLOCK_N, BLOCK_DA], tl.float32)
    k_b, v_b, dk_b, dv_b = k_a, v_a, dk_a, dv_a
    if BLOCK_DB:
        k_b = load_rows(k.ptr, c0, k.stride_row, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)
        v_b = load_rows(v.ptr, c0, v.stride_row, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)
        dk_b = tl.zeros([BLOCK_N, BLOCK_DB], tl.float32)
        dv_b = tl.zeros([BLOCK_N, BLOCK_DB], tl.float32)
    # Row r attends to column c from r = c − offset to r = c − offset + window − 1.
    first = tl.maximum(c0 - offset, 0) // BLOCK_M * BLOCK_M
    full = (tl.maximum(c0 + BLOCK_N - 1 - offset, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    last = R
    partial = R // BLOCK_M * BLOCK_M
    if HAS_WINDOW:
        last = tl.minimum(R, tl.maximum(c0 + BLOCK_N - 1 - offset + window, 0))
        partial = tl.minimum(partial, tl.maximum(c0 + window - offset, 0) // BLOCK_M * BLOCK_M)
    if document_starts_ptr is not None:
        # Rows attend to the block's last column until the first document that starts after it, and to all of the block
        # until the first document that starts after its first column.
        document_starts_ptr += b * R
        last = tl.minimum(R, count_rows(document_starts_ptr, c0 + BLOCK_N - 1, R))
        partial = tl.minimum(partial, count_rows(document_starts_ptr, c0, R) // BLOCK_M * BLOCK_M)
    full = tl.minimum(full, last)
    partial = tl.maximum(partial, full)
    dkey_bias = 0.0
    if dkey_bias_ptr is not None:
        dkey_bias = tl.zeros([BLOCK_N], tl.float32)
    if key_bias_ptr is not None:
        key_bias_ptr += pair * C
    center = load_center(key_bias_ptr, c0, C)
    state = (dk_a, dk_b, dv_a, dv_b, dkey_bias)
    block = (k_a, k_b, v_a, v_b)
    # fmt: off
    state = _bwd_dkdv_inner(state, first, last - (partial - full), full, partial - full, block, q, do, lse_ptr,
                            delta_ptr, tables, c0, sizes, document_starts_ptr, key_bias_ptr, dkey_bias_ptr, center,
                            True, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM,
                            INPUT_PRECISION)
    state = _bwd_dkdv_inner(state, full, partial, 0, 0, block, q, do, lse_ptr,
                            delta_ptr, tables, c0, sizes, document_starts_ptr, key_bias_ptr, dkey_bias_ptr, center,
                            False, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM,
                            INPUT_PRECISION)
    # fmt: on
    dk_a, dk_b, dv_a, dv_b, dkey_bias = state
    factor = scale
    if tables.weight_ptr is not None:
        factor = LN2
    dk_ptr += pair * C * HEAD_DIM
    dv_ptr += pair * C * HEAD_DIM
    store_rows(dk_ptr, dk_a * factor, c0, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
    store_rows(dv_ptr, dv_a, c0, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
    if dkey_bias_ptr is not None:
        columns = c0 + tl.arange(0, BLOCK_N)
        tl.store(dkey_bias_ptr + pair * C + columns, dkey_bias, mask=columns < C)
    if BLOCK_DB:
        store_rows(dk_ptr, dk_b * factor, c0, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)
        store_rows(dv_ptr, dv_b, c0, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)

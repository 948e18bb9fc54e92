"""Second backward kernel: gradients of k, v and the bias of keys by column blocks, without atomics.

It reads the delta that the first one (`backward_dq.py`, which defines P and dS) writes:

    dk = (dS ∘ weight)ᵀ q · scale
    dv = Pᵀ dout

The gradient of a key's own bias is the sum of dS over its column.
"""

import triton
import triton.language as tl

from megatron.kernels.biased_attention.forward import (
    finish_scores,
    load_center,
    load_document_starts,
    load_key_bias,
    select_head,
    visible_mask,
)
from megatron.kernels.biased_attention.tables import (
    LN2,
    Tables,
    is_relative,
    joins_bias,
    load_window,
    select_table,
    spread_window,
)
from megatron.kernels.head_dim import load_rows, store_rows


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

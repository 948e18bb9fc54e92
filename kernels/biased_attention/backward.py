"""Backward kernels: gradients of q and the tables by row blocks, of k and v by column blocks. No atomics.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, G groups of row blocks.
With P the probabilities, delta_i = dout_i · out_i − log2(e) dlse_i (lse in base 2) and dS = P ∘ (dout·vᵀ − delta)
(FlashAttention-2, Dao 2023, algorithm 2), and for S = weight(n) · scale · q·k + bias(n), n = i − j:
dbias[n] = sum of dS over the diagonal n; dweight[n] = sum of dS ∘ scale·q·k; dq = (dS ∘ weight) k · scale.
"""

import triton
import triton.language as tl

from kernels.biased_attention.forward import (
    LOG2E,
    column_ranges,
    load_table_tile,
    offset_tables,
    select_head,
    visible_mask,
)
from kernels.head_dim import load_rows, store_rows

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def diagonal_sums(tile, BLOCK_M: tl.constexpr):
    """Sums along the diagonals of a square tile: (upper[t], lower[t]) over r − c = t and over r − c = t − BLOCK_M.

    Row r is rotated so that column t holds r − c = t modulo BLOCK_M; then the sums are plain column sums of two halves.
    """
    r = tl.arange(0, BLOCK_M)[:, None]
    t = tl.arange(0, BLOCK_M)[None, :]
    index = r * BLOCK_M + ((r - t) & (BLOCK_M - 1))
    turned = tl.gather(tl.reshape(tile, [BLOCK_M * BLOCK_M]), tl.reshape(index, [BLOCK_M * BLOCK_M]), 0)
    turned = tl.reshape(turned, [BLOCK_M, BLOCK_M])
    return tl.sum(tl.where(t <= r, turned, 0.0), 0), tl.sum(tl.where(t > r, turned, 0.0), 0)


@triton.jit
def _accumulate(ptr, n, values, N):
    """ptr[n] += values. The program that calls this is the only one that touches these addresses."""
    mask = (n >= 0) & (n < N)
    tl.store(ptr + n, tl.load(ptr + n, mask=mask, other=0.0) + values, mask=mask)


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
    top,
    sizes,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add the columns first … last − 1 to dq and the table gradients of one row block.

    `block` is the rows' q, do, lse and delta. The state's carries hold the diagonals of the tile before that the next
    tile completes.
    """
    dq_a, dq_b, carry_bias, carry_weight = state
    q_a, q_b, do_a, do_b, lse, delta = block
    scale, C, N, window = sizes.scale, sizes.C, sizes.N, sizes.window
    bias_ptr, weight_ptr = tables
    dbias_ptr, dweight_ptr = dtables
    t = tl.arange(0, BLOCK_M)
    for c0 in range(first, last, BLOCK_N):
        k_a = load_rows(k.ptr, c0, k.stride_row, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
        v_a = load_rows(v.ptr, c0, v.stride_row, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
        k_b, v_b = k_a, v_a
        products = tl.dot(q_a, tl.trans(k_a), input_precision=INPUT_PRECISION)
        dp = tl.dot(do_a, tl.trans(v_a), input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            k_b = load_rows(k.ptr, c0, k.stride_row, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)
            v_b = load_rows(v.ptr, c0, v.stride_row, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)
            products = tl.dot(q_b, tl.trans(k_b), products, input_precision=INPUT_PRECISION)
            dp = tl.dot(do_b, tl.trans(v_b), dp, input_precision=INPUT_PRECISION)
        scores = products
        if weight_ptr is not None:
            weight = load_table_tile(weight_ptr, top - c0, N, scale * LOG2E, BLOCK_M, BLOCK_N, False)
            scores = products * weight
        else:
            scores = products * (scale * LOG2E)
        if bias_ptr is not None:
            scores += load_table_tile(bias_ptr, top - c0, N, LOG2E, BLOCK_M, BLOCK_N, False)
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            columns = c0 + tl.arange(0, BLOCK_N)[None, :]
            distance = top + tl.arange(0, BLOCK_M)[:, None] - columns
            p = tl.where(visible_mask(distance, columns, C, window, HAS_WINDOW), p, 0.0)
        ds = p * (dp - delta[:, None])
        if dbias_ptr is not None:
            upper, lower = diagonal_sums(ds, BLOCK_M)
            _accumulate(dbias_ptr, top - c0 + t, upper + carry_bias, N)
            carry_bias = lower
        if dweight_ptr is not None:
            upper, lower = diagonal_sums(ds * products, BLOCK_M)
            _accumulate(dweight_ptr, top - c0 + t, (upper + carry_weight) * scale, N)
            carry_weight = lower
        if weight_ptr is not None:
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
    o_ptr,
    lse_ptr,
    dlse_ptr,
    dq_ptr,
    delta_ptr,
    sizes,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """dq, delta and partial table gradients. Grid (G groups, B · H).

    A program works through the row blocks of its group one after the other and adds to its own dbias and dweight
    [B, H, G, N] (zero before), so partial sums take memory linear in N whatever the number of row blocks. Tiles are
    square. delta [B, H, R] is written for `_bwd_dkdv_kernel`. lse is in base 2, and so is its gradient dlse [B, H, R],
    which may be absent.
    """
    group, groups = tl.program_id(0), tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    scale, R, N = sizes.scale, sizes.R, sizes.N
    b, h = pair // sizes.H, pair % sizes.H
    q, k, v, do = select_head(q, b, h), select_head(k, b, h), select_head(v, b, h), select_head(do, b, h)
    o_ptr += pair * R * HEAD_DIM
    dq_ptr += pair * R * HEAD_DIM
    tables = offset_tables(tables, h * N)
    dtables = offset_tables(dtables, (pair * groups + group) * N)
    blocks = tl.cdiv(R, BLOCK_M)
    t = tl.arange(0, BLOCK_M)
    for step in range(0, tl.cdiv(blocks, groups)):
        # Back and forth over the groups, so that each has long and short rows; the longest first.
        turn = step % 2
        index = step * groups + turn * (groups - 1 - 2 * group) + group
        start = (blocks - 1 - index) * BLOCK_M
        if index < blocks:
            rows = start + t
            q_a = load_rows(q.ptr, start, q.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
            do_a = load_rows(do.ptr, start, do.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
            o_a = load_rows(o_ptr, start, HEAD_DIM, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
            delta = tl.sum(do_a.to(tl.float32) * o_a.to(tl.float32), 1)
            dq_a = tl.zeros([BLOCK_M, BLOCK_DA], tl.float32)
            q_b, do_b, dq_b = q_a, do_a, dq_a
            if BLOCK_DB:
                q_b = load_rows(q.ptr, start, q.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
                do_b = load_rows(do.ptr, start, do.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
                o_b = load_rows(o_ptr, start, HEAD_DIM, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
                delta += tl.sum(do_b.to(tl.float32) * o_b.to(tl.float32), 1)
                dq_b = tl.zeros([BLOCK_M, BLOCK_DB], tl.float32)
            if dlse_ptr is not None:
                delta -= tl.load(dlse_ptr + pair * R + rows, mask=rows < R, other=0.0) * LOG2E
            tl.store(delta_ptr + pair * R + rows, delta, mask=rows < R)
            # Rows beyond R: exp2(… − inf) = 0.
            lse = tl.load(lse_ptr + pair * R + rows, mask=rows < R, other=float("inf"))
            zero = tl.zeros([BLOCK_M], tl.float32)
            state = (dq_a, dq_b, zero, zero)
            top = sizes.offset + start
            first, full, partial, last = column_ranges(top, sizes.C, sizes.window, BLOCK_M, BLOCK_N, HAS_WINDOW)
            block = (q_a, q_b, do_a, do_b, lse, delta)
            # fmt: off
            if HAS_WINDOW:
                state = _bwd_dq_inner(state, first, full, block, k, v, tables, dtables, top, sizes, True, HAS_WINDOW,
                                      BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
            state = _bwd_dq_inner(state, full, partial, block, k, v, tables, dtables, top, sizes, False, HAS_WINDOW,
                                  BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
            state = _bwd_dq_inner(state, partial, last, block, k, v, tables, dtables, top, sizes, True, HAS_WINDOW,
                                  BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
            # fmt: on
            dq_a, dq_b, carry_bias, carry_weight = state
            # What the last tile left: it began at the last multiple of BLOCK_N before `last`.
            n = top - tl.cdiv(last, BLOCK_N) * BLOCK_N + t
            if dtables.bias_ptr is not None:
                _accumulate(dtables.bias_ptr, n, carry_bias, N)
            if dtables.weight_ptr is not None:
                _accumulate(dtables.weight_ptr, n, carry_weight * scale, N)
            # The factor that the tiles left out: scale, or, with scale · log2(e) inside the weights, ln(2).
            factor = scale
            if tables.weight_ptr is not None:
                factor = LN2
            store_rows(dq_ptr, dq_a * factor, start, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
            if BLOCK_DB:
                store_rows(dq_ptr, dq_b * factor, start, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
        # The next row block adds to the same addresses from other threads.
        tl.debug_barrier()


@triton.jit
def _bwd_dkdv_inner(
    state,
    first,
    last,
    block,
    q,
    do,
    lse_ptr,
    delta_ptr,
    tables,
    c0,
    sizes,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add the rows first … last − 1 to dk and dv of one column block. Tiles are transposed: [BLOCK_N, BLOCK_M]."""
    dk_a, dk_b, dv_a, dv_b = state
    k_a, k_b, v_a, v_b = block
    scale, _, R, C, N, offset, window = sizes
    bias_ptr, weight_ptr = tables
    for r0 in range(first, last, BLOCK_M):
        rows = r0 + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_ptr + rows, mask=rows < R, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=rows < R, other=0.0)
        q_a = load_rows(q.ptr, r0, q.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
        do_a = load_rows(do.ptr, r0, do.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
        q_b, do_b = q_a, do_a
        scores = tl.dot(k_a, tl.trans(q_a), input_precision=INPUT_PRECISION)
        dp = tl.dot(v_a, tl.trans(do_a), input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            q_b = load_rows(q.ptr, r0, q.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
            do_b = load_rows(do.ptr, r0, do.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
            scores = tl.dot(k_b, tl.trans(q_b), scores, input_precision=INPUT_PRECISION)
            dp = tl.dot(v_b, tl.trans(do_b), dp, input_precision=INPUT_PRECISION)
        if weight_ptr is not None:
            weight = load_table_tile(weight_ptr, offset + r0 - c0, N, scale * LOG2E, BLOCK_M, BLOCK_N, True)
            scores *= weight
        else:
            scores *= scale * LOG2E
        if bias_ptr is not None:
            scores += load_table_tile(bias_ptr, offset + r0 - c0, N, LOG2E, BLOCK_M, BLOCK_N, True)
        p = tl.exp2(scores - lse[None, :])
        if MASKED:
            columns = c0 + tl.arange(0, BLOCK_N)[:, None]
            p = tl.where(visible_mask(offset + rows[None, :] - columns, columns, C, window, HAS_WINDOW), p, 0.0)
        dv_a = tl.dot(p.to(do_a.dtype), do_a, dv_a, input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            dv_b = tl.dot(p.to(do_b.dtype), do_b, dv_b, input_precision=INPUT_PRECISION)
        ds = p * (dp - delta[None, :])
        if weight_ptr is not None:
            ds *= weight
        ds = ds.to(q_a.dtype)
        dk_a = tl.dot(ds, q_a, dk_a, input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            dk_b = tl.dot(ds, q_b, dk_b, input_precision=INPUT_PRECISION)
    return dk_a, dk_b, dv_a, dv_b


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
    sizes,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """dk and dv [B, H, C, d], contiguous. Grid (blocks of BLOCK_N columns, B · H); the longest columns come first."""
    c0 = tl.program_id(0) * BLOCK_N
    pair = tl.program_id(1).to(tl.int64)
    scale, H, R, C, N, offset, window = sizes
    b, h = pair // H, pair % H
    q, k, v, do = select_head(q, b, h), select_head(k, b, h), select_head(v, b, h), select_head(do, b, h)
    lse_ptr += pair * R
    delta_ptr += pair * R
    tables = offset_tables(tables, h * N)
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
    # Row r sees column c from r = c − offset to r = c − offset + window − 1.
    first = tl.maximum(c0 - offset, 0) // BLOCK_M * BLOCK_M
    full = (tl.maximum(c0 + BLOCK_N - 1 - offset, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    last = R
    partial = R
    if HAS_WINDOW:
        last = tl.minimum(R, tl.maximum(c0 + BLOCK_N - 1 - offset + window, 0))
        partial = tl.minimum(R, tl.maximum(c0 + window - offset, 0) // BLOCK_M * BLOCK_M)
        partial = tl.maximum(partial, tl.minimum(full, last))
    full = tl.minimum(full, last)
    state = (dk_a, dk_b, dv_a, dv_b)
    block = (k_a, k_b, v_a, v_b)
    # fmt: off
    state = _bwd_dkdv_inner(state, first, full, block, q, do, lse_ptr, delta_ptr, tables, c0, sizes, True, HAS_WINDOW,
                            BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
    state = _bwd_dkdv_inner(state, full, partial, block, q, do, lse_ptr, delta_ptr, tables, c0, sizes, False,
                            HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
    if HAS_WINDOW:
        state = _bwd_dkdv_inner(state, partial, last, block, q, do, lse_ptr, delta_ptr, tables, c0, sizes, True,
                                HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
    # fmt: on
    dk_a, dk_b, dv_a, dv_b = state
    factor = scale
    if tables.weight_ptr is not None:
        factor = LN2
    dk_ptr += pair * C * HEAD_DIM
    dv_ptr += pair * C * HEAD_DIM
    store_rows(dk_ptr, dk_a * factor, c0, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
    store_rows(dv_ptr, dv_a, c0, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N)
    if BLOCK_DB:
        store_rows(dk_ptr, dk_b * factor, c0, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)
        store_rows(dv_ptr, dv_b, c0, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N)

"""Backward kernels: gradients of q and the tables by row blocks, of k and v by column blocks. No atomics.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, G groups of row blocks.
With P the probabilities, delta_i = dout_i · out_i − log2(e) dlse_i (lse in base 2) and dS = P ∘ (dout·vᵀ − delta)
(FlashAttention-2, Dao 2023, algorithm 2), and for S = weight(n) · scale · q·k + bias(n), n = i − j:
dbias[n] = sum of dS over the diagonal n; dweight[n] = sum of dS ∘ scale·q·k; dq = (dS ∘ weight) k · scale.
"""

import triton
import triton.language as tl

from kernels.biased_attention.forward import LOG2E
from kernels.biased_attention.tiles import column_ranges, table_tile, visible
from kernels.rows import load_rows, store_rows

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def diagonal_sums(tile, BLOCK: tl.constexpr):
    """Sums along the diagonals of a square tile: (upper[t], lower[t]) over r − c = t and over r − c = t − BLOCK.

    Row r is rotated so that column t holds r − c = t modulo BLOCK; then the sums are plain column sums of two halves.
    """
    r = tl.arange(0, BLOCK)[:, None]
    t = tl.arange(0, BLOCK)[None, :]
    index = r * BLOCK + ((r - t) & (BLOCK - 1))
    turned = tl.gather(tl.reshape(tile, [BLOCK * BLOCK]), tl.reshape(index, [BLOCK * BLOCK]), 0)
    turned = tl.reshape(turned, [BLOCK, BLOCK])
    return tl.sum(tl.where(t <= r, turned, 0.0), 0), tl.sum(tl.where(t > r, turned, 0.0), 0)


@triton.jit
def _add_to(POINTER, n, values, N, wanted):
    """POINTER[n] += values. The program that calls this is the only one that touches these addresses."""
    mask = (n >= 0) & (n < N) & wanted
    tl.store(POINTER + n, tl.load(POINTER + n, mask=mask, other=0.0) + values, mask=mask)


@triton.jit
def _rows_against(
    state,
    qa,
    qb,
    ga,
    gb,
    lse,
    delta,
    K,
    V,
    BIAS,
    WEIGHT,
    DBIAS,
    DWEIGHT,
    first,
    last,
    top,
    stride_k,
    stride_v,
    scale,
    C,
    N,
    window,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the columns first … last − 1 to dq and the table gradients of one row block.

    The state's carries hold the diagonals of the tile before that the next tile completes.
    """
    dq_a, dq_b, carry_bias, carry_weight = state
    t = tl.arange(0, BLOCK)
    for c0 in range(first, last, BLOCK):
        ka = load_rows(K, c0, stride_k, C, 0, DA, DIM, BLOCK)
        va = load_rows(V, c0, stride_v, C, 0, DA, DIM, BLOCK)
        kb, vb = ka, va
        products = tl.dot(qa, tl.trans(ka), input_precision=PRECISION)
        dp = tl.dot(ga, tl.trans(va), input_precision=PRECISION)
        if DB:
            kb = load_rows(K, c0, stride_k, C, DA, DB, DIM, BLOCK)
            vb = load_rows(V, c0, stride_v, C, DA, DB, DIM, BLOCK)
            products = tl.dot(qb, tl.trans(kb), products, input_precision=PRECISION)
            dp = tl.dot(gb, tl.trans(vb), dp, input_precision=PRECISION)
        scores = products
        if WEIGHT is not None:
            weight = table_tile(WEIGHT, top - c0, N, scale * LOG2E, BLOCK, BLOCK, False)
            scores = products * weight
        else:
            scores = products * (scale * LOG2E)
        if BIAS is not None:
            scores += table_tile(BIAS, top - c0, N, LOG2E, BLOCK, BLOCK, False)
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            columns = c0 + tl.arange(0, BLOCK)[None, :]
            distance = top + tl.arange(0, BLOCK)[:, None] - columns
            p = tl.where(visible(distance, columns, C, window, WINDOWED), p, 0.0)
        ds = p * (dp - delta[:, None])
        if DBIAS is not None:
            upper, lower = diagonal_sums(ds, BLOCK)
            _add_to(DBIAS, top - c0 + t, upper + carry_bias, N, True)
            carry_bias = lower
        if DWEIGHT is not None:
            upper, lower = diagonal_sums(ds * products, BLOCK)
            _add_to(DWEIGHT, top - c0 + t, (upper + carry_weight) * scale, N, True)
            carry_weight = lower
        if WEIGHT is not None:
            ds *= weight
        ds = ds.to(ka.dtype)
        dq_a = tl.dot(ds, ka, dq_a, input_precision=PRECISION)
        if DB:
            dq_b = tl.dot(ds, kb, dq_b, input_precision=PRECISION)
    return dq_a, dq_b, carry_bias, carry_weight


@triton.jit
def row_kernel(
    Q,
    K,
    V,
    BIAS,
    WEIGHT,
    OUT,
    LSE,
    DOUT,
    DLSE,
    DQ,
    DELTA,
    DBIAS,
    DWEIGHT,
    stride_qb,
    stride_qh,
    stride_qr,
    stride_kb,
    stride_kh,
    stride_kr,
    stride_vb,
    stride_vh,
    stride_vr,
    stride_gb,
    stride_gh,
    stride_gr,
    scale,
    H,
    R,
    C,
    N,
    offset,
    window,
    WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, delta and partial table gradients. Grid (G groups, B · H).

    A program works through the row blocks of its group one after the other and adds to its own DBIAS, DWEIGHT
    [B, H, G, N] (zero before), so partial sums take memory linear in N whatever the number of row blocks.
    DELTA [B, H, R] is written for `column_kernel`. LSE is in base 2, and so is DLSE [B, H, R] or None, its gradient.
    """
    group, groups = tl.program_id(0), tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    b, h = pair // H, pair % H
    Q += b * stride_qb + h * stride_qh
    K += b * stride_kb + h * stride_kh
    V += b * stride_vb + h * stride_vh
    DOUT += b * stride_gb + h * stride_gh
    OUT += pair * R * DIM
    DQ += pair * R * DIM
    if BIAS is not None:
        BIAS += h * N
    if WEIGHT is not None:
        WEIGHT += h * N
    if DBIAS is not None:
        DBIAS += (pair * groups + group) * N
    if DWEIGHT is not None:
        DWEIGHT += (pair * groups + group) * N
    blocks = tl.cdiv(R, BLOCK)
    t = tl.arange(0, BLOCK)
    for step in range(0, tl.cdiv(blocks, groups)):
        # Back and forth over the groups, so that each has long and short rows; the longest first.
        turn = step % 2
        index = step * groups + turn * (groups - 1 - 2 * group) + group
        start = (blocks - 1 - index) * BLOCK
        if index < blocks:
            rows = start + t
            qa = load_rows(Q, start, stride_qr, R, 0, DA, DIM, BLOCK)
            ga = load_rows(DOUT, start, stride_gr, R, 0, DA, DIM, BLOCK)
            oa = load_rows(OUT, start, DIM, R, 0, DA, DIM, BLOCK)
            delta = tl.sum(ga.to(tl.float32) * oa.to(tl.float32), 1)
            dq_a = tl.zeros([BLOCK, DA], tl.float32)
            qb, gb, dq_b = qa, ga, dq_a
            if DB:
                qb = load_rows(Q, start, stride_qr, R, DA, DB, DIM, BLOCK)
                gb = load_rows(DOUT, start, stride_gr, R, DA, DB, DIM, BLOCK)
                ob = load_rows(OUT, start, DIM, R, DA, DB, DIM, BLOCK)
                delta += tl.sum(gb.to(tl.float32) * ob.to(tl.float32), 1)
                dq_b = tl.zeros([BLOCK, DB], tl.float32)
            if DLSE is not None:
                delta -= tl.load(DLSE + pair * R + rows, mask=rows < R, other=0.0) * LOG2E
            tl.store(DELTA + pair * R + rows, delta, mask=rows < R)
            # Rows beyond R: exp2(… − inf) = 0.
            lse = tl.load(LSE + pair * R + rows, mask=rows < R, other=float("inf"))
            zero = tl.zeros([BLOCK], tl.float32)
            state = (dq_a, dq_b, zero, zero)
            top = offset + start
            first, full, partial, last = column_ranges(top, C, window, BLOCK, BLOCK, WINDOWED)
            # fmt: off
            if WINDOWED:
                state = _rows_against(state, qa, qb, ga, gb, lse, delta, K, V, BIAS, WEIGHT, DBIAS, DWEIGHT, first,
                                      full, top, stride_kr, stride_vr, scale, C, N, window,
                                      True, WINDOWED, BLOCK, DA, DB, DIM, PRECISION)
            state = _rows_against(state, qa, qb, ga, gb, lse, delta, K, V, BIAS, WEIGHT, DBIAS, DWEIGHT, full,
                                  partial, top, stride_kr, stride_vr, scale, C, N, window,
                                  False, WINDOWED, BLOCK, DA, DB, DIM, PRECISION)
            state = _rows_against(state, qa, qb, ga, gb, lse, delta, K, V, BIAS, WEIGHT, DBIAS, DWEIGHT, partial,
                                  last, top, stride_kr, stride_vr, scale, C, N, window,
                                  True, WINDOWED, BLOCK, DA, DB, DIM, PRECISION)
            # fmt: on
            dq_a, dq_b, carry_bias, carry_weight = state
            # What the last tile left: it began at the last multiple of BLOCK before `last`.
            n = top - tl.cdiv(last, BLOCK) * BLOCK + t
            if DBIAS is not None:
                _add_to(DBIAS, n, carry_bias, N, True)
            if DWEIGHT is not None:
                _add_to(DWEIGHT, n, carry_weight * scale, N, True)
            # The factor that the tiles left out: scale, or, with scale · log2(e) inside the weights, ln(2).
            factor = scale
            if WEIGHT is not None:
                factor = LN2
            store_rows(DQ, dq_a * factor, start, R, 0, DA, DIM, BLOCK)
            if DB:
                store_rows(DQ, dq_b * factor, start, R, DA, DB, DIM, BLOCK)
        # The next row block adds to the same addresses from other threads.
        tl.debug_barrier()


@triton.jit
def _columns_against(
    state,
    ka,
    kb,
    va,
    vb,
    Q,
    DOUT,
    LSE,
    DELTA,
    BIAS,
    WEIGHT,
    first,
    last,
    c0,
    stride_q,
    stride_g,
    scale,
    R,
    C,
    N,
    offset,
    window,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the rows first … last − 1 to dk and dv of one column block. Tiles are transposed: [BN, BM]."""
    dk_a, dk_b, dv_a, dv_b = state
    for r0 in range(first, last, BM):
        rows = r0 + tl.arange(0, BM)
        lse = tl.load(LSE + rows, mask=rows < R, other=float("inf"))
        delta = tl.load(DELTA + rows, mask=rows < R, other=0.0)
        qa = load_rows(Q, r0, stride_q, R, 0, DA, DIM, BM)
        ga = load_rows(DOUT, r0, stride_g, R, 0, DA, DIM, BM)
        qb, gb = qa, ga
        scores = tl.dot(ka, tl.trans(qa), input_precision=PRECISION)
        dp = tl.dot(va, tl.trans(ga), input_precision=PRECISION)
        if DB:
            qb = load_rows(Q, r0, stride_q, R, DA, DB, DIM, BM)
            gb = load_rows(DOUT, r0, stride_g, R, DA, DB, DIM, BM)
            scores = tl.dot(kb, tl.trans(qb), scores, input_precision=PRECISION)
            dp = tl.dot(vb, tl.trans(gb), dp, input_precision=PRECISION)
        if WEIGHT is not None:
            weight = table_tile(WEIGHT, offset + r0 - c0, N, scale * LOG2E, BM, BN, True)
            scores *= weight
        else:
            scores *= scale * LOG2E
        if BIAS is not None:
            scores += table_tile(BIAS, offset + r0 - c0, N, LOG2E, BM, BN, True)
        p = tl.exp2(scores - lse[None, :])
        if MASKED:
            columns = c0 + tl.arange(0, BN)[:, None]
            p = tl.where(visible(offset + rows[None, :] - columns, columns, C, window, WINDOWED), p, 0.0)
        dv_a = tl.dot(p.to(ga.dtype), ga, dv_a, input_precision=PRECISION)
        if DB:
            dv_b = tl.dot(p.to(gb.dtype), gb, dv_b, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if WEIGHT is not None:
            ds *= weight
        ds = ds.to(qa.dtype)
        dk_a = tl.dot(ds, qa, dk_a, input_precision=PRECISION)
        if DB:
            dk_b = tl.dot(ds, qb, dk_b, input_precision=PRECISION)
    return dk_a, dk_b, dv_a, dv_b


@triton.jit
def column_kernel(
    Q,
    K,
    V,
    BIAS,
    WEIGHT,
    LSE,
    DOUT,
    DELTA,
    DK,
    DV,
    stride_qb,
    stride_qh,
    stride_qr,
    stride_kb,
    stride_kh,
    stride_kr,
    stride_vb,
    stride_vh,
    stride_vr,
    stride_gb,
    stride_gh,
    stride_gr,
    scale,
    H,
    R,
    C,
    N,
    offset,
    window,
    WINDOWED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv [B, H, C, d], contiguous. Grid (blocks of BN columns, B · H); the longest columns come first."""
    c0 = tl.program_id(0) * BN
    pair = tl.program_id(1).to(tl.int64)
    b, h = pair // H, pair % H
    Q += b * stride_qb + h * stride_qh
    K += b * stride_kb + h * stride_kh
    V += b * stride_vb + h * stride_vh
    DOUT += b * stride_gb + h * stride_gh
    LSE += pair * R
    DELTA += pair * R
    if BIAS is not None:
        BIAS += h * N
    if WEIGHT is not None:
        WEIGHT += h * N
    ka = load_rows(K, c0, stride_kr, C, 0, DA, DIM, BN)
    va = load_rows(V, c0, stride_vr, C, 0, DA, DIM, BN)
    dk_a = tl.zeros([BN, DA], tl.float32)
    dv_a = tl.zeros([BN, DA], tl.float32)
    kb, vb, dk_b, dv_b = ka, va, dk_a, dv_a
    if DB:
        kb = load_rows(K, c0, stride_kr, C, DA, DB, DIM, BN)
        vb = load_rows(V, c0, stride_vr, C, DA, DB, DIM, BN)
        dk_b = tl.zeros([BN, DB], tl.float32)
        dv_b = tl.zeros([BN, DB], tl.float32)
    # Row r sees column c from r = c − offset to r = c − offset + window − 1.
    first = tl.maximum(c0 - offset, 0) // BM * BM
    full = (tl.maximum(c0 + BN - 1 - offset, 0) + BM - 1) // BM * BM
    last = R
    partial = R
    if WINDOWED:
        last = tl.minimum(R, tl.maximum(c0 + BN - 1 - offset + window, 0))
        partial = tl.minimum(R, tl.maximum(c0 + window - offset, 0) // BM * BM)
        partial = tl.maximum(partial, tl.minimum(full, last))
    full = tl.minimum(full, last)
    state = (dk_a, dk_b, dv_a, dv_b)
    # fmt: off
    state = _columns_against(state, ka, kb, va, vb, Q, DOUT, LSE, DELTA, BIAS, WEIGHT, first, full, c0, stride_qr,
                             stride_gr, scale, R, C, N, offset, window,
                             True, WINDOWED, BM, BN, DA, DB, DIM, PRECISION)
    state = _columns_against(state, ka, kb, va, vb, Q, DOUT, LSE, DELTA, BIAS, WEIGHT, full, partial, c0, stride_qr,
                             stride_gr, scale, R, C, N, offset, window,
                             False, WINDOWED, BM, BN, DA, DB, DIM, PRECISION)
    if WINDOWED:
        state = _columns_against(state, ka, kb, va, vb, Q, DOUT, LSE, DELTA, BIAS, WEIGHT, partial, last, c0, stride_qr,
                                 stride_gr, scale, R, C, N, offset, window,
                                 True, WINDOWED, BM, BN, DA, DB, DIM, PRECISION)
    # fmt: on
    dk_a, dk_b, dv_a, dv_b = state
    factor = scale
    if WEIGHT is not None:
        factor = LN2
    DK += pair * C * DIM
    DV += pair * C * DIM
    store_rows(DK, dk_a * factor, c0, C, 0, DA, DIM, BN)
    store_rows(DV, dv_a, c0, C, 0, DA, DIM, BN)
    if DB:
        store_rows(DK, dk_b * factor, c0, C, DA, DB, DIM, BN)
        store_rows(DV, dv_b, c0, C, DA, DB, DIM, BN)

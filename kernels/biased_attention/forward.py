"""Forward kernel: softmax(weight · q·k · scale + bias) · v over row blocks, with log2 of the softmax's denominator.

B batch, H heads, R query rows, C key columns, d head dimension, N distances.
The online softmax is that of FlashAttention-2 (Dao 2023, algorithm 1), in base 2.
"""

import triton
import triton.language as tl

from kernels.biased_attention.tiles import column_ranges, table_tile, visible
from kernels.rows import load_rows, store_rows

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _columns(
    state,
    qa,
    qb,
    K,
    V,
    BIAS,
    WEIGHT,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the columns first … last − 1 to the running (maximum, sum, output, output of the second part)."""
    maximum, total, out_a, out_b = state
    for c0 in range(first, last, BN):
        scores = tl.dot(qa, tl.trans(load_rows(K, c0, stride_k, C, 0, DA, DIM, BN)), input_precision=PRECISION)
        if DB:
            kb = load_rows(K, c0, stride_k, C, DA, DB, DIM, BN)
            scores = tl.dot(qb, tl.trans(kb), scores, input_precision=PRECISION)
        if WEIGHT is not None:
            scores *= table_tile(WEIGHT, top - c0, N, scale * LOG2E, BM, BN, False)
        else:
            scores *= scale * LOG2E
        if BIAS is not None:
            scores += table_tile(BIAS, top - c0, N, LOG2E, BM, BN, False)
        if MASKED:
            columns = c0 + tl.arange(0, BN)[None, :]
            distance = top + tl.arange(0, BM)[:, None] - columns
            scores = tl.where(visible(distance, columns, C, window, WINDOWED), scores, -float("inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        # A row may not have met a visible column yet: −inf − (−inf) would be NaN.
        finite = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(maximum - finite)
        total = total * shrink + tl.sum(p, 1)
        va = load_rows(V, c0, stride_v, C, 0, DA, DIM, BN)
        out_a = tl.dot(p.to(va.dtype), va, out_a * shrink[:, None], input_precision=PRECISION)
        if DB:
            vb = load_rows(V, c0, stride_v, C, DA, DB, DIM, BN)
            out_b = tl.dot(p.to(vb.dtype), vb, out_b * shrink[:, None], input_precision=PRECISION)
        maximum = new
    return maximum, total, out_a, out_b


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    BIAS,
    WEIGHT,
    OUT,
    LSE,
    stride_qb,
    stride_qh,
    stride_qr,
    stride_kb,
    stride_kh,
    stride_kr,
    stride_vb,
    stride_vh,
    stride_vr,
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
    """Grid (blocks of BM rows, B · H). OUT [B, H, R, d] and LSE [B, H, R] are contiguous; tables are [H, N] or None.

    LSE is in base 2: converting it there and back would cost the backward pass two roundings of its largest term.
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the longest rows first
    pair = tl.program_id(1).to(tl.int64)
    b, h = pair // H, pair % H
    Q += b * stride_qb + h * stride_qh
    K += b * stride_kb + h * stride_kh
    V += b * stride_vb + h * stride_vh
    if BIAS is not None:
        BIAS += h * N
    if WEIGHT is not None:
        WEIGHT += h * N
    qa = load_rows(Q, start, stride_qr, R, 0, DA, DIM, BM)
    out_a = tl.zeros([BM, DA], tl.float32)
    qb, out_b = qa, out_a
    if DB:
        qb = load_rows(Q, start, stride_qr, R, DA, DB, DIM, BM)
        out_b = tl.zeros([BM, DB], tl.float32)
    state = (tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32), out_a, out_b)
    top = offset + start
    first, full, partial, last = column_ranges(top, C, window, BM, BN, WINDOWED)
    # fmt: off
    if WINDOWED:
        state = _columns(state, qa, qb, K, V, BIAS, WEIGHT, first, full, top, stride_kr, stride_vr, scale, C, N, window,
                         True, WINDOWED, BM, BN, DA, DB, DIM, PRECISION)
    state = _columns(state, qa, qb, K, V, BIAS, WEIGHT, full, partial, top, stride_kr, stride_vr, scale, C, N, window,
                     False, WINDOWED, BM, BN, DA, DB, DIM, PRECISION)
    state = _columns(state, qa, qb, K, V, BIAS, WEIGHT, partial, last, top, stride_kr, stride_vr, scale, C, N, window,
                     True, WINDOWED, BM, BN, DA, DB, DIM, PRECISION)
    # fmt: on
    maximum, total, out_a, out_b = state
    total = tl.where(total == 0.0, 1.0, total)  # rows beyond R, which are not stored
    OUT += pair * R * DIM
    store_rows(OUT, out_a / total[:, None], start, R, 0, DA, DIM, BM)
    if DB:
        store_rows(OUT, out_b / total[:, None], start, R, DA, DB, DIM, BM)
    rows = start + tl.arange(0, BM)
    tl.store(LSE + pair * R + rows, maximum + tl.log2(total), mask=rows < R)

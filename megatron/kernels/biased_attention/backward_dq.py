"""First backward kernel: gradients of q and the tables by row blocks, without atomics.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, G groups of row blocks. P are the
probabilities, delta_i = dout_i · out_i − log2(e) dlse_i (lse in base 2) and dS = P ∘ (dout·vᵀ − delta)
(FlashAttention-2, Dao 2023, algorithm 2). With S = weight(n) · scale · q·k + bias(n) and n = i − j:

    dbias[n] = sum of dS over the diagonal n
    dweight[n] = sum of dS ∘ scale·q·k over the diagonal n
    dq = (dS ∘ weight) k · scale
"""

import triton
import triton.language as tl

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
    LN2,
    LOG2E,
    Tables,
    is_relative,
    joins_bias,
    load_window,
    select_table,
    spread_window,
)
from megatron.kernels.head_dim import load_rows, store_rows


@triton.jit
def shift_last(x, first, COUNT: tl.constexpr):
    """Shift x [a, b, c, COUNT] by one along its last axis and insert `first` [a, b, c]. Return (shifted, last element).

    It splits and joins pairs, which moves no data between threads if each thread has the whole axis.
    """
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    D: tl.constexpr = x.shape[2]
    LEVELS: tl.constexpr = 3 if COUNT == 8 else 2 if COUNT == 4 else 1
    tl.static_assert(COUNT == 1 << LEVELS)
    even = ()
    for level in tl.static_range(LEVELS):
        left, x = tl.split(tl.reshape(x, [A, B, D, COUNT >> (level + 1), 2]))
        even += (left,)  # type: ignore[assignment]
    shifted = tl.reshape(first, [A, B, D, 1])
    for level in tl.static_range(LEVELS):
        shifted = tl.reshape(tl.join(shifted, even[LEVELS - 1 - level]), [A, B, D, 2 << level])
    return shifted, tl.reshape(x, [A, B, D])


@triton.jit
def fold_rows(tile, carried, BLOCK_M: tl.constexpr):
    """Add rows of a square tile that are 8 apart along diagonals. Return ([BLOCK_M / 2, BLOCK_M], carry).

    Entries (16w + r, c − 8) and (16w + r + 8, c) are on one diagonal, and matrix products leave both in one thread. Row
    8w + r of the result contains at column c the diagonal 16w + r + 8 − c. The carry is [BLOCK_M / 16, 8, 8]: the last
    8 columns of the upper rows, whose partners are in the next tile.
    """
    PAIRS: tl.constexpr = BLOCK_M // 16
    rows = tl.reshape(tile, [PAIRS, 2, 8, BLOCK_M])
    upper, lower = tl.split(tl.permute(rows, (0, 2, 3, 1)))
    upper = tl.permute(tl.reshape(upper, [PAIRS, 8, BLOCK_M // 8, 8]), (0, 1, 3, 2))
    upper, carried = shift_last(upper, carried, BLOCK_M // 8)
    upper = tl.reshape(tl.permute(upper, (0, 1, 3, 2)), [PAIRS * 8, BLOCK_M])
    return upper + tl.reshape(lower, [PAIRS * 8, BLOCK_M]), carried


@triton.jit
def compute_diagonal_shifts(BLOCK_M: tl.constexpr):
    """Return the diagonal at column 0 of each row of `fold_rows`, [BLOCK_M / 2, 1]."""
    r = tl.arange(0, BLOCK_M // 2)
    return (r // 8 * 16 + r % 8 + 8)[:, None]


@triton.jit
def sum_diagonals(tile, carry, BLOCK_M: tl.constexpr):
    """Sum the diagonals t = 0 … BLOCK_M − 1 of a square tile, including those carried over. Return (sums, carry).

    A tile to the right starts BLOCK_M diagonals earlier: its diagonal t continues diagonal t − BLOCK_M of this tile,
    whose folded rows are carried over. Side by side with the new ones, they contain every diagonal in one piece.
    """
    upper_rows, last = carry
    folded, upper_rows = fold_rows(tile, upper_rows, BLOCK_M)
    r = tl.arange(0, BLOCK_M // 2)[:, None]
    t = tl.arange(0, BLOCK_M)[None, :]
    # No index wraps, so each thread has one address, with constant offsets.
    index = (r * 2 + 1) * BLOCK_M + (compute_diagonal_shifts(BLOCK_M) - t)
    SIZE: tl.constexpr = BLOCK_M // 2 * BLOCK_M
    both = tl.permute(tl.join(last, folded), (0, 2, 1))
    turned = tl.gather(tl.reshape(both, [SIZE * 2]), tl.reshape(index, [SIZE]), 0)
    return tl.sum(tl.reshape(turned, [BLOCK_M // 2, BLOCK_M]), 0), (upper_rows, folded)


@triton.jit
def add_without_atomics(ptr, n, values, N):
    """Add `values` to ptr[n]. Only the calling program accesses these addresses."""
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
            add_without_atomics(dbias_ptr, top - c0 + t, sums, N)
        if dweight_ptr is not None:
            sums, carry_weight = sum_diagonals(ds * products, carry_weight, BLOCK_M)
            add_without_atomics(dweight_ptr, top - c0 + t, sums * scale, N)
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
                add_without_atomics(dtables.bias_ptr, n, sums, N)
            if dtables.weight_ptr is not None:
                sums, _ = sum_diagonals(nothing, carry_weight, BLOCK_M)
                add_without_atomics(dtables.weight_ptr, n, sums * scale, N)
            # Factor not yet applied in the tiles: scale, or ln(2) if the weights include scale · log2(e).
            factor = scale
            if tables.weight_ptr is not None:
                factor = LN2
            store_rows(dq_ptr, dq_a * factor, start, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
            if BLOCK_DB:
                store_rows(dq_ptr, dq_b * factor, start, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
        # The next row block adds to the same addresses from other threads.
        tl.debug_barrier()

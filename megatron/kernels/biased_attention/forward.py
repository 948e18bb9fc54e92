"""Forward kernel: softmax(weight · q·k · scale + bias) · v over row blocks, and log2 of the softmax's denominator.

B batch, H heads, R query rows, C key columns, d head dimension, N distances; a tile has BLOCK_M rows and BLOCK_N
columns. The first part of the module is shared with the backward kernels. The online softmax is that of
FlashAttention-2 (Dao 2023, algorithm 1), in base 2.

Related values are passed as one NamedTuple. Triton expands it into separate arguments of the compiled kernel, so it has
no cost, and a None field is a constant as a None argument is.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from megatron.kernels.biased_attention.tables import (
    LOG2E,
    Tables,
    is_relative,
    joins_bias,
    load_table_tile,
    load_window,
    select_table,
    spread_window,
)
from megatron.kernels.head_dim import load_rows, store_rows


class AllHeadRows(NamedTuple):
    """q, k, v, the output or its gradient: [B, H, rows, d] with contiguous rows."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_row: Any


class SingleHeadRows(NamedTuple):
    """Rows of a single sequence and head, with the row stride in elements."""

    ptr: Any
    stride_row: Any


class AttentionSizes(NamedTuple):
    """Sizes and constants of one call, which all kernels need."""

    scale: Any
    H: Any
    R: Any
    C: Any
    N: Any
    offset: Any
    window: Any


@triton.jit
def select_head(x, b, h, stride_row):
    """Return the rows of one sequence and head of `x`, with row stride `stride_row`."""
    return SingleHeadRows(x.ptr + (b * x.stride_b + h * x.stride_h), stride_row)


@triton.jit
def finish_scores(
    products, tables, base, sizes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Return the scores in base 2, weight · scale · q·k + bias, and the weight in the same units.

    Args:
        products: q·k [BLOCK_M, BLOCK_N], or transposed; q·k + bias / scale if there is no weight.
    """
    weight = sizes.scale * LOG2E
    if tables.weight_ptr is not None:
        weight = load_table_tile(tables.weight_ptr, base, sizes.N, BLOCK_M, BLOCK_N, TRANSPOSED)
    scores = products * weight
    if tables.weight_ptr is not None and tables.bias_ptr is not None:
        scores += load_table_tile(tables.bias_ptr, base, sizes.N, BLOCK_M, BLOCK_N, TRANSPOSED)
    return scores, weight


@triton.jit
def load_key_bias(key_bias_ptr, columns, C, center):
    """Load the bias of keys in base 2, relative to `center`.

    The difference is computed in the input type, then rounded to float32. Columns beyond C get the last column's bias.
    """
    return (tl.load(key_bias_ptr + tl.minimum(columns, C - 1)) - center).to(tl.float32) * LOG2E


@triton.jit
def load_center(key_bias_ptr, column, C):
    """Load the bias of a key near the tile, to which the other key biases are relative.

    Sums over thousands of keys are large, but differ little near a row.
    """
    center = 0.0
    if key_bias_ptr is not None:
        center = tl.load(key_bias_ptr + tl.minimum(column, C - 1))
    return center


@triton.jit
def load_document_starts(document_starts_ptr, rows, R):
    """Load the first column that each row attends to; 0 beyond the last row, or None without documents."""
    document_starts = None
    if document_starts_ptr is not None:
        document_starts = tl.load(document_starts_ptr + rows, mask=rows < R, other=0)
    return document_starts


@triton.jit
def visible_mask(distance, columns, C, window, document_starts, HAS_WINDOW: tl.constexpr):
    """Return the mask of a tile: causal, within the keys, within the window and within the document.

    Args:
        document_starts: first keys of the tile's rows, in a shape that broadcasts over the tile, or None.
    """
    mask = (distance >= 0) & (columns < C)
    if HAS_WINDOW:
        mask = mask & (distance < window)
    if document_starts is not None:
        mask = mask & (columns >= document_starts)
    return mask


@triton.jit
def column_ranges(
    row,
    sizes,
    document_starts_ptr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return (start, full, full_stop, stop) for the tiles of BLOCK_M rows: tiles from full to full_stop need no mask.

    Args:
        row: first of the rows.
        document_starts_ptr: first keys of the sequence, or None. They are nondecreasing, so those of the first and the
        last
            row bound all others.
    """
    C, window = sizes.C, sizes.window
    top = sizes.offset + row
    stop = tl.minimum(C, top + BLOCK_M)
    full_stop = tl.minimum(C, top + 1) // BLOCK_N * BLOCK_N
    start = top * 0
    full = top * 0
    if HAS_WINDOW:
        start = tl.maximum(top - window + 1, 0) // BLOCK_N * BLOCK_N
        full = tl.minimum((tl.maximum(top + BLOCK_M - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, stop)
    if document_starts_ptr is not None:
        last = tl.load(document_starts_ptr + tl.minimum(row + BLOCK_M, sizes.R) - 1)
        start = tl.load(document_starts_ptr + row) // BLOCK_N * BLOCK_N
        full = tl.minimum((last + BLOCK_N - 1) // BLOCK_N * BLOCK_N, stop)
    return start, full, tl.maximum(full_stop, full), stop


@triton.jit
def _fwd_inner(
    state,
    first,
    last,
    block,
    k,
    v,
    tables,
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
    """Add columns first … last − 1 to the running state of the rows from `row` on.

    The state is (maximum, sum, output, second part of the output).
    """
    maximum, total, o_a, o_b = state
    q_a, q_b = block
    C, window = sizes.C, sizes.window
    top = sizes.offset + row
    # Unless something else is added, exp2's argument is one product and sum per score.
    IS_SCALED: tl.constexpr = key_bias_ptr is None and tables.weight_ptr is None
    IS_RELATIVE: tl.constexpr = is_relative(*tables)
    JOINS_BIAS: tl.constexpr = joins_bias(q_a.dtype)
    values = 0.0
    if IS_RELATIVE:
        values = load_window(tables.bias_ptr, top - first, sizes.N, BLOCK_M, BLOCK_N, False)
    for c0 in range(first, last, BLOCK_N):
        k_a = load_rows(k.ptr, c0, k.stride_row, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N, MASKED)
        products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if IS_RELATIVE:
            bias = spread_window(values, BLOCK_M, BLOCK_N, False)
            # Triton does not prefetch values that a product is added to, so this loads them one tile ahead.
            values = load_window(tables.bias_ptr, top - c0 - BLOCK_N, sizes.N, BLOCK_M, BLOCK_N, False)
            if JOINS_BIAS:
                products = bias
        products = tl.dot(q_a, tl.trans(k_a), products, input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            k_b = load_rows(k.ptr, c0, k.stride_row, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N, MASKED)
            products = tl.dot(q_b, tl.trans(k_b), products, input_precision=INPUT_PRECISION)
        if IS_RELATIVE and not JOINS_BIAS:
            products += bias
        scores, factor = products, sizes.scale * LOG2E
        if not IS_SCALED:
            scores, _ = finish_scores(products, tables, top - c0, sizes, BLOCK_M, BLOCK_N, False)
            factor = 1.0
        if key_bias_ptr is not None:
            scores += load_key_bias(key_bias_ptr, c0 + tl.arange(0, BLOCK_N), C, center)[None, :]
        if MASKED:
            columns = c0 + tl.arange(0, BLOCK_N)[None, :]
            distance = top + tl.arange(0, BLOCK_M)[:, None] - columns
            document_starts = load_document_starts(document_starts_ptr, row + tl.arange(0, BLOCK_M)[:, None], sizes.R)
            visible = visible_mask(distance, columns, C, window, document_starts, HAS_WINDOW)
            scores = tl.where(visible, scores, -float("inf"))
        new = tl.maximum(maximum, tl.max(scores, 1) * factor)
        # Without this, a row that has no visible column yet would compute −inf − (−inf) = NaN.
        finite = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(scores * factor - finite[:, None])
        shrink = tl.exp2(maximum - finite)
        total = total * shrink + tl.sum(p, 1)
        v_a = load_rows(v.ptr, c0, v.stride_row, C, 0, BLOCK_DA, HEAD_DIM, BLOCK_N, MASKED)
        o_a = tl.dot(p.to(v_a.dtype), v_a, o_a * shrink[:, None], input_precision=INPUT_PRECISION)
        if BLOCK_DB:
            v_b = load_rows(v.ptr, c0, v.stride_row, C, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_N, MASKED)
            o_b = tl.dot(p.to(v_b.dtype), v_b, o_b * shrink[:, None], input_precision=INPUT_PRECISION)
        maximum = new
    return maximum, total, o_a, o_b


@triton.jit
def _fwd_kernel(
    q,
    k,
    v,
    tables,
    o,
    lse_ptr,
    document_starts_ptr,
    key_bias_ptr,
    sinks_ptr,
    sizes,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute the output and lse of one row block. Grid (blocks of BLOCK_M rows, B · H).

    lse [B, H, R] is contiguous, tables are [H, N] or None. lse is in base 2: converting it to base e and back would add
    two roundings of its largest term in the backward pass.

    sinks [H] or None: rows of a head with a sink start as if they had already processed a key with this score and value
    zero, and lse includes it. The backward kernels therefore do not depend on sinks.

    document_starts [B, R], the first column that each row attends to, or None; never combined with a window. With
    key_bias
    [B, H, C], lse is relative to the bias of the row's own key.
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # longest rows first
    pair = tl.program_id(1).to(tl.int64)
    R = sizes.R
    b, h = pair // sizes.H, pair % sizes.H
    q, k, v = select_head(q, b, h, q.stride_row), select_head(k, b, h, k.stride_row), select_head(v, b, h, v.stride_row)
    tables = Tables(
        select_table(tables.bias_ptr, h, sizes.N) if tables.bias_ptr is not None else None,
        select_table(tables.weight_ptr, h, sizes.N) if tables.weight_ptr is not None else None,
    )
    q_a = load_rows(q.ptr, start, q.stride_row, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M)
    o_a = tl.zeros([BLOCK_M, BLOCK_DA], tl.float32)
    q_b, o_b = q_a, o_a
    if BLOCK_DB:
        q_b = load_rows(q.ptr, start, q.stride_row, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M)
        o_b = tl.zeros([BLOCK_M, BLOCK_DB], tl.float32)
    state = (tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32), o_a, o_b)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h) * LOG2E
        state = (tl.zeros([BLOCK_M], tl.float32) + sink, tl.full([BLOCK_M], 1.0, tl.float32), o_a, o_b)
    if document_starts_ptr is not None:
        document_starts_ptr += b * R
    first, full, partial, last = column_ranges(start, sizes, document_starts_ptr, BLOCK_M, BLOCK_N, HAS_WINDOW)
    block = (q_a, q_b)
    if key_bias_ptr is not None:
        key_bias_ptr += pair * sizes.C
    center = load_center(key_bias_ptr, sizes.offset + start, sizes.C)
    # fmt: off
    if HAS_WINDOW or document_starts_ptr is not None:
        state = _fwd_inner(state, first, full, block, k, v, tables, start, sizes, document_starts_ptr, key_bias_ptr,
                           center, True, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
    state = _fwd_inner(state, full, partial, block, k, v, tables, start, sizes, document_starts_ptr, key_bias_ptr,
                       center, False, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
    state = _fwd_inner(state, partial, last, block, k, v, tables, start, sizes, document_starts_ptr, key_bias_ptr,
                       center, True, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_DA, BLOCK_DB, HEAD_DIM, INPUT_PRECISION)
    # fmt: on
    maximum, total, o_a, o_b = state
    total = tl.where(total == 0.0, 1.0, total)  # rows beyond R, which are not stored
    o = select_head(o, b, h, o.stride_row)
    store_rows(o.ptr, o_a / total[:, None], start, R, 0, BLOCK_DA, HEAD_DIM, BLOCK_M, o.stride_row)
    if BLOCK_DB:
        store_rows(o.ptr, o_b / total[:, None], start, R, BLOCK_DA, BLOCK_DB, HEAD_DIM, BLOCK_M, o.stride_row)
    rows = start + tl.arange(0, BLOCK_M)
    if key_bias_ptr is not None:
        maximum -= load_key_bias(key_bias_ptr, sizes.offset + rows, sizes.C, center)
    tl.store(lse_ptr + pair * R + rows, maximum + tl.log2(total), mask=rows < R)

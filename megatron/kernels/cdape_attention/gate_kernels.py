"""Triton kernels for the bias of gates before a processor: the CUDA kernels' operands, and their adjoint.

The bias of row i and column c is r_i + k_c, for each head. Conv1 is linear in it, so that with W_t, the bias half of
tap t [D, H], the kernels need

    rows     Σ_t W_t · r_i                       columns  Σ_t W_t · k_(j + t − p)
    E        b1 + Σ_t W_t · (r_i + k_c), over the taps whose column c the row sees

and from the gradients G of these terms, the adjoint computes

    dr_i     Σ_t W_tᵀ · G_i + Σ W_tᵀ · G_E       dk_c     Σ_t W_tᵀ · G_(c + p − t) + Σ W_tᵀ · G_E
    dW_t     Σ_i G_i · r_iᵀ + Σ_j G_j · k_(j + t − p)ᵀ + Σ G_E · (r_i + k_c)ᵀ

Products are in float64, since the terms are differences of sums over all tokens. A100 and H100 have tensor cores for
it. Every sum has a fixed order.

B batch, H heads, R query rows, C key columns, D processor width, k kernel size, p = k//2. Heads are padded to 16 and
widths to 32.
"""

import triton
import triton.language as tl

HEADS = tl.constexpr(16)
WIDTH = tl.constexpr(32)
CHANNELS = tl.constexpr(48)
LARGEST_EXCHANGED = tl.constexpr(65504.0)
"""Largest finite number in float16."""


@triton.jit
def _convert_factor(x):
    """Convert a factor of a product to float64.

    Triton derives the layout of a factor from its type before conversions, and supports float64 only if that has 32
    bits or more. A sum over one element hides the conversion.
    """
    return tl.sum(x.to(tl.float64)[:, :, None], 2)


@triton.jit
def _load_tap(w1_ptr, tap, H, D, K: tl.constexpr):
    """Load the bias half of one tap, float64 [16 heads, 32 widths]."""
    head, width = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None]
    pointers = w1_ptr + width * (2 * H * K) + (H + head) * K + tap
    return _convert_factor(tl.load(pointers, (head < H) & (width < D), 0.0))


@triton.jit
def _load_heads(bias_ptr, stride_head, index, inside, H):
    """Load the terms of tokens, float64 [tokens, 16 heads]; 0 for tokens that are not inside."""
    head = tl.arange(0, HEADS)[None]
    return tl.load(bias_ptr + head * stride_head + index[:, None], (head < H) & inside[:, None], 0.0).to(tl.float64)


@triton.jit
def _find_first_column(document_starts_ptr, row, inside, position, window):
    """Return the first column that each row sees."""
    first = tl.zeros_like(row)
    if document_starts_ptr is not None:
        first += tl.load(document_starts_ptr + row, inside, 0)
    return tl.maximum(first, position - window + 1)


@triton.jit
def _locate_tap(first, position, exception, tap, K: tl.constexpr):
    """Return the column that a tap of E reads, and a mask of the rows that see it.

    Exceptions are the 2p columns around the first column that the row sees, then the 2p columns around its last.
    """
    padding: tl.constexpr = K // 2
    column = tl.where(exception < 2 * padding, first, position + (1 - 2 * padding)) + (exception - 2 * padding + tap)
    return column, (column >= first) & (column <= position)


@triton.jit
def _write_fragments(
    w1_ptr, w2_ptr, index_ptr, exchanged_ptr, plain_ptr, count, split, begin, step, BLOCK: tl.constexpr
):
    """Gather weights into the operands of products; the first half is exchanged in float16."""
    for first in range(begin * BLOCK, count, step * BLOCK):
        entry = first + tl.arange(0, BLOCK)
        source = tl.load(index_ptr + entry, entry < count, -1)
        value = tl.load(w1_ptr + source, (source >= 0) & (source < split), 0.0).to(tl.float32)
        value += tl.load(w2_ptr + (source - split), source >= split, 0.0).to(tl.float32)
        rounded = value.to(plain_ptr.dtype.element_ty)
        half = count // 2
        tl.store(plain_ptr + (entry - half), rounded, (entry >= half) & (entry < count))
        value = rounded.to(tl.float32)
        value = tl.where(value > LARGEST_EXCHANGED, LARGEST_EXCHANGED, value)
        value = tl.where(value < -LARGEST_EXCHANGED, -LARGEST_EXCHANGED, value)
        tl.store(exchanged_ptr + entry, value.to(tl.float16), entry < half)


@triton.jit(
    do_not_specialize=[
        *("row_stride", "key_stride", "H", "D", "first", "last", "left", "offset", "window", "C"),
        *("entries", "bias_entries", "count", "split"),
    ]
)
def _gate_operands_kernel(
    row_ptr,  # [B, H, R] float64 or float32
    key_ptr,  # [B, H, C] likewise
    w1_ptr,  # [D, 2H, 1, k]
    b1_ptr,  # [D]
    document_starts_ptr,  # [B, R] int32, or None
    rows_ptr,  # [B, last − first, 32] float32: written
    columns_ptr,  # [B, entries, 32] float32: written
    edge_ptr,  # [B, last − first, 4p, 32] float32: written
    bias_ptr,  # [B, 16, bias_entries] float32: written
    w2_ptr,  # [H, D, 1, k], or None without fragments
    index_ptr,  # [count] int32: entry of w1, `split` plus an entry of w2, or −1
    exchanged_ptr,  # [count / 2] float16: written
    plain_ptr,  # [count / 2] compute type: written
    row_batch,
    row_stride,
    key_batch,
    key_stride,
    starts_batch,
    H,
    D,
    first,
    last,
    left,
    offset,
    window,
    C,
    entries,
    bias_entries,
    count,
    split,
    K: tl.constexpr,
    FRONT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a chunk's operands, relative to its first row.

    Grid: blocks of tokens; sequences; columns, rows, each exception, and the fragments of weights.
    """
    padding: tl.constexpr = K // 2
    sequence, kind = tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_ptr += sequence * row_batch
    key_ptr += sequence * key_batch
    head, width = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    num_rows = last - first
    sums = tl.zeros([BLOCK, WIDTH], tl.float64)
    constant = tl.load(b1_ptr + width, width < D, 0.0).to(tl.float64)
    origin = tl.load(row_ptr + head * row_stride + first, head < H, 0.0).to(tl.float64)[None]
    if kind == 0:
        column_index = token - FRONT
        num_columns = offset + last - left
        for tap in range(K):
            column = left + column_index + (tap - padding)
            terms = _load_heads(key_ptr, key_stride, column, (column >= 0) & (column < C), H) + origin
            sums = tl.dot(terms, _load_tap(w1_ptr, tap, H, D, K), sums, out_dtype=tl.float64)
        is_known = (column_index >= 0) & (column_index < num_columns + padding)
        sums = tl.where(is_known[:, None], sums + constant[None], 0.0)
        pointers = columns_ptr + (sequence * entries + token[:, None]) * WIDTH + width[None]
        tl.store(pointers, sums.to(tl.float32), (token < entries)[:, None])
        is_known = (column_index >= 0) & (column_index < num_columns)
        terms = tl.zeros([BLOCK, HEADS], tl.float64)
        if RESIDUAL:
            own = _load_heads(key_ptr, key_stride, left + column_index, is_known, H) + origin
            terms = tl.where(is_known[:, None], own, 0.0)
        pointers = bias_ptr + (sequence * HEADS + head[None]) * bias_entries + token[:, None]
        tl.store(pointers, terms.to(tl.float32), (token < bias_entries)[:, None])
    elif kind == 1:
        inside = token < num_rows
        terms = _load_heads(row_ptr, row_stride, first + token, inside, H) - origin
        for tap in range(K):
            sums = tl.dot(terms, _load_tap(w1_ptr, tap, H, D, K), sums, out_dtype=tl.float64)
        pointers = rows_ptr + (sequence * num_rows + token[:, None]) * WIDTH + width[None]
        tl.store(pointers, sums.to(tl.float32), inside[:, None])
    elif kind < 2 + 4 * padding:
        inside, row = token < num_rows, first + token
        if document_starts_ptr is not None:
            document_starts_ptr += sequence * starts_batch
        start = _find_first_column(document_starts_ptr, row, inside, offset + row, window)
        for tap in range(K):
            column, is_seen = _locate_tap(start, offset + row, kind - 2, tap, K)
            is_seen = is_seen & inside
            terms = _load_heads(key_ptr, key_stride, column, is_seen, H)
            terms += _load_heads(row_ptr, row_stride, row, is_seen, H)
            sums = tl.dot(terms, _load_tap(w1_ptr, tap, H, D, K), sums, out_dtype=tl.float64)
        entry = (sequence * num_rows + token) * (4 * padding) + (kind - 2)
        tl.store(
            edge_ptr + entry[:, None] * WIDTH + width[None], (sums + constant[None]).to(tl.float32), inside[:, None]
        )
    elif index_ptr is not None:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        # fmt: off
        _write_fragments(w1_ptr, w2_ptr, index_ptr, exchanged_ptr, plain_ptr, count, split,
                         program, tl.num_programs(0) * tl.num_programs(1), BLOCK * 4)
        # fmt: on


@triton.jit
def _load_sums(sums_ptr, token, inside):
    """Load the gradients of hidden values among the CUDA kernels' sums [n, 48], float64 [tokens, 32 widths]."""
    width = tl.arange(0, WIDTH)
    # The channel of a width in the n-tiles of the CUDA kernels, the inverse of `mixer_operands.list_tile_widths`.
    channel = 8 * (2 * (width // 16) + width % 4 // 2) + 2 * (width % 16 // 4) + width % 2
    return tl.load(sums_ptr + token[:, None] * CHANNELS + channel[None], inside[:, None], 0.0).to(tl.float64)


@triton.jit
def _load_edge(dedge_ptr, row, exception, inside, K: tl.constexpr):
    """Load the gradients of an exception of E [R, 4p, 32], float64 [rows, 32 widths]."""
    entry = row * (4 * (K // 2)) + exception
    pointers = dedge_ptr + entry[:, None] * WIDTH + tl.arange(0, WIDTH)[None]
    return tl.load(pointers, inside[:, None], 0.0).to(tl.float64)


@triton.jit
def _add_column_edges(
    sums, column, first_column, dedge_ptr, document_starts_ptr, w1_ptr, H, D, R, offset, window,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the gradients of E to those of a block's columns, [columns, 16 heads]."""
    padding: tl.constexpr = K // 2
    for tap in range(K):
        weight = tl.trans(_load_tap(w1_ptr, tap, H, D, K))
        for exception in range(2 * padding - tap):  # around the last column that a row sees: one row each
            row = column + (2 * padding - 1 - exception - tap) - offset
            inside = (row >= 0) & (row < R)
            start = _find_first_column(document_starts_ptr, row, inside, offset + row, window)
            found = _load_edge(dedge_ptr, row, 2 * padding + exception, inside & (start <= column), K)
            sums = tl.dot(found, weight, sums, out_dtype=tl.float64)
    # Around the first: all rows that begin at most 2p − 1 columns to the left of the column.
    begin = tl.maximum(first_column - offset, 0)
    end = tl.minimum(R, first_column + BLOCK + window - 1 - offset)
    if document_starts_ptr is None and first_column >= 2 * padding:
        begin = tl.maximum(first_column - 2 * padding + window - offset, begin)
    for step in range(begin, end, BLOCK):
        row = step + tl.arange(0, BLOCK)
        inside = row < R
        start = _find_first_column(document_starts_ptr, row, inside, offset + row, window)
        is_near = inside & (start > first_column - 2 * padding) & (start < first_column + BLOCK)
        if tl.max(is_near.to(tl.int32), 0) > 0:
            for exception in range(2 * padding):
                found = _load_edge(dedge_ptr, row, exception, is_near, K)
                for tap in range(2 * padding - exception, K):
                    read = start + (exception + tap - 2 * padding)
                    is_own = (column[:, None] == read[None]) & (is_near & (read <= offset + row))[None]
                    of_columns = tl.dot(_convert_factor(is_own), found, out_dtype=tl.float64)
                    weight = tl.trans(_load_tap(w1_ptr, tap, H, D, K))
                    sums = tl.dot(of_columns, weight, sums, out_dtype=tl.float64)
    return sums


@triton.jit(do_not_specialize=["row_stride", "key_stride", "H", "D", "R", "offset", "window", "C", "entries"])
def _gate_gradients_kernel(
    drows_ptr,  # [B, R, 48] float32
    dcolumns_ptr,  # [B, C, 48] float32
    dedge_ptr,  # [B, R, 4p, 32] float32
    row_ptr,  # [B, H, R] float64 or float32
    key_ptr,  # [B, H, C] likewise
    w1_ptr,  # [D, 2H, 1, k]
    document_starts_ptr,  # [B, R] int32, or None
    drow_ptr,  # [B, H, R], of the terms' type: written
    dkey_ptr,  # [B, H, C], likewise
    partial_ptr,  # [programs, entries] float64: dW [k, 32, 16], then db1 [32]: written
    row_batch,
    row_stride,
    key_batch,
    key_stride,
    starts_batch,
    H,
    D,
    R,
    offset,
    window,
    C,
    entries,
    K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of row and column terms, and each program's share of those of the weights.

    Grid: blocks of tokens; sequences; columns and rows.
    """
    padding: tl.constexpr = K // 2
    sequence, kind = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_token = tl.program_id(0) * BLOCK
    token = first_token + tl.arange(0, BLOCK)
    head, width = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    row_ptr += sequence * row_batch
    key_ptr += sequence * key_batch
    drows_ptr += sequence * R * CHANNELS
    dcolumns_ptr += sequence * C * CHANNELS
    dedge_ptr += sequence * R * (4 * padding * WIDTH)
    if document_starts_ptr is not None:
        document_starts_ptr += sequence * starts_batch
    program = (sequence * tl.num_programs(0) + tl.program_id(0)) * 2 + kind
    partial_ptr += program * entries
    of_weight = partial_ptr + width[:, None] * HEADS + head[None]
    sums = tl.zeros([BLOCK, HEADS], tl.float64)
    nothing = tl.zeros([WIDTH, HEADS], tl.float64)
    if kind == 0:
        inside = token < C
        own = _load_sums(dcolumns_ptr, token, inside)
        for tap in range(K):
            before = token - tap
            found = _load_sums(dcolumns_ptr, before, inside & (before >= 0))
            sums = tl.dot(found, tl.trans(_load_tap(w1_ptr, tap, H, D, K)), sums, out_dtype=tl.float64)
            terms = _load_heads(key_ptr, key_stride, token + tap, token + tap < C, H)
            tl.store(of_weight + tap * (WIDTH * HEADS), tl.dot(tl.trans(own), terms, nothing, out_dtype=tl.float64))
        if padding:
            # fmt: off
            sums = _add_column_edges(sums, token, first_token, dedge_ptr, document_starts_ptr, w1_ptr,
                                     H, D, R, offset, window, K, BLOCK)
            # fmt: on
        tl.store(partial_ptr + K * WIDTH * HEADS + width, tl.zeros([WIDTH], tl.float64))
        sums_ptr, out_ptr, count = dcolumns_ptr, dkey_ptr, C
    else:
        inside = token < R
        start = _find_first_column(document_starts_ptr, token, inside, offset + token, window)
        own = _load_sums(drows_ptr, token, inside)
        terms = _load_heads(row_ptr, row_stride, token, inside, H)
        of_all_taps = tl.dot(tl.trans(own), terms, nothing, out_dtype=tl.float64)
        constant = tl.sum(own, 0)
        for exception in range(4 * padding):
            constant += tl.sum(_load_edge(dedge_ptr, token, exception, inside, K), 0)
        for tap in range(K):
            weight = tl.trans(_load_tap(w1_ptr, tap, H, D, K))
            sums = tl.dot(own, weight, sums, out_dtype=tl.float64)
            of_tap = of_all_taps
            for exception in range(4 * padding):
                column, is_seen = _locate_tap(start, offset + token, exception, tap, K)
                is_seen = is_seen & inside
                found = _load_edge(dedge_ptr, token, exception, is_seen, K)
                bias = _load_heads(key_ptr, key_stride, column, is_seen, H) + terms
                of_tap = tl.dot(tl.trans(found), bias, of_tap, out_dtype=tl.float64)
                sums = tl.dot(found, weight, sums, out_dtype=tl.float64)
            tl.store(of_weight + tap * (WIDTH * HEADS), of_tap)
        tl.store(partial_ptr + K * WIDTH * HEADS + width, constant)
        sums_ptr, out_ptr, count = drows_ptr, drow_ptr, R
    is_real = inside[:, None] & (head < H)[None]
    if RESIDUAL:
        sums += tl.load(sums_ptr + token[:, None] * CHANNELS + (WIDTH + head[None]), is_real, 0.0)
    pointers = out_ptr + (sequence * H + head[None]) * count + token[:, None]
    tl.store(pointers, sums.to(out_ptr.dtype.element_ty), is_real)


@triton.jit(do_not_specialize=["entries", "split", "count", "end_w1", "end_b1", "end_w2", "end"])
def _gate_weights_kernel(
    weights_ptr,  # [split] float32: the CUDA kernels' gradients of weights
    partial_ptr,  # [count, entries] float64, from `_gate_gradients_kernel`
    index_ptr,  # [end] int32: entry of the weights, `split` plus an entry of the partial sums, or −1 for 0
    w1_ptr,  # gradients of w1, b1, w2 and b2: written
    b1_ptr,
    w2_ptr,
    b2_ptr,
    entries,
    split,
    count,
    end_w1,
    end_b1,
    end_w2,
    end,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the programs' gradients, and write those of all weights. Grid: blocks of the weights' entries."""
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    source = tl.load(index_ptr + entry, entry < end, -1)
    is_partial = source >= split
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float64)
    if tl.max(source, 0) >= split:
        for first in range(0, count, BLOCK_M):
            part = first + tl.arange(0, BLOCK_M)[:, None]
            pointers = partial_ptr + part.to(tl.int64) * entries + (source - split)[None]
            sums += tl.load(pointers, (part < count) & is_partial[None], 0.0)
    total = tl.sum(sums, 0)
    total += tl.load(weights_ptr + source, (source >= 0) & (source < split), 0.0).to(tl.float64)
    tl.store(w1_ptr + entry, total.to(w1_ptr.dtype.element_ty), entry < end_w1)
    tl.store(b1_ptr + (entry - end_w1), total.to(b1_ptr.dtype.element_ty), (entry >= end_w1) & (entry < end_b1))
    tl.store(w2_ptr + (entry - end_b1), total.to(w2_ptr.dtype.element_ty), (entry >= end_b1) & (entry < end_w2))
    tl.store(b2_ptr + (entry - end_w2), total.to(b2_ptr.dtype.element_ty), (entry >= end_w2) & (entry < end))

"""Backward processor kernels: gradient of the logits of a chunk → gradients of scores, tables and weights.

B batch, H heads, R query rows of the chunk, C columns of its maps, N distances, D processor width, k kernel size, p =
k//2. BLOCK_H, BLOCK_D: H and D padded for `tl.dot`; BLOCK_KC: k·CHANNELS padded. Tiles are those of `skewed_tiles.py`,
maps those of `scores.py`. Every sum over rows, batch and programs has a fixed order: a program sums its own rows, and a
later kernel adds the programs' sums (`partial_sums.py`). There are no atomics.
"""

import triton
import triton.language as tl

from megatron.kernels.cdape_attention.skewed_tiles import (
    FLOAT16_MAX,
    begin_documents,
    compute_hidden_tile,
    copy_as_product,
    inspect_row_block,
    is_visible_pixel,
    leaky_relu,
    load_contribution_tile,
    load_contributions,
    load_map_tile,
    locate_columns,
    map_pointers,
    repeat_rows,
    saturate,
    shift_pixels,
    split_row_blocks,
)

DO_NOT_SPECIALIZE = [
    "R",
    "C",
    "first_row",
    "first_column",
    "edge_start",
    "edge_row",
    "window",
    "split_blocks",
]


@triton.jit
def activation_backward(gradient, hidden, alive, MASKED: tl.constexpr, SATURATE: tl.constexpr, SLOPE: tl.constexpr):
    """Return the gradient before LeakyReLU and saturation."""
    gradient = tl.where(hidden > 0, gradient, gradient * SLOPE)
    if SATURATE:
        gradient = tl.where((hidden < FLOAT16_MAX) & (hidden > -FLOAT16_MAX), gradient, 0.0)
    if MASKED:
        gradient = tl.where(alive[:, None], gradient, 0.0)
    return gradient


@triton.jit
def dhidden_tile(
    pointers,
    w2_ptr,
    pixels,
    hidden,
    R,
    window,
    MASKED: tl.constexpr,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SATURATE: tl.constexpr,
    SLOPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Return the gradient of Conv1's result on a tile, float32 [PIXELS, BLOCK_D], before LeakyReLU and saturation.

    Also return the gradient of the pixels' own logits, in the compute type.
    """
    row, n, j, alive = pixels
    head, width = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    dhidden = tl.zeros(hidden.shape, tl.float32)
    own = ()
    for tap in tl.static_range(K):
        reach = K // 2 - tap
        seen = is_visible_pixel(row, n - reach, j + reach, R, window)
        dlogits = load_map_tile(pointers + reach * CHANNELS, seen, MASKED, CHANNELS, BLOCK_H)
        if tap == K // 2:
            own = (dlogits,)  # type: ignore[assignment]
        weight = tl.load(w2_ptr + tap * BLOCK_H * BLOCK_D + width[None, :] * BLOCK_H + head[:, None])
        dhidden = tl.dot(dlogits, weight, dhidden, input_precision=INPUT_PRECISION)
    return activation_backward(dhidden, hidden, alive, MASKED, SATURATE, SLOPE), own[0]  # type: ignore[misc]


@triton.jit
def store_channels(ptr, tile, entry, stored, COUNT: tl.constexpr):
    """Store `tile` [entries, channels] as rows of a matrix [·, COUNT], where `stored` is True."""
    channel = tl.arange(0, tile.shape[1])
    mask = stored[:, None] & (channel < COUNT)[None, :]
    tl.store(ptr + (entry * COUNT)[:, None] + channel[None, :], tile, mask=mask)


@triton.jit
def _processor_bwd_rows(
    state,
    first,
    last,
    skipped_from,
    skipped,
    pointers,
    line,
    top,
    extent,
    MASKED: tl.constexpr,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SATURATE: tl.constexpr,
    SLOPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Store dS of row blocks first … last − 1, and add to the sums over rows in the state.

    Blocks from `skipped_from` on are shifted by `skipped`. The state contains the gradients of the bias contributions
    [BLOCK_N, BLOCK_D] and of the bias [BLOCK_N, BLOCK_H]; sums in the halo are discarded. Unless MASKED, all tiles are
    whole.
    """
    bias_contribution_sum, bias_sum = state
    scores_ptr, dlogits_ptr, bias_contributions_ptr, w1_ptr, w2_ptr, dscores_ptr, dedge_ptr = pointers
    R, C, first_row, first_column, edge_start, edge_row, window, document_starts_ptr = extent
    PADDING: tl.constexpr = K // 2
    PIXELS: tl.constexpr = BLOCK_M * BLOCK_N
    head, width = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    pixel = tl.arange(0, PIXELS)
    m = pixel % BLOCK_N
    n = top - m
    middle = (m >= PADDING) & (m < BLOCK_N - PADDING)
    own = middle | (n < 0)
    for step in range(first, last):
        row_block = step
        if MASKED:
            row_block = tl.where(step < skipped_from, step, step + skipped)
        row = row_block * BLOCK_M + pixel // BLOCK_N
        j, edge_index = locate_columns(row, n, R, first_row, edge_row, document_starts_ptr)
        alive = (row < R) & (j >= 0)
        pixels = (row, n, j, alive)
        origin = tl.cast(row_block * BLOCK_M, tl.int64) * (C + 1) + (first_row - first_column - top)
        if MASKED:
            hidden = load_contribution_tile(
                bias_contributions_ptr, n, j, edge_index, alive, edge_start, PADDING, D, BLOCK_D
            )
        else:
            hidden = repeat_rows(line, BLOCK_M, BLOCK_N)
        of_scores = map_pointers(scores_ptr, origin, C, CHANNELS, BLOCK_H, BLOCK_M, BLOCK_N)
        of_logits = map_pointers(dlogits_ptr, origin, C, CHANNELS, BLOCK_H, BLOCK_M, BLOCK_N)
        # fmt: off
        hidden, _ = compute_hidden_tile(hidden, of_scores, w1_ptr, pixels, R, window, MASKED,
                                        CHANNELS, K, BLOCK_H, BLOCK_D, INPUT_PRECISION)
        dhidden, dlogits = dhidden_tile(of_logits, w2_ptr, pixels, hidden, R, window, MASKED,
                                        CHANNELS, K, BLOCK_H, BLOCK_D, SATURATE, SLOPE, INPUT_PRECISION)
        # fmt: on

        inner = dhidden
        if MASKED:
            inner = tl.where((own & (j >= PADDING))[:, None], dhidden, 0.0)
            if PADDING > 0:
                at_edge = own & alive & (j < PADDING)
                entry = row.to(tl.int64) * PADDING + j
                store_channels(dedge_ptr, dhidden, entry, at_edge, D)
        bias_contribution_sum += tl.sum(tl.reshape(inner, (BLOCK_M, BLOCK_N, BLOCK_D)), 0)

        result = copy_as_product(dlogits, BLOCK_H, INPUT_PRECISION)
        if HAS_BIAS:
            bias_sum += tl.sum(tl.reshape(result, (BLOCK_M, BLOCK_N, BLOCK_H)), 0)
        narrow = dhidden.to(w1_ptr.dtype.element_ty)
        for tap in tl.static_range(K):
            weight = tl.load(w1_ptr + tap * BLOCK_H * BLOCK_D + head[None, :] * BLOCK_D + width[:, None])
            part = tl.dot(narrow, weight, input_precision=INPUT_PRECISION)
            if tap != PADDING:
                part = shift_pixels(part, PADDING - tap, PIXELS, BLOCK_H)
            result += part
        is_kept = middle
        if MASKED:
            is_kept = is_kept & is_visible_pixel(row, n, j, R, window)
        result = saturate(result, SATURATE).to(dscores_ptr.dtype.element_ty)
        lines = (pixel // BLOCK_N).to(tl.int64) * (C + 1)
        to = (dscores_ptr + origin) + m[:, None] + (lines[:, None] + (head.to(tl.int64) * R * C)[None, :])
        tl.store(to, result, mask=is_kept[:, None] & (head < H)[None, :])
    return bias_contribution_sum, bias_sum


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _processor_bwd_kernel(
    scores_ptr,  # [B, R, C, CHANNELS] compute type, zero in channels beyond H
    dlogits_ptr,  # [B, R, C, CHANNELS] compute type, of the logits, zero in channels beyond H
    bias_contributions_ptr,  # [p + N + rows·p, D] float32
    w1_ptr,  # [k, BLOCK_H, BLOCK_D] compute type
    w2_ptr,  # [k, BLOCK_D, BLOCK_H] compute type
    dscores_ptr,  # [B, H, R, C] compute type, written where a row sees a column
    dbias_contributions_ptr,  # partial sums [programs, blocks·(BLOCK_N − 2p) + p, D] float32, by distance from −p
    dbias_ptr,  # partial sums [programs, blocks·(BLOCK_N − 2p), H] float32, by distance
    dedge_ptr,  # [B, R, p, D] float32, initially zero
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    R,
    C,
    first_row,
    first_column,
    edge_start,
    edge_row,
    window,
    split_blocks,  # row blocks per split
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SATURATE: tl.constexpr,
    SLOPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute dS and partial sums for BLOCK_N − 2p distances of a split of the rows, all heads.

    Grid: batch, splits, distances. Hidden values in a tile's halo are computed by two programs and counted by the one
    that keeps them; the first block keeps those at n < 0.
    """
    PADDING: tl.constexpr = K // 2
    KEPT_DISTANCES: tl.constexpr = BLOCK_N - 2 * PADDING
    batch, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program = (batch * tl.num_programs(1) + split).to(tl.int64)
    maps = batch.to(tl.int64) * R * C
    scores_ptr += maps * CHANNELS
    dlogits_ptr += maps * CHANNELS
    dscores_ptr += maps * H
    dedge_ptr += batch.to(tl.int64) * R * PADDING * D
    top = block * KEPT_DISTANCES + KEPT_DISTANCES - 1 + PADDING
    if document_starts_ptr is not None:
        document_starts_ptr += batch.to(tl.int64) * R
    extent = (R, C, first_row, first_column, edge_start, edge_row, window, document_starts_ptr)
    pointers = (scores_ptr, dlogits_ptr, bias_contributions_ptr, w1_ptr, w2_ptr, dscores_ptr, dedge_ptr)
    state = (tl.zeros((BLOCK_N, BLOCK_D), tl.float32), tl.zeros((BLOCK_N, BLOCK_H), tl.float32))
    # fmt: off
    if document_starts_ptr is None:
        first, whole, end, last = split_row_blocks(split, split_blocks, top, extent, PADDING, BLOCK_M, BLOCK_N)
        state = _processor_bwd_rows(state, first, last - (end - whole), whole, end - whole, pointers, 0, top, extent,
                                    True, H, CHANNELS, D, K, BLOCK_H, BLOCK_D, BLOCK_M, BLOCK_N, HAS_BIAS, SATURATE,
                                    SLOPE, INPUT_PRECISION)
        if whole < end:
            line = load_contributions(bias_contributions_ptr, top, PADDING, D, BLOCK_D, BLOCK_N)
            state = _processor_bwd_rows(state, whole, end, 0, 0, pointers, line, top, extent, False,
                                        H, CHANNELS, D, K, BLOCK_H, BLOCK_D, BLOCK_M, BLOCK_N, HAS_BIAS, SATURATE,
                                        SLOPE, INPUT_PRECISION)
    else:
        first, last, line = begin_documents(bias_contributions_ptr, split, split_blocks, top, extent, PADDING, D,
                                            BLOCK_D, BLOCK_M, BLOCK_N)
        for index in range(first, last):
            whole, reached = inspect_row_block(index, top, extent, PADDING, BLOCK_M, BLOCK_N)
            if whole:
                state = _processor_bwd_rows(state, index, index + 1, 0, 0, pointers, line, top, extent, False,
                                            H, CHANNELS, D, K, BLOCK_H, BLOCK_D, BLOCK_M, BLOCK_N, HAS_BIAS, SATURATE,
                                            SLOPE, INPUT_PRECISION)
            elif reached:
                state = _processor_bwd_rows(state, index, index + 1, last, 0, pointers, 0, top, extent, True,
                                            H, CHANNELS, D, K, BLOCK_H, BLOCK_D, BLOCK_M, BLOCK_N, HAS_BIAS, SATURATE,
                                            SLOPE, INPUT_PRECISION)
    # fmt: on
    bias_contribution_sum, bias_sum = state
    m = tl.arange(0, BLOCK_N)
    n = top - m
    middle = (m >= PADDING) & (m < BLOCK_N - PADDING)
    distances = tl.num_programs(2) * KEPT_DISTANCES
    entry = program * (distances + PADDING) + n + PADDING
    store_channels(dbias_contributions_ptr, bias_contribution_sum, entry, middle | (n < 0), D)
    if HAS_BIAS:
        store_channels(dbias_ptr, bias_sum, program * distances + n, middle, H)


@triton.jit
def _processor_bwd_dw_rows(
    state,
    first,
    last,
    skipped_from,
    skipped,
    pointers,
    line,
    top,
    extent,
    MASKED: tl.constexpr,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_KC: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SATURATE: tl.constexpr,
    SLOPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add row blocks to both weights' gradients [BLOCK_D, BLOCK_KC]; the blocks are those of `_processor_bwd_rows`.

    The products are transposed, because one with fewer than 64 rows is not a Hopper warp-group product. With BLOCK_KC =
    64 rows, a loop iteration had 16 warp-group products. Their operands' descriptors exceed the uniform registers, and
    ptxas 12.8 then reads an unwritten one: dW2 was wrong on an H200 (docs/log.md).
    """
    first_sum, second_sum = state
    scores_ptr, dlogits_ptr, bias_contributions_ptr, w1_ptr, w2_ptr = pointers
    R, C, first_row, first_column, edge_start, edge_row, window, document_starts_ptr = extent
    PADDING: tl.constexpr = K // 2
    PIXELS: tl.constexpr = BLOCK_M * BLOCK_N
    compute = w1_ptr.dtype.element_ty
    pixel = tl.arange(0, PIXELS)
    n = top - pixel % BLOCK_N
    channel, width = tl.arange(0, BLOCK_KC), tl.arange(0, BLOCK_D)
    reach = channel // CHANNELS - PADDING
    of_weight = channel[:, None] * BLOCK_D + width[None, :]
    for step in range(first, last):
        row_block = step
        if MASKED:
            row_block = tl.where(step < skipped_from, step, step + skipped)
        row = row_block * BLOCK_M + pixel // BLOCK_N
        j, edge_index = locate_columns(row, n, R, first_row, edge_row, document_starts_ptr)
        alive = (row < R) & (j >= 0)
        origin = tl.cast(row_block * BLOCK_M, tl.int64) * (C + 1) + (first_row - first_column - top - PADDING)
        patches = map_pointers(scores_ptr, origin, C, CHANNELS, BLOCK_KC, BLOCK_M, BLOCK_N)
        outputs = map_pointers(dlogits_ptr, origin, C, CHANNELS, BLOCK_KC, BLOCK_M, BLOCK_N)
        if MASKED:
            seen = is_visible_pixel(row[:, None], n[:, None] - reach[None, :], j[:, None] + reach[None, :], R, window)
            seen = seen & (channel < K * CHANNELS)[None, :]
            patch = tl.load(patches, mask=seen, other=0.0)
            output = tl.load(outputs, mask=seen, other=0.0)
            hidden = load_contribution_tile(
                bias_contributions_ptr, n, j, edge_index, alive, edge_start, PADDING, D, BLOCK_D
            )
        else:
            patch = load_map_tile(patches, alive, False, K * CHANNELS, BLOCK_KC)
            output = load_map_tile(outputs, alive, False, K * CHANNELS, BLOCK_KC)
            hidden = repeat_rows(line, BLOCK_M, BLOCK_N)
        hidden = tl.dot(patch, tl.load(w1_ptr + of_weight), hidden, input_precision=INPUT_PRECISION)
        dhidden = tl.dot(output, tl.load(w2_ptr + of_weight), input_precision=INPUT_PRECISION)
        dhidden = activation_backward(dhidden, hidden, alive, MASKED, SATURATE, SLOPE)

        first_sum = tl.dot(tl.trans(dhidden.to(compute)), patch, first_sum, input_precision=INPUT_PRECISION)
        active = leaky_relu(saturate(hidden, SATURATE), SLOPE)
        if MASKED:
            active = tl.where(alive[:, None], active, 0.0)
        second_sum = tl.dot(tl.trans(active.to(compute)), output, second_sum, input_precision=INPUT_PRECISION)
    return first_sum, second_sum


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _processor_bwd_dw_kernel(
    scores_ptr,  # [B, R, C, CHANNELS] compute type, zero in channels beyond H
    dlogits_ptr,  # [B, R, C, CHANNELS] compute type, of the logits, zero in channels beyond H
    bias_contributions_ptr,  # [p + N + rows·p, D] float32
    w1_ptr,  # [BLOCK_KC, BLOCK_D] compute type, row t·CHANNELS + h
    w2_ptr,  # [BLOCK_KC, BLOCK_D] compute type, the same with its taps mirrored
    dw_ptr,  # partial sums [programs, 2, BLOCK_KC, BLOCK_D] float32, of w1 and w2
    document_starts_ptr,  # [B, R] int32, positions at which the rows' documents begin, or None
    R,
    C,
    first_row,
    first_column,
    edge_start,
    edge_row,
    window,
    split_blocks,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_KC: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SATURATE: tl.constexpr,
    SLOPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Compute partial weight gradients for BLOCK_N distances, from −p on, of a split of the rows.

    Grid: batch, splits, distances. Taps and channels form one axis, so that a pixel's neighborhood, which is
    contiguous, is one row of a matrix, and each weight's gradient is one product with one accumulator.
    """
    PADDING: tl.constexpr = K // 2
    batch, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program = (batch * tl.num_programs(1) + split).to(tl.int64) * tl.num_programs(2) + block
    maps = batch.to(tl.int64) * R * C * CHANNELS
    top = block * BLOCK_N + BLOCK_N - 1 - PADDING
    if document_starts_ptr is not None:
        document_starts_ptr += batch.to(tl.int64) * R
    extent = (R, C, first_row, first_column, edge_start, edge_row, window, document_starts_ptr)
    pointers = (scores_ptr + maps, dlogits_ptr + maps, bias_contributions_ptr, w1_ptr, w2_ptr)
    state = (tl.zeros((BLOCK_D, BLOCK_KC), tl.float32), tl.zeros((BLOCK_D, BLOCK_KC), tl.float32))
    # fmt: off
    if document_starts_ptr is None:
        first, whole, end, last = split_row_blocks(split, split_blocks, top, extent, PADDING, BLOCK_M, BLOCK_N)
        state = _processor_bwd_dw_rows(state, first, last - (end - whole), whole, end - whole, pointers, 0, top, extent,
                                       True, CHANNELS, D, K, BLOCK_KC, BLOCK_D, BLOCK_M, BLOCK_N, SATURATE,
                                       SLOPE, INPUT_PRECISION)
        if whole < end:
            line = load_contributions(bias_contributions_ptr, top, PADDING, D, BLOCK_D, BLOCK_N)
            state = _processor_bwd_dw_rows(state, whole, end, 0, 0, pointers, line, top, extent, False,
                                           CHANNELS, D, K, BLOCK_KC, BLOCK_D, BLOCK_M, BLOCK_N, SATURATE,
                                           SLOPE, INPUT_PRECISION)
    else:
        first, last, line = begin_documents(bias_contributions_ptr, split, split_blocks, top, extent, PADDING, D,
                                            BLOCK_D, BLOCK_M, BLOCK_N)
        for index in range(first, last):
            whole, reached = inspect_row_block(index, top, extent, PADDING, BLOCK_M, BLOCK_N)
            if whole:
                state = _processor_bwd_dw_rows(state, index, index + 1, 0, 0, pointers, line, top, extent, False,
                                               CHANNELS, D, K, BLOCK_KC, BLOCK_D, BLOCK_M, BLOCK_N, SATURATE,
                                               SLOPE, INPUT_PRECISION)
            elif reached:
                state = _processor_bwd_dw_rows(state, index, index + 1, last, 0, pointers, 0, top, extent, True,
                                               CHANNELS, D, K, BLOCK_KC, BLOCK_D, BLOCK_M, BLOCK_N, SATURATE,
                                               SLOPE, INPUT_PRECISION)
    # fmt: on
    first_sum, second_sum = state
    channel, width = tl.arange(0, BLOCK_KC), tl.arange(0, BLOCK_D)
    of_weight = channel[None, :] * BLOCK_D + width[:, None]
    tl.store(dw_ptr + program * 2 * BLOCK_KC * BLOCK_D + of_weight, first_sum)
    tl.store(dw_ptr + (program * 2 + 1) * BLOCK_KC * BLOCK_D + of_weight, second_sum)

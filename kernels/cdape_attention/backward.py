"""Backward processor kernels: gradient of the logits of a chunk → gradients of scores, tables and weights.

B batch, H heads, R query rows of the chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. BLOCK_H, BLOCK_D: H and D padded for `tl.dot`; BLOCK_KC: k·CHANNELS padded. Tiles as in `forward.py`, maps as
in `scores.py`. Every sum over rows, batch and programs has one order: a program adds up its own rows, PyTorch adds up
the programs. No atomics.
"""

import triton
import triton.language as tl

from kernels.cdape_attention.forward import (
    FLOAT16_MAX,
    NEGATIVE_SLOPE,
    compute_hidden_tile,
    is_visible_pixel,
    leaky_relu,
    load_contribution_tile,
    load_map_tile,
    saturate,
    shift_pixels,
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
def activation_backward(gradient, hidden, alive, SATURATE: tl.constexpr):
    """The gradient before LeakyReLU and saturation."""
    gradient = gradient * tl.where(hidden > 0, 1.0, NEGATIVE_SLOPE)
    if SATURATE:
        gradient = tl.where((hidden < FLOAT16_MAX) & (hidden > -FLOAT16_MAX), gradient, 0.0)
    return tl.where(alive[:, None], gradient, 0.0)


@triton.jit
def dhidden_tile(
    dlogits_ptr,
    w2_ptr,
    pixels,
    hidden,
    extent,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SATURATE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """The gradient of Conv1's result on a tile, float32 [PIXELS, BLOCK_D], before LeakyReLU and saturation."""
    row, n, j, alive = pixels
    R, C, first_column, _, _, window = extent
    head, width = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    dhidden = tl.zeros(hidden.shape, tl.float32)
    for tap in tl.static_range(K):
        reach = K // 2 - tap
        seen = is_visible_pixel(row, n - reach, j + reach, R, window)
        dlogits = load_map_tile(dlogits_ptr, row, j + reach, seen, C, first_column, CHANNELS, BLOCK_H)
        weight = tl.load(w2_ptr + tap * BLOCK_H * BLOCK_D + width[None, :] * BLOCK_H + head[:, None])
        dhidden = tl.dot(dlogits, weight, dhidden, input_precision=INPUT_PRECISION)
    return activation_backward(dhidden, hidden, alive, SATURATE)


@triton.jit
def store_channels(ptr, tile, entry, stored, COUNT: tl.constexpr):
    """`tile` [entries, channels] as rows of a matrix [·, COUNT], those that are stored."""
    channel = tl.arange(0, tile.shape[1])
    mask = stored[:, None] & (channel < COUNT)[None, :]
    tl.store(ptr + (entry * COUNT)[:, None] + channel[None, :], tile, mask=mask)


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _processor_bwd_kernel(
    scores_ptr,  # [B, R, C, CHANNELS] compute type, zero in channels beyond H
    dlogits_ptr,  # [B, R, C, CHANNELS] compute type, of the logits, zero in channels beyond H
    bias_contributions_ptr,  # [p + N + rows·p, D] float32
    w1_ptr,  # [k, BLOCK_H, BLOCK_D] compute type
    w2_ptr,  # [k, BLOCK_D, BLOCK_H] compute type
    dscores_ptr,  # [B, H, R, C] compute type, written where a row sees a column; must be zero elsewhere
    dbias_contributions_ptr,  # partial sums [programs, blocks·(BLOCK_N − 2p) + p, D] float32, by distance from −p
    dbias_ptr,  # partial sums [programs, blocks·(BLOCK_N − 2p), H] float32, by distance
    dedge_ptr,  # [B, R, p, D] float32, holds zeros before
    R,
    C,
    first_row,
    first_column,
    edge_start,
    edge_row,
    window,
    split_blocks,  # blocks of rows per split
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
    INPUT_PRECISION: tl.constexpr,
):
    """One program: BLOCK_N − 2p distances of a split of the rows, all heads. Grid: distances, splits, batch.

    Hidden values in a tile's halo are computed by two programs and counted by the one that keeps them; those at n < 0
    are kept by the first block.
    """
    PADDING: tl.constexpr = K // 2
    KEPT_DISTANCES: tl.constexpr = BLOCK_N - 2 * PADDING
    PIXELS: tl.constexpr = BLOCK_M * BLOCK_N
    block, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program = (batch * tl.num_programs(1) + split).to(tl.int64)
    head, width = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    channel = head.to(tl.int64)
    maps = batch.to(tl.int64) * R * C
    scores_ptr += maps * CHANNELS
    dlogits_ptr += maps * CHANNELS
    dscores_ptr += maps * H
    pixel = tl.arange(0, PIXELS)
    m = pixel % BLOCK_N
    n = block * KEPT_DISTANCES + KEPT_DISTANCES - 1 + PADDING - m
    middle = (m >= PADDING) & (m < BLOCK_N - PADDING)
    own = middle | (n < 0)
    bias_contribution_sum = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    bias_sum = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    # Rows before stand left of column 0.
    first = tl.maximum(split * split_blocks, (block * KEPT_DISTANCES - first_row) // BLOCK_M)
    last = tl.minimum((split + 1) * split_blocks, tl.cdiv(R, BLOCK_M))
    extent = (R, C, first_column, edge_start, edge_row, window)
    for row_block in range(first, last):
        row = row_block * BLOCK_M + pixel // BLOCK_N
        j = first_row + row - n
        alive = (row < R) & (j >= 0)
        pixels = (row, n, j, alive)
        # fmt: off
        hidden = compute_hidden_tile(scores_ptr, bias_contributions_ptr, w1_ptr, pixels, extent,
                                     CHANNELS, D, K, BLOCK_H, BLOCK_D, INPUT_PRECISION)
        dhidden = dhidden_tile(dlogits_ptr, w2_ptr, pixels, hidden, extent,
                               CHANNELS, K, BLOCK_H, BLOCK_D, SATURATE, INPUT_PRECISION)
        # fmt: on

        inner = tl.where((own & (j >= PADDING))[:, None], dhidden, 0.0)
        bias_contribution_sum += tl.sum(tl.reshape(inner, (BLOCK_M, BLOCK_N, BLOCK_D)), 0)
        if PADDING > 0:
            at_edge = own & alive & (j < PADDING)
            entry = (batch.to(tl.int64) * R + row) * PADDING + j
            store_channels(dedge_ptr, dhidden, entry, at_edge, D)

        is_kept = is_visible_pixel(row, n, j, R, window) & middle
        result = load_map_tile(dlogits_ptr, row, j, is_kept, C, first_column, CHANNELS, BLOCK_H).to(tl.float32)
        if HAS_BIAS:
            bias_sum += tl.sum(tl.reshape(result, (BLOCK_M, BLOCK_N, BLOCK_H)), 0)
        narrow = dhidden.to(w1_ptr.dtype.element_ty)
        for tap in tl.static_range(K):
            weight = tl.load(w1_ptr + tap * BLOCK_H * BLOCK_D + head[None, :] * BLOCK_D + width[:, None])
            part = tl.dot(narrow, weight, input_precision=INPUT_PRECISION)
            if tap != PADDING:
                part = shift_pixels(part, PADDING - tap, PIXELS, BLOCK_H)
            result += part
        offsets = (channel * R * C)[None, :] + (row * C + j - first_column)[:, None]
        result = saturate(result, SATURATE).to(dscores_ptr.dtype.element_ty)
        tl.store(dscores_ptr + offsets, result, mask=is_kept[:, None] & (head < H)[None, :])

    m = tl.arange(0, BLOCK_N)
    n = block * KEPT_DISTANCES + KEPT_DISTANCES - 1 + PADDING - m
    middle = (m >= PADDING) & (m < BLOCK_N - PADDING)
    distances = tl.num_programs(0) * KEPT_DISTANCES
    entry = program * (distances + PADDING) + n + PADDING
    store_channels(dbias_contributions_ptr, bias_contribution_sum, entry, middle | (n < 0), D)
    if HAS_BIAS:
        store_channels(dbias_ptr, bias_sum, program * distances + n, middle, H)


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _processor_bwd_dw_kernel(
    scores_ptr,  # [B, R, C, CHANNELS] compute type, zero in channels beyond H
    dlogits_ptr,  # [B, R, C, CHANNELS] compute type, of the logits, zero in channels beyond H
    bias_contributions_ptr,  # [p + N + rows·p, D] float32
    w1_ptr,  # [BLOCK_KC, BLOCK_D] compute type, row t·CHANNELS + h
    w2_ptr,  # [BLOCK_KC, BLOCK_D] compute type, the same with its taps mirrored
    dw_ptr,  # partial sums [programs, 2, BLOCK_KC, BLOCK_D] float32, of w1 and w2
    R,
    C,
    first_row,
    first_column,
    edge_start,
    edge_row,
    window,
    split_blocks,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_KC: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SATURATE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """One program: BLOCK_N distances, from −p on, of a split of the rows. Grid: distances, splits, batch.

    Taps and channels are one axis, so that a pixel's neighbourhood, which lies in one piece, is one row of a matrix and
    each weight's gradient one product with one accumulator.
    """
    PADDING: tl.constexpr = K // 2
    PIXELS: tl.constexpr = BLOCK_M * BLOCK_N
    block, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program = (batch * tl.num_programs(1) + split).to(tl.int64) * tl.num_programs(0) + block
    maps = batch.to(tl.int64) * R * C * CHANNELS
    compute = w1_ptr.dtype.element_ty
    pixel = tl.arange(0, PIXELS)
    n = block * BLOCK_N + BLOCK_N - 1 - PADDING - pixel % BLOCK_N
    channel, width = tl.arange(0, BLOCK_KC), tl.arange(0, BLOCK_D)
    reach = channel // CHANNELS - PADDING
    of_weight = channel[:, None] * BLOCK_D + width[None, :]
    first_sum = tl.zeros((BLOCK_KC, BLOCK_D), tl.float32)
    second_sum = tl.zeros((BLOCK_KC, BLOCK_D), tl.float32)
    first = tl.maximum(split * split_blocks, (block * BLOCK_N - PADDING - first_row) // BLOCK_M)
    last = tl.minimum((split + 1) * split_blocks, tl.cdiv(R, BLOCK_M))
    for row_block in range(first, last):
        row = row_block * BLOCK_M + pixel // BLOCK_N
        j = first_row + row - n
        alive = (row < R) & (j >= 0)
        seen = is_visible_pixel(row[:, None], n[:, None] - reach[None, :], j[:, None] + reach[None, :], R, window)
        seen = seen & (channel < K * CHANNELS)[None, :]
        offsets = maps + ((row * C + j - first_column - PADDING) * CHANNELS)[:, None] + channel[None, :]
        patch = tl.load(scores_ptr + offsets, mask=seen, other=0.0)
        hidden = load_contribution_tile(
            bias_contributions_ptr, row, n, j, alive, edge_start, edge_row, PADDING, D, BLOCK_D
        )
        hidden = tl.dot(patch, tl.load(w1_ptr + of_weight), hidden, input_precision=INPUT_PRECISION)

        output = tl.load(dlogits_ptr + offsets, mask=seen, other=0.0)
        dhidden = tl.dot(output, tl.load(w2_ptr + of_weight), input_precision=INPUT_PRECISION)
        dhidden = activation_backward(dhidden, hidden, alive, SATURATE)

        first_sum = tl.dot(tl.trans(patch), dhidden.to(compute), first_sum, input_precision=INPUT_PRECISION)
        hidden = saturate(hidden, SATURATE)
        active = tl.where(alive[:, None], leaky_relu(hidden), 0.0).to(compute)
        second_sum = tl.dot(tl.trans(output), active, second_sum, input_precision=INPUT_PRECISION)
    tl.store(dw_ptr + program * 2 * BLOCK_KC * BLOCK_D + of_weight, first_sum)
    tl.store(dw_ptr + (program * 2 + 1) * BLOCK_KC * BLOCK_D + of_weight, second_sum)

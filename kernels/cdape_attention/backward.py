"""Backward mixer kernels: gradient of the logits of a chunk → gradients of scores, tables and weights.

B batch, H heads, R query rows of the chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. HP, DP: H and D padded for `tl.dot`; KC: k·H padded. Tiles as in `tiles.py`. Every sum over rows, batch and
programs has one order: a program adds up its own rows, PyTorch adds up the programs. No atomics.
"""

import triton
import triton.language as tl

from kernels.cdape_attention.tiles import (
    LARGEST,
    SLOPE,
    hidden_tile,
    is_seen,
    map_tile,
    saturate,
    share_tile,
    shifted,
)

RUNTIME = [
    "ROWS",
    "COLUMNS",
    "first_row",
    "first_column",
    "share_count",
    "edge_row",
    "window",
    "split_blocks",
]


@triton.jit
def through_activation(gradient, hidden, alive, SATURATE: tl.constexpr):
    """The gradient before LeakyReLU and saturation."""
    gradient = gradient * tl.where(hidden > 0, 1.0, SLOPE)
    if SATURATE:
        gradient = tl.where((hidden < LARGEST) & (hidden > -LARGEST), gradient, 0.0)
    return tl.where(alive[:, None], gradient, 0.0)


@triton.jit(do_not_specialize=RUNTIME)
def mix_backward(
    scores,  # [B, H, R, C] compute type
    gradient,  # [B, H, R, C] float32, of the logits
    shares,  # [p + N + rows·p, D] float32
    w1,  # [k, HP, DP] compute type
    w2,  # [k, DP, HP] compute type
    score_gradient,  # [B, H, R, C] compute type, written where a row sees a column; zero elsewhere before
    share_partial,  # [programs, blocks·(BN − 2p) + p, D] float32, by distance from −p
    bias_partial,  # [programs, blocks·(BN − 2p), H] float32, by distance
    edge_gradient,  # [B, R, p, D] float32, holds zeros before
    ROWS,
    COLUMNS,
    first_row,
    first_column,
    share_count,
    edge_row,
    window,
    split_blocks,  # blocks of rows per split
    H: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    HP: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SATURATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BN − 2p distances of a split of the rows, all heads. Grid: distances, splits, batch.

    Hidden values in a tile's halo are computed by two programs and counted by the one that keeps them; those at n < 0
    are kept by the first block.
    """
    PADDING: tl.constexpr = K // 2
    KEPT: tl.constexpr = BN - 2 * PADDING
    P: tl.constexpr = BM * BN
    block, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program = (batch * tl.num_programs(1) + split).to(tl.int64)
    head, width = tl.arange(0, HP), tl.arange(0, DP)
    channel = head.to(tl.int64)
    maps = batch.to(tl.int64) * H * ROWS * COLUMNS
    pixel = tl.arange(0, P)
    m = pixel % BN
    n = block * KEPT + KEPT - 1 + PADDING - m
    middle = (m >= PADDING) & (m < BN - PADDING)
    own = middle | (n < 0)
    share_sum = tl.zeros((BN, DP), tl.float32)
    bias_sum = tl.zeros((BN, HP), tl.float32)
    first = tl.maximum(split * split_blocks, (block * KEPT - first_row) // BM)  # rows before stand left of column 0
    last = tl.minimum((split + 1) * split_blocks, tl.cdiv(ROWS, BM))
    for row_block in range(first, last):
        row = row_block * BM + pixel // BN
        j = first_row + row - n
        alive = (row < ROWS) & (j >= 0)
        hidden = hidden_tile(
            scores + maps,
            shares,
            w1,
            row,
            n,
            j,
            alive,
            ROWS,
            COLUMNS,
            first_column,
            share_count,
            edge_row,
            window,
            H,
            D,
            K,
            HP,
            DP,
            PRECISION,
        )
        into_hidden = tl.zeros((P, DP), tl.float32)
        for tap in tl.static_range(K):
            reach = K // 2 - tap
            seen = is_seen(row, n - reach, j + reach, ROWS, window)
            taken = map_tile(gradient + maps, row, j + reach, seen, ROWS, COLUMNS, first_column, H, HP)
            weight = tl.load(w2 + tap * HP * DP + width[None, :] * HP + head[:, None])
            into_hidden = tl.dot(taken.to(w2.dtype.element_ty), weight, into_hidden, input_precision=PRECISION)
        into_hidden = through_activation(into_hidden, hidden, alive, SATURATE)

        inner = tl.where((own & (j >= PADDING))[:, None], into_hidden, 0.0)
        share_sum += tl.sum(tl.reshape(inner, (BM, BN, DP)), 0)
        if PADDING > 0:
            at_edge = own & alive & (j < PADDING)
            entry = (batch.to(tl.int64) * ROWS + row) * PADDING + j
            tl.store(
                edge_gradient + (entry * D)[:, None] + width[None, :],
                into_hidden,
                mask=at_edge[:, None] & (width < D)[None, :],
            )

        kept = is_seen(row, n, j, ROWS, window) & middle
        result = map_tile(gradient + maps, row, j, kept, ROWS, COLUMNS, first_column, H, HP)
        if HAS_BIAS:
            bias_sum += tl.sum(tl.reshape(result, (BM, BN, HP)), 0)
        narrow = into_hidden.to(w1.dtype.element_ty)
        for tap in tl.static_range(K):
            weight = tl.load(w1 + tap * HP * DP + head[None, :] * DP + width[:, None])
            part = tl.dot(narrow, weight, input_precision=PRECISION)
            if tap != PADDING:
                part = shifted(part, PADDING - tap, P, HP)
            result += part
        place = (channel * ROWS * COLUMNS)[None, :] + (row * COLUMNS + j - first_column)[:, None]
        result = saturate(result, SATURATE).to(score_gradient.dtype.element_ty)
        tl.store(score_gradient + maps + place, result, mask=kept[:, None] & (head < H)[None, :])

    m = tl.arange(0, BN)
    n = block * KEPT + KEPT - 1 + PADDING - m
    middle = (m >= PADDING) & (m < BN - PADDING)
    distances = tl.num_programs(0) * KEPT
    entry = program * (distances + PADDING) + n + PADDING
    stored = (middle | (n < 0))[:, None] & (width < D)[None, :]
    tl.store(share_partial + (entry * D)[:, None] + width[None, :], share_sum, mask=stored)
    if HAS_BIAS:
        entry = program * distances + n
        stored = middle[:, None] & (head < H)[None, :]
        tl.store(bias_partial + (entry * H)[:, None] + head[None, :], bias_sum, mask=stored)


@triton.jit(do_not_specialize=RUNTIME)
def weight_backward(
    scores,  # [B, H, R, C] compute type
    gradient,  # [B, H, R, C] float32, of the logits
    shares,  # [p + N + rows·p, D] float32
    w1,  # [KC, DP] compute type, row t·H + h
    w2,  # [KC, DP] compute type, row t·H + h
    partial,  # [programs, 2, KC, DP] float32, of w1 and w2
    ROWS,
    COLUMNS,
    first_row,
    first_column,
    share_count,
    edge_row,
    window,
    split_blocks,
    H: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    KC: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SATURATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BN distances, from −p on, of a split of the rows. Grid: distances, splits, batch.

    Taps and heads are one axis of k·H channels, so that a pixel's neighbourhood is one row of a matrix and each
    weight's gradient one product with one accumulator.
    """
    PADDING: tl.constexpr = K // 2
    P: tl.constexpr = BM * BN
    block, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program = (batch * tl.num_programs(1) + split).to(tl.int64) * tl.num_programs(0) + block
    maps = batch.to(tl.int64) * H * ROWS * COLUMNS
    compute = w1.dtype.element_ty
    pixel = tl.arange(0, P)
    n = block * BN + BN - 1 - PADDING - pixel % BN
    channel, width = tl.arange(0, KC), tl.arange(0, DP)
    head, reach = (channel % H).to(tl.int64), channel // H - PADDING
    of_weight = channel[:, None] * DP + width[None, :]
    first_sum = tl.zeros((KC, DP), tl.float32)
    second_sum = tl.zeros((KC, DP), tl.float32)
    first = tl.maximum(split * split_blocks, (block * BN - PADDING - first_row) // BM)
    last = tl.minimum((split + 1) * split_blocks, tl.cdiv(ROWS, BM))
    for row_block in range(first, last):
        row = row_block * BM + pixel // BN
        j = first_row + row - n
        alive = (row < ROWS) & (j >= 0)
        place = (head * ROWS * COLUMNS)[None, :] + (row * COLUMNS + j - first_column)[:, None]
        real = (channel < K * H)[None, :]

        seen = is_seen(row[:, None], n[:, None] - reach[None, :], j[:, None] + reach[None, :], ROWS, window) & real
        patch = tl.load(scores + maps + place + reach[None, :], mask=seen, other=0.0)
        hidden = share_tile(shares, row, n, j, alive, share_count, edge_row, PADDING, D, DP)
        hidden = tl.dot(patch, tl.load(w1 + of_weight), hidden, input_precision=PRECISION)

        seen = is_seen(row[:, None], n[:, None] + reach[None, :], j[:, None] - reach[None, :], ROWS, window) & real
        output = tl.load(gradient + maps + place - reach[None, :], mask=seen, other=0.0).to(compute)
        into_hidden = tl.dot(output, tl.load(w2 + of_weight), input_precision=PRECISION)
        into_hidden = through_activation(into_hidden, hidden, alive, SATURATE)

        first_sum = tl.dot(tl.trans(patch), into_hidden.to(compute), first_sum, input_precision=PRECISION)
        hidden = saturate(hidden, SATURATE)
        active = tl.where(alive[:, None], tl.where(hidden > 0, hidden, SLOPE * hidden), 0.0).to(compute)
        second_sum = tl.dot(tl.trans(output), active, second_sum, input_precision=PRECISION)
    tl.store(partial + program * 2 * KC * DP + of_weight, first_sum)
    tl.store(partial + (program * 2 + 1) * KC * DP + of_weight, second_sum)

"""Logits by a CUDA kernel (`cuda/mixer_forward.h`): what it reads, and how it is launched.

B batch, H heads, R query rows of a chunk, C columns of its maps, N distances, D processor width, k kernel size,
p = k//2. The kernel pads H to 16 and D to 32.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cdape_attention.geometry import HEADS, WIDTH, KernelFamily, MixerKernel, Tile
from kernels.cdape_attention.mixer import (
    LARGEST_EXCHANGED,
    TABLE_FRONT,
    Launch,
    ScoreInputs,
    Spans,
    build_score_inputs,
    count_distances,
    exchange_fragments,
)
from kernels.cdape_attention.weights import PackedWeights, WeightShape
from kernels.runtime import cdiv

KERNELS = KernelFamily(
    *("mixer_forward.h", "MixerForward<{}>", "MixerForwardArgs"),
    ((Tile(32, 16), 48640), (Tile(32, 32), 87808), (Tile(16, 64), 97152), (Tile(16, 32), 43904)),
)
GROUP = 8
"""Distances of the table that lie together."""


class LogitArgs(ctypes.Structure):
    """Inputs of the logits, as `cuda/logits.h` declares them."""

    _fields_ = (
        ("scores", ScoreInputs),
        *((name, ctypes.c_void_p) for name in ("table", "edge", "w1", "w2", "bias")),
        *((name, ctypes.c_int) for name in ("table_group", "bias_front", "bias_stride")),
    )


class MixerForwardArgs(ctypes.Structure):
    """Arguments of the kernel, as `cuda/mixer_forward.h` declares them."""

    _fields_ = (
        ("inputs", LogitArgs),
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("q_batch", "k_batch", "logits_batch")),
    )


class LogitInputs(NamedTuple):
    """Inputs of the kernel for one chunk of rows."""

    queries: Tensor
    """[B, H, R, d], scaled: rows of a tensor whose last two dimensions are contiguous."""
    keys: Tensor
    """[B, H, C or more, d], alike; C is the position after the chunk's last row."""
    contributions: Tensor
    """float32 [p + N, D]: U from distance −p on (`bias_product.py`)."""
    edge: Tensor
    """float32 [R, p, D]: E of the chunk's rows, or with documents of all positions in one."""
    bias_table: Tensor
    """float32 [H, N], added to the logits; [H, 0] where there is none."""
    weights: PackedWeights
    shape: WeightShape
    position: int
    """Column of the chunk's first row: its position, if the maps begin at position 0."""
    spans: Spans | None = None


def compute_logits(inputs: LogitInputs, kernel: MixerKernel, launch: Launch) -> Tensor:
    """Return the logits of a chunk, float32 [B, H, R, C], undefined where a row does not see a column.

    Args:
        kernel: of `KERNELS`.
        launch: runs a kernel on a grid of (blocks, sequences): on a GPU, or in a test's emulator.
    """
    batch, heads, rows, _ = inputs.queries.shape
    columns = inputs.position + rows
    packed = pack_inputs(inputs)
    logits = torch.empty(batch, heads, rows, columns, dtype=torch.float32, device=inputs.queries.device)
    strides = (x.stride(0) * x.element_size() for x in (inputs.queries, inputs.keys, logits))
    launch(
        kernel.code, (cdiv(rows, kernel.tile.rows), batch), MixerForwardArgs(packed.args, logits.data_ptr(), *strides)
    )
    return logits


class PackedInputs(NamedTuple):
    """A kernel's arguments, and the tensors that they point to."""

    args: LogitArgs
    tensors: tuple[Tensor, ...]


def pack_inputs(inputs: LogitInputs, bias_copies: int = 1) -> PackedInputs:
    """Pack what the logits of a chunk are computed from.

    Args:
        bias_copies: see `build_bias`.
    """
    shape, padding, position = inputs.shape, inputs.shape.padding, inputs.position
    rows = inputs.queries.shape[2]
    distances = count_distances(rows, position, inputs.spans)
    table, group = build_group_table(inputs.contributions, padding, position, distances)
    bias, bias_front = build_bias(inputs.bias_table, inputs.weights.b2, position, distances, bias_copies)
    edge = F.pad(inputs.edge, (0, WIDTH - shape.width))
    tensors = (table, edge, *exchange_fragments(inputs.weights), bias)
    args = LogitArgs(
        build_score_inputs(inputs.queries, inputs.keys, position + rows, position, inputs.spans),
        *(x.data_ptr() for x in tensors),
        *(group, bias_front, bias.shape[-1]),
    )
    return PackedInputs(args, tensors)


def build_group_table(contributions: Tensor, padding: int, position: int, distances: int) -> tuple[Tensor, int]:
    """Return U as operands of products, and the group of the distance of a chunk's first row and column p + 7.

    Returns:
        float16 [groups, 2 halves of the width, 32 lanes, 2 n-tiles, 2 groups, 2]; zero beyond the given distances.
    """
    least = position - padding - 7  # is the first distance of a group
    front = TABLE_FRONT + GROUP + -(least + TABLE_FRONT) % GROUP
    groups = cdiv(front + distances, GROUP) + 3
    covered = min(contributions.shape[0], distances + padding)
    sides = (0, WIDTH - contributions.shape[1], front - padding, (groups + 1) * GROUP - (front - padding) - covered)
    padded = F.pad(contributions[:covered], sides).clamp_(-LARGEST_EXCHANGED, LARGEST_EXCHANGED)
    # The distance is 8·(group + next) + 2t + half of a word, the width 16·step + 4·(g // 2) + 2·n + g % 2.
    sizes = (groups, 2, 4, 2, 4, 2, 2, 2)  # group, step, g // 2, g % 2, t, n, next, half of a word
    strides = (GROUP * WIDTH, 16, 4, 1, 2 * WIDTH, 2, GROUP * WIDTH, WIDTH)
    by_digit = padded.as_strided(sizes, strides)
    table = by_digit.to(torch.float16, memory_format=torch.contiguous_format)
    return table.view(groups, 2, 32, 2, 2, 2), (front + least) // GROUP


def build_bias(bias_table: Tensor, b2: Tensor, position: int, distances: int, copies: int = 1) -> tuple[Tensor, int]:
    """Return what is added to the logits by head and distance, and the entry of distance 0.

    Args:
        copies: 1, or 4, of which copy x is shifted by 3 − x entries, so that any four distances begin at a multiple of
            4 in one of them.

    Returns:
        float32 [copies, 16, entries].
    """
    heads, known = bias_table.shape
    front = TABLE_FRONT + -position % 4
    entries, shift = cdiv(front + distances + 4, 4) * 4, copies - 1
    table = torch.empty(HEADS, entries + shift, dtype=torch.float32, device=b2.device).copy_(b2[:HEADS, None])
    covered = min(known, distances)
    if covered:
        table[:heads, front + shift : front + shift + covered] += bias_table[:, :covered]
    return table.as_strided((copies, HEADS, entries), (1, entries + shift, 1)).contiguous(), front

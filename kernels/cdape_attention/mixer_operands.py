"""Operands of the CUDA kernels in the orders in which these read them, and their gradients back.

N distances, D processor width, k kernel size, p = k//2. The kernels pad H to 16 and D to 32.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cdape_attention.weights import PackedWeights, WeightShape
from kernels.runtime import cdiv

HEADS, WIDTH = 16, 32
TABLE_FRONT = 64
"""Entries of U in front of distance 0: tiles at the diagonal look so far ahead."""
LARGEST_EXCHANGED = torch.finfo(torch.float16).max
GROUP = 8
"""Distances of the table that lie together."""


def build_table(contributions: Tensor, padding: int, distances: int) -> Tensor:
    """U in the order of accumulators, float32 [entries, 64]: entry e has distances e − front and e − front + 8."""
    width = contributions.shape[1]
    entries = TABLE_FRONT + distances
    entries += entries % 2
    covered = min(contributions.shape[0], distances + padding + 8)
    room = entries + 8 - (TABLE_FRONT - padding) - covered
    padded = F.pad(contributions[:covered], (0, WIDTH - width, TABLE_FRONT - padding, room))
    halves = padded.index_select(1, _list_table_columns(padded.device))  # [rows, entry's parity, step, n, t, 2]
    row = halves.shape[1]
    sizes = (entries // 2, 2, 2, 2, 4, 2, 2)  # entry, its parity, step, n, t, distance, width
    strides = (2 * row, row + row // 2, 16, 8, 2, 8 * row, 1)
    return halves.as_strided(sizes, strides).contiguous().view(entries, 2 * WIDTH)


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


def build_fragments(weights: PackedWeights) -> tuple[Tensor, Tensor, Tensor]:
    """W1 in float16, W2ᵀ and W1ᵀ as operands of products: [k, 4, 32 lanes, 4]."""
    indices = _build_fragment_indices(weights.w1.shape[0], weights.w1.device)
    w1, w2 = weights.w1.flatten(), weights.w2.flatten()
    return (
        _exchange(w1).index_select(0, indices.w1),
        w2.index_select(0, indices.w2_back),
        w1.index_select(0, indices.w1_back),
    )


def exchange_fragments(weights: PackedWeights) -> tuple[Tensor, Tensor]:
    """W1 and W2 in float16 as operands of products: [k, 4, 32 lanes, 4]."""
    indices = _build_fragment_indices(weights.w1.shape[0], weights.w1.device)
    w1, w2 = _exchange(weights.w1.flatten()), _exchange(weights.w2.flatten())
    return w1.index_select(0, indices.w1), w2.index_select(0, indices.w2)


def _exchange(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_EXCHANGED, LARGEST_EXCHANGED).to(torch.float16)


def unpack_weights(sums: Tensor, shape: WeightShape) -> Tensor:
    """The weights' gradients in the order of `PackedWeights.patches1` and `patches2`: [2, KC, DP]."""
    index = _build_patch_index(shape, sums.device)
    return F.pad(sums, (0, 1)).index_select(0, index).view(2, shape.patch_rows, WIDTH)


def _width(tile: int | Tensor, column: int | Tensor) -> int | Tensor:
    """The width that stands in a column of an n-tile, so that a lane has four neighbors."""
    return 16 * (tile // 2) + 4 * (column // 2) + 2 * (tile % 2) + column % 2


@cache
def _list_table_columns(device: torch.device) -> Tensor:
    """Columns of U by parity of the entry, step, n, t and width: n is swapped where the parity is odd."""
    columns = [
        _width(2 * step + (n ^ parity), 2 * t + x)
        for parity in range(2)
        for step in range(2)
        for n in range(2)
        for t in range(4)
        for x in range(2)
    ]
    return torch.tensor(columns, device=device)


@cache
def list_head_columns(device: torch.device) -> Tensor:
    """Return the columns of heads 0 … 15 in the sums along diagonals."""
    columns = [WIDTH + h % 8 // 2 * 4 + h // 8 * 2 + h % 2 for h in range(HEADS)]
    return torch.tensor(columns, device=device)


class _FragmentIndices(NamedTuple):
    """Indices of operands of products, into W1 [k, 16, 32] or W2 [k, 32, 16]."""

    w1: Tensor
    w2: Tensor
    w1_back: Tensor
    w2_back: Tensor


@cache
def _build_fragment_indices(taps: int, device: torch.device) -> _FragmentIndices:
    tap, tile, lane, word, half = torch.meshgrid(*(torch.arange(n) for n in (taps, 4, 32, 2, 2)), indexing="ij")
    g, t = lane // 4, lane % 4
    head, width = 2 * t + 8 * word + half, _width(tile, g)
    w1 = (tap * HEADS + head) * WIDTH + width
    w2_back = (tap * WIDTH + width) * HEADS + head
    step, n = tile // 2, tile % 2
    head, width = 8 * n + g, _width(2 * step + word, 2 * t + half)
    w1_back = (tap * HEADS + head) * WIDTH + width
    w2 = (tap * WIDTH + width) * HEADS + head
    return _FragmentIndices(*(x.flatten().to(device) for x in (w1, w2, w1_back, w2_back)))


@cache
def _build_patch_index(shape: WeightShape, device: torch.device) -> Tensor:
    """Into sums [2, k, 4 n-tiles, 32 lanes, 4], which are followed by a zero."""
    taps = shape.kernel_size
    which, tap, tile, lane, x = torch.meshgrid(*(torch.arange(n) for n in (2, taps, 4, 32, 4)), indexing="ij")
    head, width = lane // 4 + 8 * (x // 2), _width(tile, 2 * (lane % 4) + x % 2)
    mirrored = torch.where(which == 0, tap, taps - 1 - tap)  # the taps of the second are (`weights.py`)
    place = (which * shape.patch_rows + mirrored * HEADS + head) * WIDTH + width
    index = torch.full((2 * shape.patch_rows * WIDTH,), place.numel())
    index[place.flatten()] = torch.arange(place.numel())
    return index.to(device)

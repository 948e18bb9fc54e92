"""Operands of the CUDA kernels in the kernels' layouts, and conversion of their gradients back.

The operands of all layers are built together by a few operations, because the host launches them one by one. Operands
of the logits are built before the first layer, those of the backward pass before the backward pass of its first layer.

L layers, H heads, N distances, D processor width, k kernel size, p = k//2. `geometry.pad_sizes` pads H and D.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.cdape_attention.geometry import HEADS, WIDTH, pad_sizes
from megatron.kernels.cdape_attention.scores import count_padded_channels
from megatron.kernels.cdape_attention.weights import PackedWeights, WeightShape
from megatron.kernels.runtime import cdiv

TABLE_FRONT = 96
"""Number of entries of U, or of the bias, before distance 0. Tiles at the diagonal read them."""
LARGEST_EXCHANGED = torch.finfo(torch.float16).max
GROUP = 8
"""Number of adjacent distances in a group of the table of `build_group_table`."""
BIAS_COPIES = 4
"""Number of copies of the bias, see `build_bias`."""
BLOCK_ROWS = 32
"""Largest number of rows of a block."""
MAX_TILE_COLUMNS = 64


def build_group_table(
    contributions: Tensor, padding: int, position: int, distances: int, padded_width: int
) -> tuple[Tensor, int]:
    """Return U [L, n, D] as operands of products, and the index of a row's first group.

    Returns:
        Operands, float16 [L, groups, widths / 16, 32 lanes, 2 n-tiles, 2 groups, 2], zero beyond the given distances;
        and the index of the group that contains the distance between the row at `position` and column p + 7. For a row
        8 positions later, it is the next group.
    """
    layers, known, width = contributions.shape
    least = position - padding - 7  # first distance of a group
    front = TABLE_FRONT + GROUP + -(least + TABLE_FRONT) % GROUP
    groups = cdiv(front + distances, GROUP) + 3
    covered = min(known, distances + padding)
    sides = (0, padded_width - width, front - padding, (groups + 1) * GROUP - (front - padding) - covered)
    padded = F.pad(contributions[:, :covered], sides).clamp_(-LARGEST_EXCHANGED, LARGEST_EXCHANGED)
    # The distance is 8·(group + next) + 2t + (half of a word); the width is 16·step + 4·(g // 2) + 2·n + g % 2.
    steps, row = padded_width // 16, padded_width
    sizes = (layers, groups, steps, 4, 2, 4, 2, 2, 2)  # layer, group, step, g // 2, g % 2, t, n, next, half of a word
    strides = (padded.stride(0), GROUP * row, 16, 4, 1, 2 * row, 2, GROUP * row, row)
    by_digit = padded.as_strided(sizes, strides)
    table = by_digit.to(torch.float16, memory_format=torch.contiguous_format)
    return table.view(layers, groups, steps, 32, 2, 2, 2), (front + least) // GROUP


def build_bias(bias_table: Tensor, b2: Tensor, position: int, distances: int, padded_heads: int) -> tuple[Tensor, int]:
    """Return the bias of the logits by head and distance, and the entry of distance 0 in the last copy.

    Copy x is shifted by 3 − x entries. Any four consecutive distances then begin at a multiple of 4 in one copy.

    Args:
        bias_table: [L, H, N], or [L, H, 0] if only the constant is added.
        b2: [L, heads], padded.
        position: position of a row, modulo 4. Its distance from column 0 is at a multiple of 4 in the last copy.

    Returns:
        float32 [L, 4 copies, padded heads, entries].
    """
    layers, heads, known = bias_table.shape
    front = TABLE_FRONT + -position % 4
    entries, shift = cdiv(front + distances + 4, 4) * 4, BIAS_COPIES - 1
    table = torch.empty(layers, padded_heads, entries + shift, dtype=torch.float32, device=b2.device)
    table.copy_(b2[:, :padded_heads, None])
    if covered := min(known, distances):
        table[:, :heads, front + shift : front + shift + covered].add_(bias_table[:, :, :covered])
    layer, row, _ = table.stride()
    return table.as_strided((layers, BIAS_COPIES, padded_heads, entries), (layer, 1, row, 1)).contiguous(), front


class Fragments(NamedTuple):
    """Weights as operands of products, each [L, parts of the width · k · 4 · 32 lanes · 4]."""

    w1: Tensor
    """W1 in float16."""
    w2: Tensor
    """W2 in float16."""
    w1_back: Tensor
    """W1ᵀ."""
    w2_back: Tensor
    """W2ᵀ."""


def build_fragments(w1: Tensor, w2: Tensor, padded_width: int) -> Fragments:
    """Return W1 [L, k, H, D] and W2 [L, k, D, H] as operands of products, for 16 or 32 heads."""
    if missing := padded_width - w1.shape[3]:
        w1, w2 = F.pad(w1, (0, missing)), F.pad(w2, (0, 0, 0, missing))
    joined = torch.cat([w1.flatten(1), w2.flatten(1)], 1)
    gathered = joined.index_select(1, build_fragment_index(w1.shape[1], w1.shape[2], padded_width, w1.device))
    exchanged, plain = gathered.chunk(2, 1)
    return Fragments(*_exchange(exchanged).chunk(2, 1), *plain.chunk(2, 1))


def _exchange(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_EXCHANGED, LARGEST_EXCHANGED).to(torch.float16)


def unpack_weights(sums: Tensor, shape: WeightShape) -> Tensor:
    """Return the weights' gradients in the order of `PackedWeights.patches1` and `patches2`: [L, 2, KC, DP]."""
    index = _build_patch_index(shape, sums.device)
    return F.pad(sums, (0, 1)).index_select(1, index).view(-1, 2, *shape.packed[2])


def unpack_tables(sums: Tensor, shape: WeightShape) -> tuple[Tensor, Tensor]:
    """Return the gradients of U [L, n, D] from distance −p on, and of the bias of the logits [L, n, H].

    Args:
        sums: sums along diagonals, [L, n, padded D + 16].
    """
    by_head = sums.index_select(2, _list_head_columns(sums.shape[2], sums.device))
    return sums[..., : shape.width], by_head[..., : shape.heads]


class LogitTables(NamedTuple):
    """Tables by distance for the logits of rows from a position on."""

    table: Tensor
    """U, in the layout of `build_group_table`."""
    group: int
    """Index of the group that contains the distance between the row at the position and column p + 7."""
    bias: Tensor
    """Bias of the logits, in the layout of `build_bias`."""
    bias_front: int
    """Entry of distance 0 in the last copy of the bias."""


@dataclass(frozen=True, eq=False)
class MixerOperands:
    """Operands of L layers. Each kind is built for all layers when it is first requested."""

    contributions: Tensor
    """float32 [L, p + N, D]: U from distance −p on (`bias_product.py`)."""
    edge: Tensor
    """float32 [L, R, p, D]: E of the call's rows, or of all positions of a document if rows contain several."""
    bias_table: Tensor
    """float32 [L, H, N], added to the logits; [L, H, 0] if nothing is added."""
    weights: PackedWeights
    """Packed weights of all layers; L is the first dimension of each."""
    shape: WeightShape
    last: int
    """Position after the call's last row."""
    _tables: dict[int, LogitTables] = field(default_factory=dict, init=False, repr=False)

    @property
    def distances(self) -> int:
        """Number of distances that row blocks read, including those of tiles that begin left of column 0."""
        return self.last + BLOCK_ROWS - 1 + MAX_TILE_COLUMNS

    @property
    def padded_sizes(self) -> tuple[int, int]:
        """Padded number of heads and padded width with which kernels compute."""
        return pad_sizes(self.shape.heads, self.shape.width)

    @cached_property
    def fragments(self) -> Fragments:
        return build_fragments(self.weights.w1, self.weights.w2, self.padded_sizes[1])

    @cached_property
    def wide_edge(self) -> Tensor:
        """E, [L, R, p, D], with D padded."""
        missing = self.padded_sizes[1] - self.shape.width
        return F.pad(self.edge, (0, missing)) if missing else self.edge

    def find_logit_tables(self, position: int) -> LogitTables:
        """Return the tables by distance for the logits of rows from a position on."""
        first = position % GROUP
        if first not in self._tables:
            heads, width = self.padded_sizes
            table, group = build_group_table(self.contributions, self.shape.padding, first, self.distances, width)
            self._tables[first] = LogitTables(
                table, group, *build_bias(self.bias_table, self.weights.b2, first, self.distances, heads)
            )
        tables = self._tables[first]
        return tables._replace(group=tables.group + position // GROUP)


def find_pointer(stacked: Tensor, layer: int) -> int:
    """Return the address of a layer's slice of a tensor whose first dimension is L."""
    return stacked.data_ptr() + layer * stacked.stride(0) * stacked.element_size()


def _width(tile: int | Tensor, column: int | Tensor) -> int | Tensor:
    """Return the width index in a column of an n-tile. A lane has four neighboring widths."""
    return 16 * (tile // 2) + 4 * (column // 2) + 2 * (tile % 2) + column % 2


def list_tile_widths() -> list[int]:
    """Return the width index of each column of each n-tile."""
    return [int(_width(tile, column)) for tile in range(4) for column in range(8)]


@cache
def _list_head_columns(channels: int, device: torch.device) -> Tensor:
    """Return the columns of heads 0 … 15 in the sums along diagonals, which begin with those of all widths."""
    columns = [channels - HEADS + h % 8 // 2 * 4 + h // 8 * 2 + h % 2 for h in range(HEADS)]
    return torch.tensor(columns, device=device)


@cache
def build_fragment_index(taps: int, heads: int, width: int, device: torch.device) -> Tensor:
    """Return the index of all `Fragments` into W1 [k, H, D], followed by W2 [k, D, H]."""
    groups = heads // HEADS
    part_width = WIDTH // groups
    sizes = (width // part_width, taps, 4, 32, 2, 2)
    part, tap, tile, lane, word, half = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")
    g, t = lane // 4, lane % 4

    def index(head: Tensor, in_part: int | Tensor) -> tuple[Tensor, Tensor]:
        column = part * part_width + in_part
        return (tap * heads + head) * width + column, ((taps + tap) * width + column) * heads + head

    group, n = tile // (4 // groups), tile % (4 // groups)
    w1, w2_back = index(HEADS * group + 2 * t + 8 * word + half, _width(n, g))
    step, n = tile // (2 * groups), tile % (2 * groups)
    w1_back, w2 = index(8 * n + g, _width(2 * step + word, 2 * t + half))
    return torch.cat([x.flatten() for x in (w1, w2, w1_back, w2_back)]).to(device)


@cache
def _build_patch_index(shape: WeightShape, device: torch.device) -> Tensor:
    """Build the index into sums [2, k, n-tiles of the padded width, 32 lanes, 4], which are followed by a zero."""
    taps, tiles = shape.kernel_size, pad_sizes(shape.heads, shape.width)[1] // 8
    which, tap, tile, lane, x = torch.meshgrid(*(torch.arange(n) for n in (2, taps, tiles, 32, 4)), indexing="ij")
    head, width = lane // 4 + 8 * (x // 2), _width(tile, 2 * (lane % 4) + x % 2)
    mirrored = torch.where(which == 0, tap, taps - 1 - tap)  # those of the second weight (`weights.py`)
    channels, (rows, columns) = count_padded_channels(shape.heads), shape.packed[2]
    is_kept = (head < channels) & (width < columns)
    place = (which * rows + mirrored * channels + head) * columns + width
    index = torch.full((2 * rows * columns,), place.numel())
    index[place[is_kept]] = torch.arange(place.numel()).view_as(place)[is_kept]
    return index.to(device)

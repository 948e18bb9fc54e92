"""Gather weights into the layouts that kernels and products read, and gather their gradients back.

There are dozens of layouts, and the host would launch small operations for each. All weights are therefore concatenated
and gathered once, by an index that depends on the shapes alone. The weights of several layers are gathered together.

L layers, H heads, D processor width, k kernel size, p = k//2. HP and DP are H and D padded for matrix products, and KC
is k·channels padded, the length of a patch (`backward.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.cdape_attention.bias_term import promote_to_float32
from megatron.kernels.cdape_attention.scores import count_padded_channels
from megatron.kernels.head_dim import pad_for_dot


@dataclass(frozen=True)
class WeightShape:
    """Sizes of a processor, which determine all layouts."""

    heads: int
    width: int
    kernel_size: int
    has_bias: bool
    """True if Conv1 reads a bias."""
    is_linear: bool = False
    """True without an activation between both convolutions, False with LeakyReLU."""

    @cached_property
    def padding(self) -> int:
        """Number of columns that the taps reach to each side, p."""
        return self.kernel_size // 2

    @cached_property
    def patch_rows(self) -> int:
        """Number of rows of a patch matrix, KC."""
        return pad_for_dot(self.kernel_size * count_padded_channels(self.heads))

    @cached_property
    def weights(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the weights and constants of Conv1 and Conv2."""
        heads, width, size = self.heads, self.width, self.kernel_size
        return (width, heads * (1 + self.has_bias), 1, size), (width,), (heads, width, 1, size), (heads,)

    @cached_property
    def packed(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of `PackedWeights` in the compute type."""
        heads, width = pad_for_dot(self.heads), pad_for_dot(self.width)
        patches = (self.patch_rows, width)
        return (self.kernel_size, heads, width), (self.kernel_size, width, heads), patches, patches

    @cached_property
    def packed_float32(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of `PackedWeights` in float32."""
        columns = self.width * (1 + self.padding)
        rows = self.heads * self.kernel_size if self.has_bias else 0
        return (pad_for_dot(self.heads),), (rows, columns), (columns,)


@cache
def get_weight_shape(heads: int, width: int, kernel_size: int, has_bias: bool, is_linear: bool = False) -> WeightShape:
    """Return the shape for calls of these sizes, cached with its derived sizes."""
    return WeightShape(heads, width, kernel_size, has_bias, is_linear)


class PackedWeights(NamedTuple):
    """All weights of a call in the kernels' layouts; with a leading dimension L for several layers."""

    w1: Tensor
    """Conv1's score half [k, HP, DP]."""
    w2: Tensor
    """Conv2 [k, DP, HP]."""
    patches1: Tensor
    """Conv1's score half [KC, DP], row t·channels + h."""
    patches2: Tensor
    """Conv2 [KC, DP] with mirrored taps, because it is read in reverse."""
    b2: Tensor
    """Constant of Conv2, float32 [HP]."""
    bias_weight: Tensor
    """Bias half of Conv1, float32 [H·k, D·(1 + p)], the last tap first.

    The first D columns apply to map columns that all taps reach; the others to column j < p, without the taps beyond
    the left edge.
    """
    constants: Tensor
    """Conv1's constant for each of these columns, float32 [D·(1 + p)]."""


class _Index(NamedTuple):
    packed: Tensor
    """Indices of a layer's packed weights; those in the compute type come first."""
    sizes: list[int]
    """Number of entries in the compute type, and in float32."""
    gradients: Tensor
    """Indices [(1 + p) · entries of a layer's weights] into the tensor that `unpack_gradients` concatenates."""


def pack_weights(
    shape: WeightShape, weights: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], dtype: torch.dtype
) -> PackedWeights:
    """Pack the weights w1, b1, w2, b2 (see `args.CdapeArgs`) of L layers for a compute type."""
    first = weights[0][0]
    index, zero = _build_index(shape, first.device), _build_zero(first.dtype, first.device)
    joined = torch.cat([x for w1, b1, w2, b2 in weights for x in (w1.reshape(-1), b1, w2.reshape(-1), b2, zero)])
    gathered = joined.view(len(weights), -1).index_select(1, index.packed)
    packed, packed_float32 = gathered.split(index.sizes, 1)
    return PackedWeights(
        *_split(packed.to(dtype), shape.packed), *_split(promote_to_float32(packed_float32), shape.packed_float32)
    )


def unpack_gradients(
    shape: WeightShape, patches: Tensor, bias_weight: Tensor, constants: Tensor, dtypes: tuple[torch.dtype, ...]
) -> list[tuple[Tensor, ...]]:
    """Return the gradients of each layer's w1, b1, w2 and b2; that of b2 is zero.

    Args:
        patches: gradients of `patches1` and `patches2`, [L, 2, KC, DP].
        bias_weight, constants: gradients of these `PackedWeights`; `constants` summed over its columns, [L, D].
        dtypes: types of the weights.
    """
    layers = len(patches)
    zero = _build_zero(constants.dtype, patches.device).expand(layers, 1)
    joined = torch.cat([patches.view(layers, -1), bias_weight.view(layers, -1), constants, zero], dim=1)
    gathered = joined.index_select(1, _build_index(shape, patches.device).gradients)
    if shape.padding:
        gathered = gathered.view(layers, 1 + shape.padding, -1).sum(1)
    if len(set(dtypes)) == 1:
        pieces = _split(gathered.to(dtypes[0]), shape.weights)
    else:
        pieces = [x.to(dtype) for x, dtype in zip(_split(gathered, shape.weights), dtypes, strict=True)]
    return list(zip(*(piece.unbind() for piece in pieces), strict=True))


def _split(flat: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Split the first entries of [L, n] into tensors of these shapes, with L as the first dimension."""
    sizes = _list_sizes(shapes)
    pieces = flat.split([*sizes, flat.shape[1] - sum(sizes)], 1)
    return [piece.view(len(flat), *shape) for piece, shape in zip(pieces, shapes, strict=False)]


@cache
def _list_sizes(shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    return [prod(shape) for shape in shapes]


@cache
def _build_zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=dtype, device=device)


@cache
def _build_index(shape: WeightShape, device: torch.device) -> _Index:
    """Build the index on the CPU by packing entry numbers as the weights are packed."""
    with torch.inference_mode(False):
        numbers = torch.arange(sum(prod(piece) for piece in shape.weights))
        zero = len(numbers)  # padding reads the zero at the end
        w1, b1, w2, b2 = (x[0] for x in _split(numbers[None], shape.weights))
        heads, width, size, padding = shape.heads, shape.width, shape.kernel_size, shape.padding
        scores, second = w1[:, :heads, 0], w2[:, :, 0]
        packed = [torch.full(piece, zero) for piece in shape.packed]
        packed[0][:, :heads, :width] = scores.permute(2, 1, 0)
        packed[1][:, :width, :heads] = second.permute(2, 1, 0)
        channels = count_padded_channels(heads)
        for patches, weight in ((packed[2], scores), (packed[3], second.transpose(0, 1).flip(2))):
            by_tap = patches[: size * channels].view(size, channels, -1)
            by_tap[:, :heads, :width] = weight.permute(2, 1, 0)
        packed_b2, bias_weight, constants = (torch.full(piece, zero) for piece in shape.packed_float32)
        packed_b2[:heads] = b2
        constants[:] = b1.repeat(1 + padding)
        if shape.has_bias:
            by_column = bias_weight.view(heads, size, 1 + padding, width)
            last_tap_first = w1[:, heads:, 0].flip(2).permute(1, 2, 0)  # [H, k, D]
            by_column[:, :, 0] = last_tap_first
            for column in range(padding):
                taps = padding + column + 1
                by_column[:, :taps, 1 + column] = last_tap_first[:, :taps]
        gradients = _invert(shape, packed[2:], bias_weight, zero)
        halves = [_flatten(pieces) for pieces in (packed, [packed_b2, bias_weight, constants])]
        # Padded, so that the next layer's entries also begin at a multiple of 16 bytes.
        halves = [F.pad(half, (0, -len(half) % 16), value=zero) for half in halves]
        sizes = [len(half) for half in halves]
        return _Index(torch.cat(halves).to(device), sizes, gradients.flatten().to(device))


def list_packed_sources(shape: WeightShape) -> tuple[Tensor, Tensor]:
    """Return the source of each entry of `PackedWeights.w1` and `w2`, [k, HP, DP] and [k, DP, HP] on the CPU.

    Sources are entries of the flat w1, b1, w2 and b2; padding has the number of all these entries.
    """
    w1, w2, *_ = _split(_build_index(shape, torch.device("cpu")).packed[None], shape.packed)
    return w1[0], w2[0]


def _flatten(pieces: list[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _invert(shape: WeightShape, patches: list[Tensor], bias_weight: Tensor, zero: int) -> Tensor:
    """Return where each weight's gradient is in the tensor that `unpack_gradients` concatenates, up to 1 + p times."""
    read_from = _flatten([*patches, bias_weight])
    place_of_zero = len(read_from) + shape.width
    gradients = torch.full((1 + shape.padding, zero), place_of_zero)
    uses = torch.zeros(zero, dtype=torch.int64)
    for place, weight in enumerate(read_from.tolist()):
        if weight != zero:
            gradients[uses[weight], weight] = place
            uses[weight] += 1
    first = prod(shape.weights[0])
    gradients[0, first : first + shape.width] = len(read_from) + torch.arange(shape.width)
    return gradients

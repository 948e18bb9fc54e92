"""Weights in the orders in which kernels and products read them, and their gradients back: a few gathers.

The host issues each operation, whatever its size, and there are dozens of such orders and pieces: so all weights are
joined and gathered once, by an index that follows from the shapes alone.

H heads, D processor width, k kernel size, p = k//2, HP and DP padded for matrix products, KC patches (`forward.py`).
"""

from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cdape_attention.reference import at_least_float32
from kernels.cdape_attention.scores import padded_channels
from kernels.head_dim import pad_for_dot


@dataclass(frozen=True)
class WeightShape:
    """What all orders follow from."""

    heads: int
    width: int
    kernel_size: int
    has_bias: bool
    """Does Conv1 read a bias?"""

    @cached_property
    def padding(self) -> int:
        """p: how many columns a tap reaches to either side."""
        return self.kernel_size // 2

    @cached_property
    def patch_rows(self) -> int:
        """KC."""
        return pad_for_dot(self.kernel_size * padded_channels(self.heads))

    @cached_property
    def weights(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of Conv1's weight and constant and of Conv2's."""
        heads, width, size = self.heads, self.width, self.kernel_size
        return (width, heads * (1 + self.has_bias), 1, size), (width,), (heads, width, 1, size), (heads,)

    @cached_property
    def packed(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what `PackedWeights` has in the compute type."""
        heads, width = pad_for_dot(self.heads), pad_for_dot(self.width)
        patches = (self.patch_rows, width)
        return (self.kernel_size, heads, width), (self.kernel_size, width, heads), patches, patches

    @cached_property
    def packed_float32(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what it has in float32."""
        columns = self.width * (1 + self.padding)
        rows = self.heads * self.kernel_size if self.has_bias else 0
        return (pad_for_dot(self.heads),), (rows, columns), (columns,)


class PackedWeights(NamedTuple):
    """All weights of a call, as they are read."""

    w1: Tensor
    """Conv1's score half [k, HP, DP]."""
    w2: Tensor
    """[k, DP, HP]."""
    patches1: Tensor
    """Conv1's score half [KC, DP], row t·channels + h."""
    patches2: Tensor
    """Conv2 [KC, DP], the taps mirrored: it is read backwards."""
    b2: Tensor
    """float32 [HP]."""
    bias_weight: Tensor
    """Conv1's bias half, float32 [H·k, D·(1 + p)], the last tap first: the first D columns for columns of a map that
    all taps reach, the others for column j < p, without the taps that fall off the left edge."""
    constants: Tensor
    """Conv1's constant for each of these columns, float32 [D·(1 + p)]."""


class _Index(NamedTuple):
    packed: Tensor
    """Of all packed weights, those in the compute type first."""
    sizes: list[int]
    """Entries of these, and of the others."""
    gradients: Tensor
    """[(1 + p) · entries of all weights] into what `unpack_gradients` joins."""


def pack_weights(
    shape: WeightShape, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dtype: torch.dtype
) -> PackedWeights:
    """Weights as `args.CdapeArgs` has them, for a compute type."""
    index = _build_index(shape, w1.device)
    joined = torch.cat([w1.reshape(-1), b1, w2.reshape(-1), b2, _build_zero(w1.dtype, w1.device)])
    packed, packed_float32 = joined.index_select(0, index.packed).split(index.sizes)
    return PackedWeights(
        *_split(packed.to(dtype), shape.packed), *_split(at_least_float32(packed_float32), shape.packed_float32)
    )


def unpack_gradients(
    shape: WeightShape, patches: Tensor, bias_weight: Tensor, constants: Tensor, dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor, ...]:
    """The gradients of w1, b1, w2 and b2, whose own is zero.

    Args:
        patches: those of `patches1` and `patches2`, [2, KC, DP].
        bias_weight, constants: those of `PackedWeights`; `constants` summed over its columns, [D].
        dtypes: of the weights.
    """
    joined = torch.cat(
        [patches.view(-1), bias_weight.view(-1), constants, _build_zero(constants.dtype, patches.device)]
    )
    gathered = joined.index_select(0, _build_index(shape, patches.device).gradients)
    if shape.padding:
        gathered = gathered.view(1 + shape.padding, -1).sum(0)
    if len(set(dtypes)) == 1:
        return tuple(_split(gathered.to(dtypes[0]), shape.weights))
    return tuple(x.to(dtype) for x, dtype in zip(_split(gathered, shape.weights), dtypes, strict=True))


def _split(flat: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [piece.view(shape) for piece, shape in zip(flat.split(_list_sizes(shapes)), shapes, strict=True)]


@cache
def _list_sizes(shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    return [prod(shape) for shape in shapes]


@cache
def _build_zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=dtype, device=device)


@cache
def _build_index(shape: WeightShape, device: torch.device) -> _Index:
    """Built on the CPU by moving the entries' own numbers, as the weights themselves would move."""
    with torch.inference_mode(False):
        numbers = torch.arange(sum(prod(piece) for piece in shape.weights))
        zero = len(numbers)  # what is padding reads the zero at the end
        w1, b1, w2, b2 = _split(numbers, shape.weights)
        heads, width, size, padding = shape.heads, shape.width, shape.kernel_size, shape.padding
        scores, second = w1[:, :heads, 0], w2[:, :, 0]
        packed = [torch.full(piece, zero) for piece in shape.packed]
        packed[0][:, :heads, :width] = scores.permute(2, 1, 0)
        packed[1][:, :width, :heads] = second.permute(2, 1, 0)
        channels = padded_channels(heads)
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
        everything = _flatten([*packed, packed_b2, bias_weight, constants])
        num_packed = sum(prod(piece) for piece in shape.packed)
        sizes = [num_packed, len(everything) - num_packed]
        return _Index(everything.to(device), sizes, gradients.flatten().to(device))


def _flatten(pieces: list[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _invert(shape: WeightShape, patches: list[Tensor], bias_weight: Tensor, zero: int) -> Tensor:
    """Where each weight's gradient lies in what `unpack_gradients` joins, up to 1 + p times."""
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

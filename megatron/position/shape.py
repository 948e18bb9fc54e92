"""What an encoding or a processor is told about the model it is built for, and ranges of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

ALL_HEADS = slice(None)
"""The heads of a layer, where a rank holds them all."""


@dataclass(frozen=True)
class AttentionDims:
    """Sizes of the attention that a method is built for."""

    num_heads: int
    head_dim: int
    hidden_size: int
    train_length: int
    """Tokens per training sequence."""
    max_length: int
    """Rows of an absolute position table."""


@dataclass(frozen=True, eq=False)
class SampledPositions:
    """Positions that stand in for the places 0, 1, … of a sequence (see `randomized.py`)."""

    values: Tensor
    """int64 [T], strictly increasing, in 0 … limit − 1."""
    limit: int


@dataclass(frozen=True)
class PositionRange:
    """The places start, start + 1, …, start + length − 1 of a sequence.

    Query rows and key columns are given as spans, never as the indices of a tensor, so a full forward pass, a block
    of rows and a step of decoding are the same code. Python integers keep them exact and off the device.

    Who may see whom is decided by places; what a position encoding is told are positions: the places themselves, or
    the ones drawn for them.
    """

    start: int
    length: int
    sampled: SampledPositions | None = None

    @property
    def stop(self) -> int:
        """The first place after the span."""
        return self.start + self.length

    @property
    def position_limit(self) -> int:
        """All positions of the span are smaller."""
        return self.stop if self.sampled is None else self.sampled.limit

    def indices(self, device: torch.device | str | None = None) -> Tensor:
        """The places as int64 [length]."""
        return torch.arange(self.start, self.stop, device=device)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """The positions as int64 [length]."""
        if self.sampled is None:
            return self.indices(device)
        return self.sampled.values[self.start : self.stop].to(device)


def count_distances(query: PositionRange, key: PositionRange) -> int:
    """The number of distances n = i − j ≥ 0 that a table must hold for these rows and columns."""
    return max(query.position_limit - (key.start if key.sampled is None else 0), 1)


def causal_mask(
    query: PositionRange, key: PositionRange, device: torch.device | str | None = None, window: int | None = None
) -> Tensor:
    """Bool [R, C]: may the query row see the key column? With a window, only the last `window` places, its own too."""
    distance = query.indices(device)[:, None] - key.indices(device)[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def promote_to_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged where it is wider already (float64 in tests)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

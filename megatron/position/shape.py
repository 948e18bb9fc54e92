"""What an encoding or a processor is told about the model it is built for, and ranges of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

ALL_HEADS = slice(None)
"""The heads of a layer, where a rank holds them all."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the attention that a method is built for."""

    num_heads: int
    head_dim: int
    hidden_size: int
    train_length: int
    """Tokens per training sequence."""
    max_length: int
    """Rows of an absolute position table."""


@dataclass(frozen=True, eq=False)
class DrawnPositions:
    """Positions that stand in for the places 0, 1, … of a sequence (see `randomized.py`)."""

    values: Tensor
    """int64 [T], strictly increasing, in 0 … limit − 1."""
    limit: int


@dataclass(frozen=True)
class Span:
    """The places start, start + 1, …, start + length − 1 of a sequence.

    Query rows and key columns are given as spans, never as the indices of a tensor, so a full forward pass, a block
    of rows and a step of decoding are the same code. Python integers keep them exact and off the device.

    Who may see whom is decided by places; what a position encoding is told are positions: the places themselves, or
    the ones drawn for them.
    """

    start: int
    length: int
    drawn: DrawnPositions | None = None

    @property
    def stop(self) -> int:
        """The first place after the span."""
        return self.start + self.length

    @property
    def bound(self) -> int:
        """All positions of the span are smaller."""
        return self.stop if self.drawn is None else self.drawn.limit

    def places(self, device: torch.device | str | None = None) -> Tensor:
        """The places as int64 [length]."""
        return torch.arange(self.start, self.stop, device=device)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """The positions as int64 [length]."""
        if self.drawn is None:
            return self.places(device)
        return self.drawn.values[self.start : self.stop].to(device)


def distance_count(query: Span, key: Span) -> int:
    """The number of distances n = i − j ≥ 0 that a table must hold for these rows and columns."""
    return max(query.bound - (key.start if key.drawn is None else 0), 1)


def causal(query: Span, key: Span, device: torch.device | str | None = None, window: int | None = None) -> Tensor:
    """Bool [R, C]: may the query row see the key column? With a window, only the last `window` places, its own too."""
    back = query.places(device)[:, None] - key.places(device)[None, :]
    return back >= 0 if window is None else (back >= 0) & (back < window)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged where it is wider already (float64 in tests)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

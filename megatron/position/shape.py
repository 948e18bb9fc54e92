"""What an encoding or a processor is told about the model it is built for, and ranges of positions."""

from dataclasses import dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class Span:
    """The consecutive positions start, start + 1, …, start + length − 1.

    Query rows and key columns are given as spans, never as the indices of a tensor, so a full forward pass, a block
    of rows and a step of decoding are the same code. Python integers keep them exact and off the device.
    """

    start: int
    length: int

    @property
    def stop(self) -> int:
        """The first position after the span."""
        return self.start + self.length

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """The positions as int64 [length]."""
        return torch.arange(self.start, self.stop, device=device)


def causal(query: Span, key: Span, device: torch.device | str | None = None) -> Tensor:
    """Bool [R, C]: may the query row see the key column?"""
    return query.positions(device)[:, None] >= key.positions(device)[None, :]


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged where it is wider already (float64 in tests)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

"""How tensors of other families make one of ours, and the other way round, bit for bit.

d head dimension, H heads, G of them with keys and values of their own (G = H unless queries are grouped). Ours has
queries, keys and values of a group behind one another, [G, (H/G + 2), d, …] (megatron-core's linear_qkv), and the gate
before the values that it gates. Torch is imported once there are tensors: tables are read, and refused, before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(list(parts), dim)


class Transform(Protocol):
    """Some tensors of theirs and one of ours, which hold the same."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Theirs, in the order of the table, as ours."""

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """Ours as theirs, in the order of the table."""


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return theirs[0]

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [ours]


@dataclass(frozen=True)
class Transposed:
    """A matrix stored as [inputs, outputs] (GPT-2's Conv1D)."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return theirs[0].t().contiguous()

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [ours.t().contiguous()]


@dataclass(frozen=True)
class Joined:
    """So many tensors of one size that lie behind one another in ours."""

    count: int

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return _cat(theirs)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in ours.chunk(self.count)]


@dataclass(frozen=True)
class Interleaved:
    """Queries, keys and values, three tensors [H·d, …], [G·d, …], [G·d, …]."""

    heads: int
    groups: int

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        q, k, v = (part.reshape(self.groups, -1, *part.shape[1:]) for part in theirs)
        return _cat([q, k, v], 1).reshape(-1, *theirs[0].shape[1:])

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        each = self.heads // self.groups
        parts = ours.reshape(self.groups, each + 2, -1, *ours.shape[1:])
        return [
            part.reshape(-1, *ours.shape[1:]).contiguous()
            for part in (parts[:, :each], parts[:, each], parts[:, each + 1])
        ]


@dataclass(frozen=True)
class Stacked:
    """Queries, keys and values behind one another in one tensor, `dim` being where their heads are."""

    heads: int
    dim: int = 0

    @property
    def _apart(self) -> Interleaved:
        return Interleaved(self.heads, self.heads)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return self._apart.to_ours(theirs[0].transpose(0, self.dim).chunk(3))

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [_cat(self._apart.to_theirs(ours)).transpose(0, self.dim).contiguous()]


@dataclass(frozen=True)
class Skipping:
    """A table whose first rows no token ever reads (OPT's positions). They are dropped, and zero on the way back."""

    rows: int

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return theirs[0][self.rows :].contiguous()

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [_cat([ours.new_zeros(self.rows, *ours.shape[1:]), ours])]

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

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        """Theirs, in the order of the table, as ours."""

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        """Ours as theirs, in the order of the table."""


@dataclass(frozen=True)
class Identity:
    """One tensor, as it is."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0]

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class Transpose:
    """A matrix stored as [inputs, outputs] (GPT-2's Conv1D)."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0].t().contiguous()

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.t().contiguous()]


@dataclass(frozen=True)
class Concat:
    """So many tensors of one size that lie behind one another in ours."""

    num_chunks: int

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return _cat(hf_tensors)

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in tensor.chunk(self.num_chunks)]


@dataclass(frozen=True)
class SeparateQKV:
    """Queries, keys and values, three tensors [H·d, …], [G·d, …], [G·d, …]."""

    num_heads: int
    num_kv_heads: int

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = (part.reshape(self.num_kv_heads, -1, *part.shape[1:]) for part in hf_tensors)
        return _cat([q, k, v], 1).reshape(-1, *hf_tensors[0].shape[1:])

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        queries_per_group = self.num_heads // self.num_kv_heads
        parts = tensor.reshape(self.num_kv_heads, queries_per_group + 2, -1, *tensor.shape[1:])
        return [
            part.reshape(-1, *tensor.shape[1:]).contiguous()
            for part in (parts[:, :queries_per_group], parts[:, queries_per_group], parts[:, queries_per_group + 1])
        ]


@dataclass(frozen=True)
class ConcatQKV:
    """Queries, keys and values behind one another in one tensor, `head_dim_index` being where their heads are."""

    num_heads: int
    head_dim_index: int = 0

    @property
    def _separate_qkv(self) -> SeparateQKV:
        return SeparateQKV(self.num_heads, self.num_heads)

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return self._separate_qkv.to_megatron(hf_tensors[0].transpose(0, self.head_dim_index).chunk(3))

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [_cat(self._separate_qkv.to_hf(tensor)).transpose(0, self.head_dim_index).contiguous()]


@dataclass(frozen=True)
class SkipRows:
    """A table whose first rows no token ever reads (OPT's positions). They are dropped, and zero on the way back."""

    num_rows: int

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0][self.num_rows :].contiguous()

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [_cat([tensor.new_zeros(self.num_rows, *tensor.shape[1:]), tensor])]

"""Sharding of parameters: which ones are sharded over ranks, and which are replicated.

Every parameter is replicated on ranks that differ only in data or context (ZeRO-3 shards it further, inside the
engine). Along the tensor dimension, megatron-core marks what it shards: the embedding, the output layer, and linear
layers except for the bias added after their sum. All other parameters (norms, that bias, and those of encodings and
processors) are replicated. Along the pipeline dimension a layer belongs to one stage. Parameters used by several stages
(a tied embedding, an encoding shared by all layers) are held by each of them, and all but the first hold a copy. Code
that counts elements or sums squares over the ranks of a model must count each parameter once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.distributed.mesh import Axis, Mesh


@dataclass(frozen=True)
class ShardSpec:
    """Sharding of a parameter over tensor-parallel ranks."""

    dim: int
    """Sharded dimension."""
    num_strips: int
    """Number of matrices concatenated along it and sharded separately (two in a gated feed-forward layer)."""


def get_shard_spec(parameter: nn.Parameter) -> ShardSpec | None:
    """Return the sharding of a parameter over tensor-parallel ranks; None if it is replicated."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return ShardSpec(parameter.partition_dim, parameter.partition_stride)  # type: ignore[attr-defined]


def shard_tensor(tensor: Tensor, spec: ShardSpec, axis: Axis) -> Tensor:
    """Return the shard of a parameter on a tensor-parallel rank."""
    strips = tensor.chunk(spec.num_strips, spec.dim)
    return torch.cat([strip.chunk(axis.size, spec.dim)[axis.index] for strip in strips], spec.dim)


def unshard_tensors(shards: Sequence[Tensor], spec: ShardSpec) -> Tensor:
    """Return the whole parameter from the shards of all tensor-parallel ranks, in their order."""
    strips = [shard.chunk(spec.num_strips, spec.dim) for shard in shards]
    return torch.cat([strip[index] for index in range(spec.num_strips) for strip in strips], spec.dim)


def mark_replica(parameter: nn.Parameter) -> None:
    """Mark a parameter that an earlier pipeline stage also holds. DeepSpeed's norms read the same mark."""
    parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def is_replica(parameter: nn.Parameter) -> bool:
    """Return True if an earlier pipeline stage also holds this parameter."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def is_counted_on_this_rank(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Return True if this rank counts its shard of the parameter, among the ranks that hold the model together."""
    return not is_replica(parameter) and (get_shard_spec(parameter) is not None or mesh.tensor.index == 0)


def count_all_elements(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Return the number of elements of a parameter over tensor-parallel and ZeRO-3 ranks, copies counted once."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size * mesh.tensor.size if get_shard_spec(parameter) is not None else size

"""Of which parameters a rank holds a part, and which are the same on several ranks.

Every parameter is the same on ranks that differ in data or context alone (ZeRO-3 divides it further, behind the
engine). Along the tensor dimension, megatron-core marks what it divides: embedding, output layer, and the linear layers
but for the bias that is added after their sum. The rest (norms, that bias, everything of encodings and processors) is
held by every rank. Along the pipeline dimension a layer belongs to one stage; what several stages use (a tied
embedding, an encoding that all layers share) each of them holds, and all but the first to do so hold a copy.
Whatever counts elements or sums squares over the ranks that hold a model must count each parameter once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.distributed.mesh import Axis, Mesh


@dataclass(frozen=True)
class ShardSpec:
    """How tensor-parallel ranks divide a parameter."""

    dim: int
    """The dimension that is cut."""
    num_strips: int
    """Matrices that lie behind one another along it and are cut one by one (two in a gated feed-forward layer)."""


def get_shard_spec(parameter: nn.Parameter) -> ShardSpec | None:
    """How tensor-parallel ranks divide a parameter; None if each holds it whole."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return ShardSpec(parameter.partition_dim, parameter.partition_stride)  # type: ignore[attr-defined]


def shard_tensor(tensor: Tensor, spec: ShardSpec, axis: Axis) -> Tensor:
    """What a tensor-parallel rank holds of a parameter."""
    strips = tensor.chunk(spec.num_strips, spec.dim)
    return torch.cat([strip.chunk(axis.size, spec.dim)[axis.index] for strip in strips], spec.dim)


def unshard_tensors(shards: Sequence[Tensor], spec: ShardSpec) -> Tensor:
    """A whole parameter of what all tensor-parallel ranks hold, in their order."""
    strips = [shard.chunk(spec.num_strips, spec.dim) for shard in shards]
    return torch.cat([strip[index] for index in range(spec.num_strips) for strip in strips], spec.dim)


def mark_replica(parameter: nn.Parameter) -> None:
    """Say that an earlier pipeline stage holds this parameter too. DeepSpeed's norms read the same mark."""
    parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def is_replica(parameter: nn.Parameter) -> bool:
    """Does an earlier pipeline stage hold this parameter too?"""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def is_counted_here(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Is this rank the one, among those that hold the model together, that counts what it holds of the parameter?"""
    return not is_replica(parameter) and (get_shard_spec(parameter) is not None or mesh.tensor.index == 0)


def full_numel(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Elements of a parameter over tensor-parallel ranks and those of ZeRO-3, copies counted once."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size * mesh.tensor.size if get_shard_spec(parameter) is not None else size

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
class Division:
    """How tensor-parallel ranks divide a parameter."""

    dim: int
    """The dimension that is cut."""
    strips: int
    """Matrices that lie behind one another along it and are cut one by one (two in a gated feed-forward layer)."""


def division(parameter: nn.Parameter) -> Division | None:
    """How tensor-parallel ranks divide a parameter; None if each holds it whole."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return Division(parameter.partition_dim, parameter.partition_stride)  # type: ignore[attr-defined]


def cut(whole: Tensor, division: Division, tensor: Axis) -> Tensor:
    """What a tensor-parallel rank holds of a parameter."""
    strips = whole.chunk(division.strips, division.dim)
    return torch.cat([strip.chunk(tensor.size, division.dim)[tensor.index] for strip in strips], division.dim)


def join(parts: Sequence[Tensor], division: Division) -> Tensor:
    """A whole parameter of what all tensor-parallel ranks hold, in their order."""
    strips = [part.chunk(division.strips, division.dim) for part in parts]
    return torch.cat([strip[number] for number in range(division.strips) for strip in strips], division.dim)


def mark_copy(parameter: nn.Parameter) -> None:
    """Say that an earlier pipeline stage holds this parameter too. DeepSpeed's norms read the same mark."""
    parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def is_copy(parameter: nn.Parameter) -> bool:
    """Does an earlier pipeline stage hold this parameter too?"""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def counts(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Is this rank the one, among those that hold the model together, that counts what it holds of the parameter?"""
    return not is_copy(parameter) and (division(parameter) is not None or mesh.tensor.index == 0)


def whole_size(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Elements of a parameter over tensor-parallel ranks and those of ZeRO-3, copies counted once."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size * mesh.tensor.size if division(parameter) is not None else size

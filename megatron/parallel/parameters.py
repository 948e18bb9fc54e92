"""Of which parameters a rank holds a part, and which are the same on several ranks.

Every parameter is the same on ranks that differ in data or context alone (ZeRO-3 divides it further, behind the
engine). Along the tensor dimension, megatron-core marks what it divides: embedding, output layer, and the linear layers
but for the bias that is added after their sum. The rest (norms, that bias, everything of encodings and processors) is
held by every rank: whatever counts elements or sums squares over tensor-parallel ranks must count it once.
"""

from torch import nn

from megatron.parallel.mesh import Mesh


def divided(parameter: nn.Parameter) -> bool:
    """Does each tensor-parallel rank hold a part of its own? Otherwise all hold the same."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def whole_size(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Elements of a parameter over all ranks, copies counted once: those that share a layer, and those of ZeRO-3."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size * mesh.tensor.size if divided(parameter) else size

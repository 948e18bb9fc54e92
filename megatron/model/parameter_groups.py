"""What a model's parameters are to others: groups to the optimizer, weights to a checkpoint."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron.model.layer import BiasedSelfAttention, FeedForward
from megatron.position.bounded_parameter import BoundedParameter
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor

Algorithm = Literal["AdamW", "Muon", "Lion"]
"""By which an optimizer steps a parameter."""


@dataclass(frozen=True)
class HiddenMatrix:
    """A weight of a layer that is one matrix, or several behind one another: what Muon orthogonalises one by one.

    Queries, keys and values are three matrices, each of all heads; their rows lie in one weight, group by group of the
    heads that share a key. The first weight of a gated feed-forward layer is two, one behind the other.
    """

    parameter: nn.Parameter
    """[rows, columns] of what a tensor-parallel rank holds."""
    blocks: int
    """How often the matrices' rows follow on one another in the whole weight, over all tensor-parallel ranks."""
    sizes: tuple[int, ...]
    """Rows of each matrix in a block."""

    def split(self, whole: Tensor) -> list[Tensor]:
        """The matrices of the whole weight."""
        if len(self.sizes) == 1:
            return [whole]
        blocks = whole.unflatten(0, (self.blocks, sum(self.sizes)))
        return [part.flatten(0, 1) for part in blocks.split(self.sizes, 1)]

    def join(self, matrices: list[Tensor]) -> Tensor:
        """The whole weight: what `split` undoes."""
        if len(self.sizes) == 1:
            return matrices[0]
        blocks = [matrix.unflatten(0, (self.blocks, -1)) for matrix in matrices]
        return torch.cat(blocks, 1).flatten(0, 1)


def list_hidden_matrices(model: nn.Module) -> list[HiddenMatrix]:
    """The weights of attention and feed-forward layers, in the order of the model's parameters."""
    found: list[HiddenMatrix] = []
    for module in model.modules():
        if isinstance(module, BiasedSelfAttention):
            groups = module.config.num_query_groups
            assert groups is not None  # megatron-core fills it in
            found.append(HiddenMatrix(module.linear_qkv.weight, groups, tuple(module.group_sizes)))
            output = module.linear_proj.weight
            found.append(HiddenMatrix(output, 1, (output.shape[0],)))
        elif isinstance(module, FeedForward):
            width, inner = module.linear_fc2.weight.shape[0], module.config.ffn_hidden_size
            matrices = 2 if module.config.gated_linear_unit else 1
            found.append(HiddenMatrix(module.linear_fc1.weight, 1, (inner,) * matrices))
            found.append(HiddenMatrix(module.linear_fc2.weight, 1, (width,)))
    order = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    return sorted(found, key=lambda matrix: order[id(matrix.parameter)])


def get_algorithm(parameter: nn.Parameter) -> Algorithm:
    """By which algorithm a parameter is stepped: what `parameter_groups` marked it with."""
    algorithm: Algorithm = getattr(parameter, "optimizer_algorithm", "AdamW")
    return algorithm


def parameter_groups(model: nn.Module, weight_decay: float, algorithm: Algorithm = "AdamW") -> list[dict[str, Any]]:
    """Parameter groups for the optimizer; empty groups are left out.

    Decayed: matrices (convolutions of a score processor included). Not decayed: vectors (biases, norms) and
    everything a position encoding owns. Each pair of bounds gets a group of its own, with keys `low` and `high`:
    ZeRO flattens each group by itself, so the optimizer can project its float32 masters group by group. With Muon the
    layers' weights are a group of their own, whose `matrices` say what to orthogonalise; AdamW steps all others.

    Each group has its `algorithm`, with which its parameters are marked (`get_algorithm`).
    """
    matrices = list_hidden_matrices(model) if algorithm == "Muon" else []
    hidden = {id(matrix.parameter) for matrix in matrices}
    bounds = {
        id(module.value): (module.low, module.high)
        for module in model.modules()
        if isinstance(module, BoundedParameter)
    }
    positional = {id(p) for module in model.modules() if isinstance(module, Encoding) for p in module.parameters()}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    bounded: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        low, high = bounds.get(id(parameter), (float("-inf"), float("inf")))
        if id(parameter) in hidden:
            continue
        if (low, high) != (float("-inf"), float("inf")):
            bounded.setdefault((low, high), []).append(parameter)
        elif id(parameter) in positional or parameter.dim() < 2:
            plain.append(parameter)
        else:
            decayed.append(parameter)
    rest: Algorithm = "AdamW" if algorithm == "Muon" else algorithm
    groups: list[dict[str, Any]] = [
        {
            "name": "hidden matrices", "params": [matrix.parameter for matrix in matrices], "algorithm": "Muon",
            "weight_decay": weight_decay, "matrices": matrices,
        },
        {"name": "decayed", "params": decayed, "algorithm": rest, "weight_decay": weight_decay},
        {"name": "not decayed", "params": plain, "algorithm": rest, "weight_decay": 0.0},
    ]  # fmt: skip
    for (low, high), parameters in sorted(bounded.items()):
        bounded_group = {"name": f"in [{low:g}, {high:g}]", "params": parameters, "algorithm": rest}
        groups.append({**bounded_group, "weight_decay": 0.0, "low": low, "high": high})
    groups = [group for group in groups if group["params"]]
    for group in groups:
        for parameter in group["params"]:
            parameter.optimizer_algorithm = group["algorithm"]
    return groups


def clamp_bounded_parameters(model: nn.Module) -> None:
    """Move every bounded parameter to the nearest value inside its bounds."""
    for module in model.modules():
        if isinstance(module, BoundedParameter):
            module.clamp_to_bounds()


def list_dispensable_weights(model: nn.Module) -> set[str]:
    """Weights without which the model computes the same: those of processors that have no effect yet."""
    return {
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if isinstance(module, Processor) and not module.has_effect()
        for weight, _ in module.named_parameters()
    }


def list_encoding_weights(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of a model's encodings, by name."""
    return {
        f"{name}.{weight}": tuple(parameter.shape)
        for name, module in model.named_modules()
        if isinstance(module, Encoding)
        for weight, parameter in module.named_parameters()
    }


def map_to_shared_names(model: nn.Module) -> dict[str, str]:
    """For each parameter of a layer's own encoding the name it has where all layers share one."""
    return {
        f"{name}.{weight}": f"position.{weight}"
        for name, module in model.named_modules()
        if isinstance(module, Encoding) and name != "position"
        for weight, _ in module.named_parameters()
    }

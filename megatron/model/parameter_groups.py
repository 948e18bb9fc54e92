"""Views of a model's parameters: parameter groups for the optimizer, weights for a checkpoint."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron.model.layer import BiasedSelfAttention, FeedForward
from megatron.model.mup import MupScaling, ParameterRole, StepScales
from megatron.position.base import PositionModule
from megatron.position.bounded_parameter import BoundedParameter
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.temperature import Temperature

Algorithm = Literal["AdamW", "Muon", "Lion"]
"""Optimizer algorithms to which a parameter can be assigned."""


@dataclass(frozen=True)
class HiddenMatrix:
    """Layer weight that consists of one matrix or several, which Muon orthogonalizes separately.

    Queries, keys and values are three matrices, each with all heads. Their rows are interleaved in one weight, by
    groups of heads that share a key. The first weight of a gated feed-forward layer consists of two consecutive
    matrices.
    """

    parameter: nn.Parameter
    """Local shard [rows, columns] of a tensor-parallel rank."""
    blocks: int
    """Number of times that the matrices' rows alternate in the unsharded weight, over all tensor-parallel ranks."""
    sizes: tuple[int, ...]
    """Rows of each matrix in a block."""

    def split(self, whole: Tensor) -> list[Tensor]:
        """Split the unsharded weight into its matrices."""
        if len(self.sizes) == 1:
            return [whole]
        blocks = whole.unflatten(0, (self.blocks, sum(self.sizes)))
        return [part.flatten(0, 1) for part in blocks.split(self.sizes, 1)]

    def join(self, matrices: list[Tensor]) -> Tensor:
        """Join matrices into the unsharded weight, the inverse of `split`."""
        if len(self.sizes) == 1:
            return matrices[0]
        blocks = [matrix.unflatten(0, (self.blocks, -1)) for matrix in matrices]
        return torch.cat(blocks, 1).flatten(0, 1)


def list_hidden_matrices(model: nn.Module) -> list[HiddenMatrix]:
    """Return the weights of attention and feed-forward layers, in the order of the model's parameters."""
    found: list[HiddenMatrix] = []
    for module in model.modules():
        if isinstance(module, BiasedSelfAttention):
            groups = module.config.num_query_groups
            assert groups is not None  # megatron-core fills it in
            found.append(HiddenMatrix(module.linear_qkv.weight, groups, tuple(module.group_sizes)))
            if module.linear_gate is not None:
                gate = module.linear_gate
                found.append(HiddenMatrix(gate.weight, 1, (gate.output_size,)))
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
    """Return the algorithm that updates a parameter, as set by `parameter_groups`."""
    algorithm: Algorithm = getattr(parameter, "optimizer_algorithm", "AdamW")
    return algorithm


def list_roles(model: nn.Module) -> list[tuple[nn.Parameter, ParameterRole]]:
    """Return each parameter with its row in muP's table (`megatron/model/mup.py`).

    The order is that of the model's parameters.
    """
    roles: dict[int, ParameterRole] = {id(matrix.parameter): "hidden" for matrix in list_hidden_matrices(model)}
    for name, module in model.named_modules():
        if isinstance(module, Encoding) and type(module).only_adds_embeddings():
            roles.update((id(parameter), "embedding") for parameter in module.parameters())
        if isinstance(module, PositionModule):
            roles.update((id(parameter), over) for parameter, over in module.list_growing_fan_ins())
        if name in _ROLES_OF_MODULES:
            roles.update((id(parameter), _ROLES_OF_MODULES[name]) for parameter in module.parameters())
    return [(parameter, roles.get(id(parameter), "layer")) for parameter in model.parameters()]


_ROLES_OF_MODULES: dict[str, ParameterRole] = {
    "embedding": "embedding",
    "output_layer": "embedding",
    "decoder.final_layernorm": "last norm",
}


def build_parameter_groups(
    model: nn.Module, weight_decay: float, algorithm: Algorithm = "AdamW", *, decay_positions: bool = False
) -> list[dict[str, Any]]:
    """Build the parameter groups for the optimizer.

    Decayed: matrices (including convolutions of a score processor). Not decayed: vectors (biases, norms) and the
    parameters of position encodings and temperatures, unless a method opts in (`list_decayed`). With `decay_positions`
    all of these are decayed except biases of linear layers, as in GPT-NeoX.

    Each pair of bounds gets its own group, with keys `low` and `high`: ZeRO flattens each group separately, so the
    optimizer can project its float32 masters by group. With Muon the layers' weights form a group, whose `matrices`
    list the matrices to orthogonalize; AdamW updates all others. With muP each of these groups is divided further by
    `lr_scale` and `eps_scale`, and its decay is scaled.

    Each group has its `algorithm`, which is also set on its parameters (`get_algorithm`).
    """
    matrices = {id(matrix.parameter): matrix for matrix in list_hidden_matrices(model)} if algorithm == "Muon" else {}
    bounds = {
        id(module.value): (module.low, module.high)
        for module in model.modules()
        if isinstance(module, BoundedParameter)
    }
    undecayed, decayed = set(), set()
    for module in model.modules():
        if isinstance(module, Encoding | Temperature):
            own = {id(p) for p in module.parameters()}
            undecayed |= own - {id(p) for p in module.list_decayed()}
            if decay_positions:
                decayed |= own - {id(p) for p in module.list_biases()}
    mup: MupScaling | None = getattr(model, "mup", None)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for parameter, role in list_roles(model):
        low, high = bounds.get(id(parameter), (float("-inf"), float("inf")))
        is_bounded = (low, high) != (float("-inf"), float("inf"))
        is_matrix = not is_bounded and id(parameter) not in undecayed and parameter.dim() >= 2
        is_decayed = is_matrix or id(parameter) in decayed
        by_muon = id(parameter) in matrices
        scales = StepScales() if mup is None else mup.get_step_scales(role, by_muon=by_muon)
        # This order determines the positions in ZeRO: Muon's matrices, decayed, not decayed, then by bounds.
        place = (0,) if by_muon else (3, low, high) if is_bounded else (1,) if is_decayed else (2,)
        key = (place, scales.lr, scales.eps, scales.weight_decay if is_decayed else 0.0)
        group = groups.get(key)
        if group is None:
            name = "hidden matrices" if by_muon else "decayed" if is_decayed else "not decayed"
            group = groups[key] = {
                "name": f"bounded to [{low:g}, {high:g}]" if is_bounded else name,
                "params": [],
                "algorithm": "Muon" if by_muon else "AdamW" if algorithm == "Muon" else algorithm,
                "weight_decay": weight_decay * scales.weight_decay if is_decayed else 0.0,
                "lr_scale": scales.lr,
                "eps_scale": scales.eps,
                **({"low": low, "high": high} if is_bounded else {}),
                **({"matrices": []} if by_muon else {}),
            }
        group["params"].append(parameter)
        if by_muon:
            group["matrices"].append(matrices[id(parameter)])
        parameter.optimizer_algorithm = group["algorithm"]  # type: ignore[attr-defined]
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def find_model_parts(model: nn.Module) -> dict[str, str]:
    """Map each parameter's name to the module it belongs to, with a readable name."""
    parts: dict[str, str] = {}
    for name, module in model.named_modules():  # inner modules come after the modules that contain them
        if isinstance(module, Encoding):
            part = "position encoding"
        elif isinstance(module, Processor):
            part = "score processor"
        elif isinstance(module, Temperature):
            part = "attention temperature"
        elif isinstance(module, BiasedSelfAttention):
            part = "attention"
        elif isinstance(module, FeedForward):
            part = "feed-forward"
        elif name in ("embedding", "output_layer"):
            part = "embedding" if name == "embedding" else "output layer"
        elif not name:
            part = "norms"  # all parameters without another part are norms of layers or the final norm
        else:
            continue
        parts.update((f"{name}.{weight}" if name else weight, part) for weight, _ in module.named_parameters())
    return parts


def clamp_bounded_parameters(model: nn.Module) -> None:
    """Move every bounded parameter to the nearest value within its bounds."""
    for module in model.modules():
        if isinstance(module, BoundedParameter):
            module.clamp_to_bounds()


def list_ineffective_weights(model: nn.Module) -> set[str]:
    """Return the weights that do not affect the model's output: those of processors that have no effect yet."""
    return {
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if isinstance(module, Processor) and not module.has_effect()
        for weight, _ in module.named_parameters()
    }


def list_encoding_weights(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a model's encodings, by name."""
    return {
        f"{name}.{weight}": tuple(parameter.shape)
        for name, module in model.named_modules()
        if isinstance(module, Encoding)
        for weight, parameter in module.named_parameters()
    }


def list_temperature_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights of a model's temperatures."""
    return {
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if isinstance(module, Temperature)
        for weight, _ in module.named_parameters()
    }


def map_to_shared_names(model: nn.Module) -> dict[str, str]:
    """Map each parameter name of a layer's own encoding to its name when layers share the encoding."""
    own = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Encoding) and not name.startswith("position")
    }
    is_pattern = len(getattr(model, "encoding_names", ())) > 1
    return {
        f"{name}.{weight}": f"positions.{get_method_name(module)}.{weight}" if is_pattern else f"position.{weight}"
        for name, module in own.items()
        for weight, _ in module.named_parameters()
    }


def get_method_name(module: PositionModule) -> str:
    """Return the name of an encoding or a processor, which is the name of its file."""
    return type(module).__module__.rpartition(".")[2]

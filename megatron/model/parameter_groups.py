"""What a model's parameters are to others: groups to the optimizer, weights to a checkpoint."""

from typing import Any

from torch import nn

from megatron.position.bounded_parameter import BoundedParameter
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for the optimizer; empty groups are left out.

    Decayed: matrices (convolutions of a score processor included). Not decayed: vectors (biases, norms) and
    everything a position encoding owns. Each pair of bounds gets a group of its own, with keys `low` and `high`:
    ZeRO flattens each group by itself, so the optimizer can project its float32 masters group by group.
    """
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
        if (low, high) != (float("-inf"), float("inf")):
            bounded.setdefault((low, high), []).append(parameter)
        elif id(parameter) in positional or parameter.dim() < 2:
            plain.append(parameter)
        else:
            decayed.append(parameter)
    groups: list[dict[str, Any]] = [
        {"name": "decayed", "params": decayed, "weight_decay": weight_decay},
        {"name": "not decayed", "params": plain, "weight_decay": 0.0},
    ]
    for (low, high), parameters in sorted(bounded.items()):
        groups.append(
            {"name": f"in [{low:g}, {high:g}]", "params": parameters, "weight_decay": 0.0, "low": low, "high": high}
        )
    return [group for group in groups if group["params"]]


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

"""The model's weights as one safetensors file, read into a model of any layout.

Stored are the float32 masters, not the compute-type copies: in bfloat16 training a copy holds 8 bits of what was
learned, and a bound such as r1 ≥ 0.01 or an exact resume holds for the masters only. Evaluation in float32 then scores
exactly what the optimizer holds; evaluation in bfloat16 rounds to the copies training used.

A tied weight is one parameter with two uses; it is stored once, under its first name.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.checkpoint.stored_config import map_to_stored_names
from megatron.distributed.mesh import Axis
from megatron.distributed.sharding import get_shard_spec, shard_tensor
from megatron.model.parameter_groups import clamp_bounded_parameters
from megatron.utils.errors import RunError


def list_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to the state: not those that a module computes for itself."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names of today and shapes of the weights in a checkpoint's file. Raises RunError: it is missing or damaged."""
    try:
        with safe_open(path, "pt") as file:
            names = map_to_stored_names(path.parent, file.keys())
            return {name: tuple(file.get_slice(stored).get_shape()) for name, stored in names.items()}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read as safetensors ({error})") from None


def read_weights(
    model: nn.Module,
    path: Path,
    *,
    tensor: Axis = Axis(),
    off_stage_prefixes: tuple[str, ...] = (),
    initialized: Collection[str] = (),
    unused: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Copy the weights of a file into a model, or into the part of one that a process holds, converting to its types
    and device.

    Args:
        model: takes the weights.
        path: the safetensors file of a checkpoint, in its folder.
        tensor: the processes that share each layer.
        off_stage_prefixes: how the names of weights begin that only other pipeline stages hold.
        initialized: weights that are not read; they stay as they are.
        unused: weights of the file that are passed over.
        aliases: for a weight that the file lacks, the name of the one to take instead.

    Raises:
        RunError: the file is missing or damaged, or its tensors are not this model's; names the first difference.
    """
    try:
        tensors = load_file(path)
        stored = {name: tensors[old] for name, old in map_to_stored_names(path.parent, tensors).items()}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read as safetensors ({error})") from None
    every = dict(model.named_parameters()) | dict(list_persistent_buffers(model))
    targets = {name: target for name, target in every.items() if name not in initialized}
    sources = {name: name if name in stored else (aliases or {}).get(name, name) for name in targets}
    missing = sorted(name for name, source in sources.items() if source not in stored)
    unknown = sorted(
        name for name in set(stored) - set(sources.values()) - set(unused) if not name.startswith(off_stage_prefixes)
    )
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the model lacks"
        raise RunError(f"{path}: does not fit the model: it {what} ({len(missing)} missing, {len(unknown)} unknown)")
    with torch.no_grad():
        for name, source in sources.items():
            weight, target = stored[source], targets[name]
            if isinstance(target, nn.Parameter) and (how := get_shard_spec(target)) is not None:
                weight = shard_tensor(weight, how, tensor)
            if weight.shape != target.shape:
                raise RunError(f"{path}: {source} is {list(weight.shape)}, the model's {list(target.shape)}")
            target.copy_(weight)
    clamp_bounded_parameters(model)

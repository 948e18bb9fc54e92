"""The model's weights as one safetensors file, whatever DeepSpeed and the mesh made of them.

Written are the float32 masters, not the compute-type copies: in bfloat16 training a copy holds 8 bits of what was
learned, and a bound such as r1 ≥ 0.01 or an exact resume of the weights alone holds for the masters only. Evaluation in
float32 then scores exactly what the optimizer holds; evaluation in bfloat16 rounds to the copies training used.
Where the masters are kept depends on the optimizer: in float32 they are the parameters (gathered, under ZeRO-3);
under ZeRO in half precision they are partitioned; in half precision without ZeRO they are the optimizer's list.

A tied weight is one parameter with two uses; it is stored once, under its first name.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron.errors import RunError
from megatron.model.parameters import project
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import cut, division


def held_weights(engine: Any, *, keep: bool) -> dict[str, Tensor] | None:
    """The weights and persistent buffers that this process's model has, by name, in host memory; weights float32.

    Args:
        engine: DeepSpeed's. Under ZeRO all ranks must call this.
        keep: whether this rank wants them; the others take part and get None.
    """
    model = engine.module
    weights: dict[str, Tensor] = {}
    for name, weight in _masters(engine):
        if keep:
            weights[name] = weight.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
    if not keep:
        return None
    for name, buffer in _buffers(model):
        weights[name] = buffer.detach().to(device="cpu", copy=True).contiguous()
    return weights


def _masters(engine: Any) -> Iterator[tuple[str, Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param

    low_precision = getattr(engine.optimizer, "fp16_groups", None)
    listed = getattr(engine.optimizer, "fp32_groups", None)  # half precision without ZeRO
    by_copy = {}
    if not engine.zero_optimization() and low_precision is not None and listed is not None:
        for copies, masters in zip(low_precision, listed, strict=True):
            by_copy.update({id(copy): master for copy, master in zip(copies, masters, strict=True)})
    for name, parameter in engine.module.named_parameters():
        if engine.zero_optimization():
            yield name, safe_get_full_fp32_param(parameter)
        else:
            yield name, by_copy.get(id(parameter), parameter)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to the state: not those that a module computes for itself."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def write_weights(weights: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises OSError if the disk refuses."""
    try:
        save_file(weights, path, metadata={"format": "pt", **metadata})
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)  # safetensors leaves 0600, which would hide the weights from the user's group
    except SafetensorError as error:  # wraps the operating system's error
        raise OSError(f"{path.name}: {error}") from error


def read_weights(
    model: nn.Module,
    path: Path,
    *,
    tensor: Axis = Axis(),
    elsewhere: tuple[str, ...] = (),
    dispensable: Collection[str] = (),
    stand_ins: Mapping[str, str] | None = None,
) -> None:
    """Copy the weights of a file into a model, or into the part of one that a process holds, converting to its types
    and device.

    Args:
        model: takes the weights.
        path: a safetensors file.
        tensor: the processes that share each layer.
        elsewhere: how the names of weights begin that only other pipeline stages hold.
        dispensable: weights that the file may lack; they stay as they are.
        stand_ins: for a weight that the file lacks, the name of the one to take instead.

    Raises:
        RunError: the file is missing or damaged, or its tensors are not this model's; names the first difference.
    """
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read as safetensors ({error})") from None
    targets = dict(model.named_parameters()) | dict(_buffers(model))
    sources = {name: name if name in stored else (stand_ins or {}).get(name, name) for name in targets}
    sources = {name: source for name, source in sources.items() if source in stored or name not in dispensable}
    missing = sorted(name for name, source in sources.items() if source not in stored)
    unknown = sorted(name for name in set(stored) - set(sources.values()) if not name.startswith(elsewhere))
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the model lacks"
        raise RunError(f"{path}: does not fit the model: it {what} ({len(missing)} missing, {len(unknown)} unknown)")
    with torch.no_grad():
        for name, source in sources.items():
            weight, target = stored[source], targets[name]
            if isinstance(target, nn.Parameter) and (how := division(target)) is not None:
                weight = cut(weight, how, tensor)
            if weight.shape != target.shape:
                raise RunError(f"{path}: {source} is {list(weight.shape)}, the model's {list(target.shape)}")
            target.copy_(weight)
    project(model)

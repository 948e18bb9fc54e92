"""Model weights in one safetensors file, loaded into a model of any layout, optionally changed by finetuning.

The file stores the float32 masters, not the copies in the compute type. A bfloat16 copy has only 8 bits of precision,
and a bound such as r1 ≥ 0.01 or an exact resume applies to the masters only. Evaluation in float32 therefore scores
exactly the optimizer's weights; evaluation in bfloat16 rounds to the copies used in training.

A tied weight is one parameter with two uses; it is stored once, under its first name.

Finetuning may use another position encoding, another temperature, or a score processor that the checkpoint lacks. The
rest of the model is unchanged. New weights that are not in the file are initialized, and old ones that are no longer
needed are dropped; both are reported. An added score processor has no initial effect.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.checkpoint.layout import WEIGHTS
from megatron.checkpoint.manifest import map_to_stored_names
from megatron.config.schema import Config
from megatron.config.yaml_files import format_value
from megatron.distributed.mesh import Axis
from megatron.distributed.sharding import get_shard_spec, shard_tensor
from megatron.model.build import has_initial_effect
from megatron.model.parameter_groups import (
    clamp_bounded_parameters,
    list_encoding_weights,
    list_ineffective_weights,
    list_temperature_weights,
    map_to_shared_names,
)
from megatron.model.position_modules import canonicalize_position_options
from megatron.utils.errors import RunError, UserError


def list_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are part of the state, without those that a module computes itself."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return current names and shapes of the weights in a checkpoint. Raises RunError if it is missing or damaged."""
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
    """Copy the weights of a file into a model or a process's share of it, converting data type and device.

    Args:
        model: model to load the weights into.
        path: safetensors file of a checkpoint, in its folder.
        tensor: tensor-parallel axis.
        off_stage_prefixes: name prefixes of weights that only other pipeline stages have.
        initialized: weights that are not read and keep their values.
        unused: weights of the file to ignore.
        aliases: for a weight missing from the file, the name of the one to use instead.

    Raises:
        RunError: the file is missing or damaged, or its tensors do not match the model; names the first difference.
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
        difference = f"lacks {missing[0]}" if missing else f"contains {unknown[0]}, which the model lacks"
        raise RunError(
            f"{path}: does not match the model: it {difference} ({len(missing)} missing, {len(unknown)} unknown)"
        )
    with torch.no_grad():
        for name, source in sources.items():
            weight, target = stored[source], targets[name]
            if isinstance(target, nn.Parameter) and (spec := get_shard_spec(target)) is not None:
                weight = shard_tensor(weight, spec, tensor)
            if weight.shape != target.shape:
                raise RunError(f"{path}: {source} has shape {list(weight.shape)}; it must be {list(target.shape)}")
            target.copy_(weight)
    clamp_bounded_parameters(model)


ENCODING_KEYS = ("pos_emb", "pos_emb_options", "pos_emb_per_layer")
"""Keys that define a model's encoding."""

OLD_ENCODING_NAMES = re.compile(r"positions?\..*|.*\.core_attention\.position\..*")
"""Names of an encoding's weights in a file, shared by all layers or per layer."""
OLD_TEMPERATURE_NAMES = re.compile(r".*\.core_attention\.temperature\..*")
TEMPERATURE_KEYS = ("attention_temperature", "attention_temperature_options")
_IN_LAYER = re.compile(r"decoder\.layers\.\d+\.self_attention\.core_attention\.")


def list_other_encoding_keys(config: Config, stored: Config) -> set[str]:
    """Return the keys of another encoding that the configuration sets explicitly; defaults do not count."""
    named = config.position.model_fields_set
    if config.position.pos_emb == stored.position.pos_emb:
        return named & {"pos_emb_options"}
    # Another encoding has its own options and parameter sets, so the old ones do not apply.
    return {"pos_emb", "pos_emb_options", "pos_emb_per_layer"} if "pos_emb" in named else set()


def list_other_temperature_keys(config: Config) -> set[str]:
    """Return the keys of a temperature that the configuration sets explicitly."""
    named = config.position.model_fields_set
    return set(TEMPERATURE_KEYS) if "attention_temperature" in named else named & {"attention_temperature_options"}


@dataclass(frozen=True)
class WeightChanges:
    """Weights of the model that are not loaded from the file, and weights of the file that are not used."""

    initialized: frozenset[str]
    unused: frozenset[str]

    def describe(self, config: Config, stored: Config) -> str:
        """Return the changes as one line, with options as their configurations set them."""
        new, old = _list_position_options(config), _list_position_options(stored)
        keys = (*ENCODING_KEYS, "score_processor", "score_processor_options", *TEMPERATURE_KEYS)
        changed = [
            f"{key} {_format_value(getattr(stored.position, key))} → {_format_value(getattr(config.position, key))}"
            for key in keys
            if old[key] != new[key]
        ]
        parts = [("fresh", self.initialized), ("dropped", self.unused)]
        return "; ".join(
            [", ".join(changed), *(f"{word}: {', '.join(_to_patterns(names)) or 'nothing'}" for word, names in parts)]
        )


def _format_value(value: Any) -> str:
    if not isinstance(value, Mapping):
        return format_value(value)
    return (
        "{" + ", ".join(f"{key}: {format_value(option)}" for key, option in value.items() if option is not None) + "}"
    )


def _to_patterns(names: Iterable[str]) -> list[str]:
    """Return the distinct short names, with a star for the layer's number."""
    return sorted({_IN_LAYER.sub("layers.*.", name) for name in names})


def find_weight_changes(
    model: nn.Module,
    config: Config,
    stored: Config,
    shapes: Mapping[str, tuple[int, ...]],
    off_stage_prefixes: tuple[str, ...],
) -> WeightChanges:
    """Return the differences between a model and a file of weights.

    Args:
        model: model to load the weights into.
        config, stored: configurations of the model and of the file.
        shapes: shapes of the file's weights.
        off_stage_prefixes: name prefixes of weights that only other pipeline stages have.
    """
    needed, shared = list_encoding_weights(model), map_to_shared_names(model)
    sources = {name: name if name in shapes else shared.get(name, name) for name in needed}
    stored_names = {
        name for name in shapes if OLD_ENCODING_NAMES.fullmatch(name) and not name.startswith(off_stage_prefixes)
    }
    if config.position.pos_emb != stored.position.pos_emb:
        # Names (r1, r2) and shapes of two encodings may coincide although their meanings differ.
        initialized, unused = set(needed), stored_names
    else:
        initialized = {
            name for name, source in sources.items() if source in stored_names and shapes[source] != needed[name]
        }
        unused = {sources[name] for name in initialized} - {sources[name] for name in needed if name not in initialized}
    if config.position.score_processor != stored.position.score_processor:
        initialized |= list_ineffective_weights(model)
    # Names and shapes of a temperature's weights do not identify it: either all are reused or none.
    own = list_temperature_weights(model)
    old = {name for name in shapes if OLD_TEMPERATURE_NAMES.fullmatch(name) and not name.startswith(off_stage_prefixes)}
    if config.position.attention_temperature != stored.position.attention_temperature or own != old:
        initialized, unused = initialized | own, unused | old
    return WeightChanges(frozenset(initialized), frozenset(unused))


def check_added_processors(config: Config, checkpoint: Path, stored: Config) -> None:
    """Check that score processors added by finetuning have no initial effect.

    Args:
        config: configuration of the new run.
        checkpoint: checkpoint that provides the weights.
        stored: configuration of that checkpoint.

    Raises:
        UserError: an added processor has an effect.
    """
    added = [name for name in config.position.processors if name != "none"]
    if added and stored.position.processors == ["none"] and has_initial_effect(config.model, config.position):
        raise UserError(
            f"score_processor: {checkpoint} was trained without one; to add {', '.join(added)}, set "
            "score_processor_options zero_init: true (and residual_bias: true), so that it has no initial effect"
        )


def load_finetuned_weights(model: Any, config: Config, checkpoint: Path, stored: Config) -> tuple[str, ...]:
    """Load the weights of a checkpoint into a model before an engine is built; finetuning may have changed the model.

    Apart from a newly chosen encoding, the model then computes the same results.

    Args:
        model: a `GPT`, or one of its pipeline stages.
        config: configuration of the new run.
        checkpoint: checkpoint to load the weights from.
        stored: its configuration.

    Returns:
        Notes for the user.
    """
    path = checkpoint / WEIGHTS
    changes = find_weight_changes(model, config, stored, read_shapes(path), model.off_stage_prefixes)
    read_weights(
        model,
        path,
        tensor=model.groups.mesh.tensor,
        off_stage_prefixes=model.off_stage_prefixes,
        initialized=changes.initialized,
        unused=changes.unused,
        aliases=map_to_shared_names(model),
    )
    before, now = _list_position_options(stored), _list_position_options(config)
    is_changed = (
        any(before[key] != now[key] for key in (*ENCODING_KEYS, *TEMPERATURE_KEYS))
        or changes.initialized
        or changes.unused
    )
    return (changes.describe(config, stored),) if is_changed else ()


def _list_position_options(config: Config) -> dict[str, Any]:
    """Return the options of a model's encoding and processor in canonical form."""
    return {**config.position.model_dump(), **canonicalize_position_options(config.position)}

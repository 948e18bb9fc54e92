"""Compatibility of a checkpoint with the configuration that resumes or finetunes it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.legacy import DEEPSPEED_FOLDER
from megatron.checkpoint.trainer_state import TrainerState
from megatron.checkpoint.weights import (
    TEMPERATURE_KEYS,
    list_other_encoding_keys,
    list_other_temperature_keys,
)
from megatron.config.schema import Config
from megatron.config.stages import is_stage_key
from megatron.config.yaml_files import format_value
from megatron.model.position_modules import canonicalize_position_options
from megatron.options.section import ChangePolicy
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class StoredCheckpoint:
    """Undamaged checkpoint with its configuration and trainer state."""

    path: Path
    config: Config
    """Configuration of the run that wrote the checkpoint."""
    trainer_state: TrainerState


def is_same_training(config: Config, stored: Config, *, may_differ: Collection[str] = ()) -> bool:
    """Return True if a run continues the training as configured from the start.

    A run with a changed learning rate, for example, differs from one trained with that rate from its first step.

    may_differ: keys that may change without making it a different training.
    """
    return all(key in may_differ for key, _, _ in _list_changes(config, stored, "data", "numerics", "schedule"))


def describe_origin(source: StoredCheckpoint) -> str:
    """Return an identifier of a checkpoint's weights: how it was trained, or their checksum if it was imported."""
    if not has_training_states(source.path):
        entries = manifest.read_manifest(source.path / manifest.MANIFEST) or {}
        if layout.WEIGHTS in entries:
            return f"weights {entries[layout.WEIGHTS].crc32}"
    return f"{source.trainer_state.compute_training_digest(source.config)} at step {source.trainer_state.step}"


def has_training_states(checkpoint: Path) -> bool:
    """Return True if a checkpoint contains training states in addition to weights."""
    return (checkpoint / DEEPSPEED_FOLDER).is_dir() or (checkpoint / manifest.STATES).is_dir()


def check_architecture(config: Config, checkpoint: Path, stored: Config, *, finetune: bool = False) -> None:
    """Reject checkpoints of a different model.

    Finetuning may change settings that do not affect weight shapes, give every layer its own position parameters, and
    add a score processor (`check_added_processors` ensures that it has no initial effect). It may also use another
    encoding, temperature or options of these, if the configuration sets them explicitly.

    Raises:
        UserError: names the first key that differs, with both values.
    """
    new = {**config.get_architecture_keys(), **canonicalize_position_options(config.position)}
    old = {**stored.get_architecture_keys(), **canonicalize_position_options(stored.position)}
    free: set[str] = set()
    if finetune:
        free.update(
            config.get_keys_by_policy("context"),
            list_other_encoding_keys(config, stored),
            list_other_temperature_keys(config),
        )
        if new["pos_emb_per_layer"]:
            free.add("pos_emb_per_layer")
        if old.get("score_processor") == "none":
            free.update(("score_processor", "score_processor_options"))
    for key in sorted(set(new) | set(old)):
        if key in free:
            continue
        if new.get(key) != old.get(key):
            what = "finetuning cannot change this" if finetune else "a run cannot change its model"
            if (
                finetune
                and key in ("pos_emb", "pos_emb_options", *TEMPERATURE_KEYS)
                and key not in config.position.model_fields_set
            ):
                what = "set it explicitly to change it"
            raise UserError(
                f"{key}: this run has {format_value(new.get(key))}, but {checkpoint} was trained with "
                f"{format_value(old.get(key))}; {what}"
            )


def check_optimizer(config: Config, checkpoint: Path, stored: Config) -> None:
    """Reject checkpoints of another optimizer, whose moments have a different meaning. Raises UserError."""
    now, before = config.optimizer.optimizer, stored.optimizer.optimizer
    if now.algorithm != before.algorithm:
        raise UserError(
            f"optimizer.type: this run has {now.type}, but {checkpoint} contains the moments of {before.type}; to "
            "continue with its weights and new moments, set finetune=true"
        )


def _list_changes(config: Config, stored: Config, *policies: ChangePolicy) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of the given policies that differ, with the stored and the new value."""
    new, old = config.get_keys_by_policy(*policies), stored.get_keys_by_policy(*policies)
    return ((key, _format_setting(old[key]), _format_setting(new[key])) for key in new if new[key] != old[key])


def _format_setting(value: Any) -> str:
    """Format a value on one line; a list of stages as its length."""
    is_long = isinstance(value, list) and any(isinstance(entry, dict) for entry in value)
    return f"a list of {len(value)}" if is_long else format_value(value)


def describe_changes(config: Config, source: StoredCheckpoint, *policies: ChangePolicy) -> list[str]:
    """Return notes on allowed changes that make the run differ from an uninterrupted one, for some or all policies."""
    lines = []
    for policy in policies or get_args(ChangePolicy):
        for key, old, new in _list_changes(config, source.config, policy):
            if policy in ("data", "numerics", "schedule"):
                lines.append(f"{key}: was {old}, now {new}")
            elif policy == "initialization":
                lines.append(f"{key}: {new} has no effect; the weights come from {source.path}")
    return lines


LENGTH_KEYS = ("train_iters", "train_epochs")
"""Keys of a run's length, which may be extended without making it a different training."""


PRECISION_KEYS = ("precision", "fp16", "bf16")
"""Keys that a branch may change in addition to its schedule and layout; results agree up to rounding."""


def describe_branch(config: Config, source: StoredCheckpoint) -> str:
    """Return a note for a run that starts in its own folder with all states of another run's checkpoint.

    Raises UserError if more than the schedule differs, in which case the run is not a branch.
    """
    for key, old, new in _list_changes(config, source.config, "data", "numerics"):
        if key.split(".")[0] in PRECISION_KEYS:
            continue
        step = source.trainer_state.step
        in_stage = f"specify it as a stage, stages: [{{until: {step}}}, {{{key}: …}}], or " if is_stage_key(key) else ""
        raise UserError(
            f"{key}: this run has {new}, but {source.path}, which it branches from, was trained with {old}; a branch "
            f"can change only the schedule: {in_stage}load only the weights with finetune=true"
        )
    changes = [f"{key} {old} → {new}" for key, old, new in _list_changes(config, source.config, "schedule", "numerics")]
    changed = f" with {', '.join(changes)}" if changes else ", with nothing changed"
    return f"branches from {source.path} at step {source.trainer_state.step}{changed}"

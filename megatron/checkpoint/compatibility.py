"""Compatibility of a checkpoint: with the configuration that resumes or finetunes it, and of formats 1 and 2.

Checkpoints of format 2 and earlier contain DeepSpeed's own files, which are no longer written:

    deepspeed/         optimizer states, masters, loss scale: one file per rank, for the same layout and optimizer
    random_states/     one torch file per rank

This module imports DeepSpeed only to load them, so that a dry run can check such a checkpoint without it. DeepSpeed
reads its files with an unrestricted pickle, which runs any code a file contains. The files consist of tensors, numbers,
text and a few plain DeepSpeed classes. This module therefore reads them with `weights_only` and allows those classes by
name.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megatron.checkpoint import layout, manifest, tensor_files
from megatron.checkpoint.manifest import migrate_weight_name
from megatron.checkpoint.trainer_state import TrainerState
from megatron.checkpoint.weights import (
    TEMPERATURE_KEYS,
    list_other_encoding_keys,
    list_other_temperature_keys,
)
from megatron.config.schema import Config
from megatron.config.stages import is_stage_key
from megatron.config.yaml_files import format_value
from megatron.distributed import rng
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.model.position_modules import canonicalize_position_options
from megatron.options.section import ChangePolicy
from megatron.utils.errors import FarfieldError, RunError, UserError


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


def compute_origin(config: Config, source: StoredCheckpoint, *, may_differ: Collection[str] = ()) -> str | None:
    """Return what a run starts from (`TrainerState.origin`), or None if it continues a training from scratch.

    It identifies how the loaded checkpoint was trained, or its weights if they were imported. A run that loads only the
    weights has another origin than one that continues with all states.

    Args:
        config: configuration of the run, in the stage that wrote the checkpoint.
        source: the checkpoint.
        may_differ: as for `is_same_training`.
    """
    finetune = config.checkpoint.finetune
    if not finetune and is_same_training(config, source.config, may_differ=may_differ):
        return source.trainer_state.origin
    if not has_training_states(source.path):
        entries = manifest.read_manifest(source.path / manifest.MANIFEST) or {}
        if layout.WEIGHTS in entries:
            return f"weights {entries[layout.WEIGHTS].crc32}"
    training = f"{source.trainer_state.compute_training_digest(source.config)} at step {source.trainer_state.step}"
    return f"weights of {training}" if finetune else training


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
    finetuned = {
        *config.get_keys_by_policy("context"),
        *list_other_encoding_keys(config, stored),
        *list_other_temperature_keys(config),
    }
    if new["pos_emb_per_layer"]:
        finetuned.add("pos_emb_per_layer")
    if old.get("score_processor") == "none":
        finetuned.update(("score_processor", "score_processor_options"))
    for key in sorted(set(new) | set(old)):
        if finetune and key in finetuned:
            continue
        if new.get(key) != old.get(key):
            what = "finetuning cannot change this" if finetune else "a run cannot resume with another architecture"
            if not finetune and key in finetuned:
                what += "; to start from these weights, set finetune=true"
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
    return f"branching from {source.path} at step {source.trainer_state.step}{changed}"


def _list_safe_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _migrate_names(states: Any, written: int) -> Any:
    """Return states of format `written` with current weight names, both in dictionary keys and in lists."""
    if isinstance(states, dict):
        migrated = {_migrate_names(key, written): _migrate_names(value, written) for key, value in states.items()}
        states.clear()  # in place: torch's dictionaries of weights have attributes
        states.update(migrated)
        return states
    if type(states) in (list, tuple, set):
        return type(states)(_migrate_names(value, written) for value in states)
    return migrate_weight_name(states, written) if isinstance(states, str) else states


@contextmanager
def use_safe_loading(engine: Any, written: int) -> Iterator[None]:
    """Make a DeepSpeed engine read a checkpoint of format `written` without pickle and with current weight names."""

    def load(path: str, map_location: Any = None) -> dict[str, Any]:
        states = tensor_files.read_torch_file(path, classes=_list_safe_classes(), map_location=map_location)
        migrated: dict[str, Any] = _migrate_names(states, written)
        return migrated

    engine.checkpoint_engine.load = load
    try:
        yield
    finally:
        del engine.checkpoint_engine.load  # the class's method again


DEEPSPEED_FOLDER, RNG_FOLDER = "deepspeed", "random_states"


@dataclass(frozen=True)
class DeepSpeedStateReader:
    """Reader that restores training state stored by DeepSpeed (`megatron.checkpoint.resume.StateReader`)."""

    checkpoint: Path
    config: Config
    """Configuration of the run that wrote the checkpoint."""
    state: TrainerState

    def check_engine(self, config: Config, sizes: ParallelSizes) -> None:
        """Reject configurations that DeepSpeed's files cannot be loaded into, before anything is built.

        Each model-parallel rank stored its own shard, so the number of these ranks must not change. ZeRO 1–3 stored one
        shard of the optimizer states per data- and context-parallel rank, so that number must not change either;
        without ZeRO it may. Stages 1 and 2 stored the same shards, except that stage 1 in bfloat16 uses another
        optimizer when it accumulates gradients on the device. Stage 3 stored one shard per sub-group.

        Raises:
            UserError: names the key and both values.
        """
        before, now, state = self.config.training, config.training, self.state
        stage, precision = now.zero_optimization.stage, now.compute_dtype
        same_parts = {state.zero_stage, stage} == {1, 2} and precision != "bf16"
        old_steps, new_steps = before.gradient_accumulation_steps, now.gradient_accumulation_steps
        old_zero, new_zero = before.zero_optimization, now.zero_optimization
        old_device, new_device = old_zero.offload_optimizer.device, new_zero.offload_optimizer.device
        accumulates, accumulated = new_steps > 1 and new_device == "none", old_steps > 1 and old_device == "none"
        same_optimizer = stage != 1 or precision != "bf16" or accumulates == accumulated
        same_groups = stage != 3 or old_zero.sub_group_size == new_zero.sub_group_size
        for key, old, new, fits in (
            ("precision", state.precision, precision, state.precision == precision),
            ("zero_optimization.stage", state.zero_stage, stage, state.zero_stage == stage or same_parts),
            ("model_parallel_size", state.tensor, sizes.tensor, state.tensor == sizes.tensor),
            ("pipe_parallel_size", state.pipeline, sizes.pipeline, state.pipeline == sizes.pipeline),
            ("num_gpus", state.world, sizes.world_size, state.world == sizes.world_size or stage == 0),
            (
                "gradient_accumulation_steps",
                old_steps,
                new_steps,
                same_optimizer or (old_steps > 1) == (new_steps > 1),
            ),
            ("zero_optimization.offload_optimizer.device", old_device, new_device, same_optimizer),
            ("zero_optimization.sub_group_size", old_zero.sub_group_size, new_zero.sub_group_size, same_groups),
        ):
            if not fits:
                raise UserError(
                    f"{key}: {self.checkpoint} was written with {old}, but this run has {new}; its optimizer states "
                    "cannot be resharded; keep the old value, or load only the weights (finetune=true)"
                )

    def restore(self, engine: Any, mesh: Mesh) -> None:
        """Restore masters, optimizer states, loss scale and counters in a new DeepSpeed engine.

        All ranks must call this. Raises RunError if files are missing or damaged; a run never resumes from partial
        state.
        """
        folder = self.checkpoint / DEEPSPEED_FOLDER
        try:
            with use_safe_loading(engine, manifest.read_format_version(self.checkpoint)):
                engine.load_checkpoint(
                    str(self.checkpoint),
                    tag=DEEPSPEED_FOLDER,
                    load_optimizer_states=True,
                    load_lr_scheduler_states=False,
                )
        except FarfieldError:
            raise
        except AssertionError as failure:
            has_files = any(folder.glob("*.pt"))
            reason = _get_first_line(failure) if has_files else "it contains no DeepSpeed files"
            raise RunError(f"{folder}: cannot be loaded: {reason}") from None
        except Exception as failure:  # each DeepSpeed optimizer fails differently on incompatible states
            raise RunError(f"{folder}: cannot be loaded: {_get_first_line(failure)}") from None
        if engine.global_steps != self.state.step:
            raise RunError(
                f"{folder}: contains the states of step {engine.global_steps}, but progress.json is from step "
                f"{self.state.step}; the files belong to different checkpoints"
            )

    def synchronize(self, engine: Any) -> None:
        """No-op: DeepSpeed has already loaded the weights."""

    def restore_rng(self, mesh: Mesh) -> bool:
        """Restore this rank's random states.

        Returns False if there are none for it; raises RunError if they are damaged.
        """
        if mesh.rank >= self.state.world:
            return False
        path = self.checkpoint / RNG_FOLDER / f"rank_{mesh.rank:05d}.pt"
        states = tensor_files.read_torch_file(path)
        try:
            rng.restore_rng_state(states)
        except Exception:
            raise RunError(f"{path}: not the random states of a process; the checkpoint is damaged") from None
        return True


def _get_first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'its files do not match this run').splitlines()[0]}"

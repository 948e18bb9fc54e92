"""Continuing a run: what to start from, whether it is whole and fits, and putting every state back.

A run goes on bit for bit as if it had not stopped: masters, moments and loss scale, random states, and the place in the
data. In another layout, ZeRO stage or precision it goes on within rounding, because sums are taken in another order.
It goes on from the newest checkpoint whose files are what was written; one that is damaged is named and put aside. What
would silently make it another run is refused, naming the key.

A run whose `load` names another run's checkpoint and whose `save` is a folder of its own is a branch: it goes on with
every state of that checkpoint, which is not copied. Its schedule may be another one; what else may change from there on
is said as a stage.
"""

import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, get_args

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.legacy import DEEPSPEED_FOLDER, DeepSpeedStateReader
from megatron.checkpoint.run_folder import get_config_path, is_saved_config
from megatron.checkpoint.sharded_state import ShardedStateReader
from megatron.checkpoint.stored_config import load_checkpoint_config
from megatron.checkpoint.trainer_state import TrainerState
from megatron.checkpoint.weights import (
    TEMPERATURE_KEYS,
    load_finetuned_weights,
    names_other_encoding,
    names_other_temperature,
)
from megatron.config.load import read_config
from megatron.config.schema import Config
from megatron.config.stages import Stage, build_stages, find_stage, find_writing_stage, is_stage_key
from megatron.config.yaml_files import format_value
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.position_modules import canonical_position_options
from megatron.options.position import PositionOptions
from megatron.options.section import ChangePolicy
from megatron.utils.errors import FarfieldError, RunError, UserError


class StateReader(Protocol):
    """Reads the states of a training from a checkpoint, each from the files of its own format."""

    def check_engine(self, config: Config, sizes: ParallelSizes) -> None:
        """Refuse an engine that the states cannot be loaded into, before anything is built. Raises UserError, naming
        the key and both values."""

    def restore(self, engine: Any, mesh: Mesh) -> None:
        """Put this rank's states back into a fresh DeepSpeed engine. Raises RunError: files are missing or damaged."""

    def synchronize(self, engine: Any) -> None:
        """What all ranks do together once every one has restored its states."""

    def restore_rng(self, mesh: Mesh) -> bool:
        """Put this rank's random states back; False if the checkpoint has none for it. Raises RunError as `restore`."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that is whole, and what it says of itself, read once."""

    path: Path
    config: Config
    """Of the run that wrote it."""
    trainer_state: TrainerState


@dataclass(frozen=True)
class ResumePlan:
    """What a run starts from."""

    source: StoredCheckpoint | None = None
    """None: fresh weights."""
    reader: StateReader | None = None
    """Reads every state of `source`. None: everything begins anew but, where there is a `source`, the weights."""
    trainer_state: TrainerState = field(default_factory=TrainerState)
    """Where the run begins."""
    notes: tuple[str, ...] = ()
    """Lines worth telling."""
    stages: tuple[Stage, ...] = ()
    """Of the run; one if it has no list of them."""
    superseded: tuple[Path, ...] = ()
    """Later checkpoints in the run's folder, damaged or gone back behind: `move_superseded_aside` moves them out of the
    way."""
    origin: str | None = None
    """Training that the initial weights come from, if any (`TrainerState.origin`)."""

    @property
    def stage(self) -> Stage:
        """The one that the run begins in, whose configuration it is built from."""
        return find_stage(self.stages, self.trainer_state.step)

    @property
    def resumes(self) -> bool:
        """Does the run go on with every state of the checkpoint?"""
        return self.reader is not None

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that the run goes on from, if it resumes one."""
        return self.source.path if self.source is not None and self.resumes else None

    def check_engine(self, config: Config, sizes: ParallelSizes) -> None:
        """Refuse an engine that the checkpoint's states cannot be loaded into, before anything is built.

        Raises UserError: naming the key and both values.
        """
        if self.reader is not None:
            self.reader.check_engine(config, sizes)

    def check_vocabulary(self, size: int, name: str, task: str | None) -> None:
        """Refuse data of another tokenizer, or another task, than the checkpoint's. Raises UserError."""
        stored = None if self.source is None else self.source.trainer_state.vocabulary
        if self.source is None or stored is None or (stored.get("size"), stored.get("name")) == (size, name):
            return
        one_of_each = (task is None) != (self.source.config.data.task is None)
        keys = "train_data_paths, task" if one_of_each else "train_data_paths" if task is None else "task"
        raise UserError(
            f"{keys}: the data have the vocabulary {name} ({size} tokens), but {self.source.path} was trained with the "
            f"vocabulary {stored.get('name')} ({stored.get('size')} tokens)"
        )

    def check_methods(self, position: PositionOptions) -> tuple[str, ...]:
        """Refuse to go on with methods of the user's own whose code is another one than the checkpoint's.

        Returns notes on them for a run that takes the weights alone. Raises UserError.
        """
        changed = [] if self.source is None else self.source.trainer_state.find_changed_methods(position)
        if changed and self.source is not None and self.resumes:
            raise UserError(
                f"{changed[0]}: its code has changed since {self.source.path} was written; put it back, or begin "
                "another run with these weights: load=… finetune=true save=…"
            )
        return tuple(f"the code of {file} has changed since the weights were trained" for file in changed)

    def load_weights(self, config: Config, model: Any) -> tuple[str, ...]:
        """Finetuning: copy the weights of the checkpoint into a model that no engine has yet; else nothing is done.

        Returns lines worth telling.
        """
        if self.source is None or self.resumes:
            return ()
        return load_finetuned_weights(model, config, self.source.path, self.source.config)

    def restore(self, engine: Any, groups: ProcessGroups) -> None:
        """Put the states of the checkpoint back into a fresh DeepSpeed engine; random states come last.

        All ranks must call this. Raises RunError if the files are missing or damaged: a run never goes on from less.
        """
        assert self.reader is not None
        with _fail_together(groups):
            self.reader.restore(engine, groups.mesh)
        self.reader.synchronize(engine)

    def restore_rng(self, groups: ProcessGroups) -> tuple[str, ...]:
        """Put this rank's random states back: the last thing before the first step. Returns lines worth telling.

        All ranks must call this. Raises RunError as `restore`.
        """
        assert self.source is not None
        assert self.reader is not None
        with _fail_together(groups):
            is_restored = self.reader.restore_rng(groups.mesh)
        if all(groups.gather_objects(is_restored)):
            return ()
        world_size = self.source.trainer_state.world
        writers = "1 process" if world_size == 1 else f"{world_size} processes"
        return (f"random states: the checkpoint is of {writers}; those that read more sequences begin with fresh ones",)


@contextmanager
def _fail_together(groups: ProcessGroups) -> Iterator[None]:
    """What one rank meets inside the block is raised in all of them, who must all come here."""
    error = None
    try:
        yield
    except FarfieldError as failure:
        error = str(failure)
    if (error := groups.find_first_error(error)) is not None:
        raise RunError(error)


def plan_resume(
    config: Config, groups: ProcessGroups, *, sizes: ParallelSizes | None = None, checksums: bool = True
) -> ResumePlan:
    """Decide what a run starts from, by `load`, `save`, `finetune` and `rollback`, and check that it fits.

    All ranks must call this: each verifies a share of the checkpoint's files.

    Args:
        config: the run's configuration.
        groups: the processes that call this.
        sizes: mesh of the run; that of `groups` if absent.
        checksums: read every byte of the checkpoint; otherwise compare names and sizes of its files alone.

    Raises:
        UserError: `load` has no checkpoint; `save` has some that this run would not go on from; the checkpoint's model
            is another one (`Config.architecture_keys`), naming the key and both values.
        RunError: the checkpoint that was named is damaged, or all that there are.
    """
    options = config.checkpoint
    # As the first process sees it: the folder's other users may be changing it.
    saved = groups.gather_objects(layout.list_checkpoints(options.save) if options.save is not None else [])[0]
    if options.load is None:
        layout.refuse_existing_run(options.save, next(reversed(saved), None))
        return ResumePlan(stages=build_stages(config))
    if _is_same_folder(options.load, options.save) and not options.finetune and not saved:
        origin = groups.gather_objects(_find_origin(options.load))[0]
        if origin is None:
            note = f"load: {options.load} has no checkpoint yet; starting at step 0"
            return ResumePlan(notes=(note,), stages=build_stages(config))
        begun = config.replace(load=origin[0], finetune=origin[1])
        plan = plan_resume(begun, groups, sizes=sizes, checksums=checksums)
        note = f"load: {options.load} has no checkpoint yet; it begins from {origin[0]}, as it did"
        return replace(plan, notes=(note, *plan.notes))
    if options.finetune and saved:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {saved[-1].name}, but this run would start at step 0; "
            f"choose another folder, or go on from the last with {shlex.quote(f'load={saved[-1]}')}"
        )
    checkpoint, notes = _find_valid_checkpoint(options.load, groups, weights_only=options.finetune, checksums=checksums)
    index = next((i for i, path in enumerate(saved) if _is_same_folder(path, checkpoint)), None)
    if saved and index is None:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {saved[-1].name}, but this run would go on from "
            f"{checkpoint}; choose another folder, or go on from the last with {shlex.quote(f'load={saved[-1]}')}"
        )
    later = tuple(saved[index + 1 :]) if index is not None else ()
    is_named = layout.is_checkpoint(options.load)  # else the later ones are those that were found damaged
    if later and is_named and not options.rollback:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {later[-1].name}, but this run would go on from "
            f"{checkpoint}; choose another folder, go on from the last with "
            f"{shlex.quote(f'load={options.save}')}, or give up the later "
            "ones with rollback=true (they are moved aside)"
        )
    stored_config = load_checkpoint_config(checkpoint)
    state = TrainerState.read(checkpoint)
    if options.finetune:
        stages = build_stages(config)
        check_architecture(stages[0].config, checkpoint, stored_config, finetune=True)
        notes += (f"weights of {checkpoint}; optimizer, data and step begin anew",)
        source = StoredCheckpoint(checkpoint, stored_config, state)
        return ResumePlan(source, notes=notes, stages=stages, origin=_describe_origin(source))
    stages = build_stages(_keep_epoch_steps(config, stored_config))
    # What the checkpoint was written under is compared with what holds in that stage.
    config = find_writing_stage(stages, state.step).config
    check_architecture(config, checkpoint, stored_config)
    check_optimizer(config, checkpoint, stored_config)
    is_legacy = (checkpoint / DEEPSPEED_FOLDER).is_dir()
    if not _has_training_states(checkpoint):
        raise UserError(
            f"load: {checkpoint} holds weights alone (it was imported), so there is no training to go on with; take "
            "the weights with finetune=true"
        )
    source = StoredCheckpoint(checkpoint, stored_config, state)
    reader: StateReader = (
        DeepSpeedStateReader(source.path, source.config, source.trainer_state)
        if is_legacy
        else ShardedStateReader(source.path, source.trainer_state)
    )
    qualifier = "" if is_named else ", the newest whole checkpoint"
    if options.save is not None and index is None:
        notes += (_describe_branch(config, source), *_describe_changes(config, source, "initialization"))
    else:
        notes += (f"resuming from {checkpoint} at step {state.step}{qualifier}", *_describe_changes(config, source))
    layout_before = f"{state.sizes}, ZeRO {state.zero_stage}"
    layout_now = f"{sizes or groups.mesh.sizes}, ZeRO {config.training.zero_optimization.stage}"
    if layout_before != layout_now:
        notes += (f"layout: {layout_before} until here, {layout_now} from here on",)
    is_own = index is not None or options.save is None
    is_same = _is_same_training(config, stored_config, may_differ=LENGTH_KEYS if is_own else ())
    origin = state.origin if is_same else _describe_origin(source)
    return ResumePlan(source, reader, state, notes, stages, later, origin)


def _is_same_training(config: Config, stored: Config, *, may_differ: Collection[str] = ()) -> bool:
    """Return whether a run continues a training as it began.

    With another learning rate, say, it is not what a run is that had this rate from its first step.

    may_differ: keys that a run may change without becoming another training.
    """
    return all(key in may_differ for key, _, _ in _list_changes(config, stored, "data", "numerics", "schedule"))


def _describe_origin(source: StoredCheckpoint) -> str:
    """Return what identifies the weights of a checkpoint: how it was trained, or their checksum if it was imported."""
    if not _has_training_states(source.path):
        entries = manifest.read_manifest(source.path / manifest.MANIFEST) or {}
        if layout.WEIGHTS in entries:
            return f"weights {entries[layout.WEIGHTS].crc32}"
    return f"{source.trainer_state.compute_training_digest(source.config)} at step {source.trainer_state.step}"


def _has_training_states(checkpoint: Path) -> bool:
    """Return whether a checkpoint holds the states of a training beside its weights."""
    return (checkpoint / DEEPSPEED_FOLDER).is_dir() or (checkpoint / manifest.STATES).is_dir()


def _find_origin(run: str) -> tuple[str, bool] | None:
    """What a run began from that has no checkpoint of its own yet, and whether it took the weights alone."""
    path = get_config_path(run)
    if not is_saved_config(path):
        return None
    options = read_config(path).checkpoint
    if options.load is None or _is_same_folder(options.load, run):
        return None
    return options.load, options.finetune


def _keep_epoch_steps(config: Config, stored: Config) -> Config:
    """The configuration with the steps that its epochs made when the run began, whatever became of the corpus."""
    training, before = config.training, stored.training
    if training.train_epochs is None or training.train_epochs != before.train_epochs:
        return config
    return config.replace(train_iters=before.train_iters)


def _is_same_folder(one: str | Path, other: str | Path | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _find_valid_checkpoint(
    load: str, groups: ProcessGroups, *, weights_only: bool, checksums: bool
) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint that `load` names or, of a run, the newest whose files are as they were written; what to say."""
    try:
        newest = layout.resolve_checkpoint_path(load)
    except UserError as error:
        raise UserError(f"load: {error}") from None
    is_named = layout.is_checkpoint(load)
    candidates = groups.gather_objects(
        [newest] if is_named else layout.list_checkpoints(layout.find_run_folder(load))[::-1]
    )[0]
    notes: tuple[str, ...] = ()
    problems: list[str] = []
    for checkpoint in candidates:
        problem = manifest.find_damage(
            checkpoint,
            manifest.MODEL_FILES if weights_only else None,
            rank=groups.rank,
            world_size=groups.world_size,
            checksums=checksums,
        )
        if (problem := groups.find_first_error(problem)) is None:
            if not manifest.has_checksums(checkpoint):
                notes += (f"{checkpoint}: carries no checksums (an earlier version wrote it): taken unverified",)
            return checkpoint, notes
        if is_named:
            raise RunError(f"load: {checkpoint}: is damaged: {problem}; name another checkpoint")
        problems.append(f"{checkpoint.name}: {problem}")
        notes += (f"{checkpoint}: is damaged, and passed over: {problem}",)
    raise RunError(f"load: {load}: no checkpoint in it is whole: {'; '.join(problems)}; {manifest.REWRITE_HINT}")


def move_superseded_aside(resume: ResumePlan, metrics: Path) -> tuple[str, ...]:
    """Move the checkpoints that the run goes back behind out of its way. For the first process. Returns lines to tell.

    Args:
        resume: what the run starts from.
        metrics: the run's records, which are about to lose the steps after `resume`; a copy goes with the checkpoints.

    Raises RunError: the disk refuses.
    """
    if not resume.superseded:
        return ()
    try:
        aside = layout.move_aside(resume.superseded, [metrics])
    except OSError as error:
        raise RunError(f"{resume.superseded[-1]}: cannot be moved aside: {error.strerror or error}") from None
    names = ", ".join(path.name for path in resume.superseded)
    return (f"{names}: moved to {aside}, with the metrics until now; this run goes on before them",)


def check_architecture(config: Config, checkpoint: Path, stored: Config, *, finetune: bool = False) -> None:
    """Refuse a checkpoint of another model.

    Finetuning may change what no weight's shape depends on, give every layer position parameters of its own, take
    another encoding, another temperature or other options of them that it names itself, and add a score processor
    (`check_added_processors` sees to it that it has no effect at first).

    Raises:
        UserError: naming the first key that differs and both values.
    """
    new = {**config.architecture_keys(), **canonical_position_options(config.position)}
    old = {**stored.architecture_keys(), **canonical_position_options(stored.position)}
    free: set[str] = set()
    if finetune:
        free.update(
            config.keys_by_policy("context"), names_other_encoding(config, stored), names_other_temperature(config)
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
                what = "it may be another one if you name it"
            raise UserError(
                f"{key}: this run has {format_value(new.get(key))}, but {checkpoint} was trained with "
                f"{format_value(old.get(key))}; {what}"
            )


def check_optimizer(config: Config, checkpoint: Path, stored: Config) -> None:
    """Refuse a checkpoint of another optimizer, whose moments mean something else. Raises UserError."""
    now, before = config.optimizer.optimizer, stored.optimizer.optimizer
    if now.algorithm != before.algorithm:
        raise UserError(
            f"optimizer.type: this run has {now.type}, but {checkpoint} holds the moments of {before.type}; to go on "
            "with its weights and fresh moments, take finetune=true"
        )


def _list_changes(config: Config, stored: Config, *policies: ChangePolicy) -> Iterator[tuple[str, str, str]]:
    """The keys of some policies that differ, with the stored and the new value."""
    new, old = config.keys_by_policy(*policies), stored.keys_by_policy(*policies)
    return ((key, _format_setting(old[key]), _format_setting(new[key])) for key in new if new[key] != old[key])


def _format_setting(value: Any) -> str:
    """A value in a line; of stages their number."""
    is_long = isinstance(value, list) and any(isinstance(entry, dict) for entry in value)
    return f"a list of {len(value)}" if is_long else format_value(value)


def _describe_changes(config: Config, source: StoredCheckpoint, *policies: ChangePolicy) -> list[str]:
    """Changes that are allowed but make the run differ from an uninterrupted one; of some policies, or of all."""
    lines = []
    for policy in policies or get_args(ChangePolicy):
        for key, old, new in _list_changes(config, source.config, policy):
            if policy in ("data", "numerics", "schedule"):
                lines.append(f"{key}: {old} until here, {new} from here on")
            elif policy == "initialization":
                lines.append(f"{key}: {new} has no effect: the weights come from {source.path}")
    return lines


LENGTH_KEYS = ("train_iters", "train_epochs")
"""Keys of the length of a run, which may be extended without becoming another training."""
PRECISION_KEYS = ("precision", "fp16", "bf16")
"""What a branch may change beside its schedule, as it may its layout: results agree to rounding."""


def _describe_branch(config: Config, source: StoredCheckpoint) -> str:
    """A line for a run that begins, in a folder of its own, with all states of another's checkpoint.

    Raises UserError: more than its schedule differs, so that it would be no branch of that run.
    """
    for key, old, new in _list_changes(config, source.config, "data", "numerics"):
        if key.split(".")[0] in PRECISION_KEYS:
            continue
        step = source.trainer_state.step
        in_stage = f"say it as a stage, stages: [{{until: {step}}}, {{{key}: …}}], or " if is_stage_key(key) else ""
        raise UserError(
            f"{key}: this run has {new}, but {source.path}, which it branches from, was trained with {old}; a branch "
            f"changes the schedule alone: {in_stage}take the weights with finetune=true"
        )
    changes = [f"{key} {old} → {new}" for key, old, new in _list_changes(config, source.config, "schedule", "numerics")]
    changed = f" with {', '.join(changes)}" if changes else ", with nothing changed"
    return f"branches from {source.path} at step {source.trainer_state.step}{changed}"

"""Resuming a run: choosing the checkpoint, checking that it is undamaged and compatible, and restoring all states.

A resumed run continues bit for bit as if it had not stopped: masters, moments, loss scale, random states, and the
position in the data. With another layout, ZeRO stage or precision it continues up to rounding, because sums are
computed in another order. A run resumes from the newest undamaged checkpoint; damaged ones are reported and moved
aside. Settings that would silently make it a different run raise an error that names the key.

A run whose `load` is a checkpoint of another run and whose `save` is its own folder is a branch. It continues with all
states of that checkpoint, which is not copied. A branch may change its schedule; other changes are specified as a
stage.
"""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.compatibility import (
    DEEPSPEED_FOLDER,
    LENGTH_KEYS,
    DeepSpeedStateReader,
    StoredCheckpoint,
    check_architecture,
    check_optimizer,
    compute_origin,
    describe_branch,
    describe_changes,
    has_training_states,
)
from megatron.checkpoint.manifest import load_checkpoint_config
from megatron.checkpoint.run_folder import get_config_path, is_saved_config
from megatron.checkpoint.sharded_state import ShardedStateReader
from megatron.checkpoint.trainer_state import TrainerState
from megatron.checkpoint.weights import (
    load_finetuned_weights,
)
from megatron.config.execution import build_stages
from megatron.config.load import read_config
from megatron.config.schema import Config
from megatron.config.stages import Stage, find_stage, find_writing_stage
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.process_groups import ProcessGroups
from megatron.options.output import CheckpointOptions
from megatron.options.position import PositionOptions
from megatron.utils.errors import FarfieldError, RunError, UserError


class StateReader(Protocol):
    """Protocol for readers of training states, one per checkpoint format."""

    def check_engine(self, config: Config, sizes: ParallelSizes) -> None:
        """Reject engines that the states cannot be loaded into, before anything is built.

        Raises UserError with the key and both values.
        """

    def restore(self, engine: Any, mesh: Mesh) -> None:
        """Restore this rank's states in a new DeepSpeed engine. Raises RunError if files are missing or damaged."""

    def synchronize(self, engine: Any) -> None:
        """Perform collective work after every rank has restored its states."""

    def restore_rng(self, mesh: Mesh) -> bool:
        """Restore this rank's random states; return False if the checkpoint has none for it.

        Raises RunError as `restore`.
        """


@dataclass(frozen=True)
class ResumePlan:
    """Starting point of a run."""

    source: StoredCheckpoint | None = None
    """Checkpoint to start from, or None for newly initialized weights."""
    reader: StateReader | None = None
    """Reader of every state of `source`. If None, at most the weights are loaded and everything else starts fresh."""
    trainer_state: TrainerState = field(default_factory=TrainerState)
    """Progress at which the run begins."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    stages: tuple[Stage, ...] = ()
    """Stages of the run; one if the configuration lists none."""
    discarded: tuple[Path, ...] = ()
    """Later checkpoints in the run's folder, damaged or rolled back. `archive_discarded_checkpoints` moves them."""
    origin: str | None = None
    """Identity of the training that produced the initial weights, if any (`TrainerState.origin`)."""

    @cached_property
    def stage(self) -> Stage:
        """Stage in which the run begins; its configuration is used to build the run."""
        return find_stage(self.stages, self.trainer_state.step)

    @property
    def resumes(self) -> bool:
        """True if the run resumes with every state of the checkpoint."""
        return self.reader is not None

    @property
    def checkpoint(self) -> Path | None:
        """Checkpoint that the run resumes from, or None if it does not resume."""
        return self.source.path if self.source is not None and self.resumes else None

    def check_engine(self, config: Config, sizes: ParallelSizes) -> None:
        """Reject engines that the checkpoint's states cannot be loaded into, before anything is built.

        Raises UserError with the key and both values.
        """
        if self.reader is not None:
            self.reader.check_engine(config, sizes)

    def check_vocabulary(self, size: int, name: str, task: str | None) -> None:
        """Reject data whose tokenizer or task differs from the checkpoint's. Raises UserError."""
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
        """Reject resuming if the code of the user's own methods has changed since the checkpoint.

        Returns notes for a run that loads only the weights. Raises UserError.
        """
        changed = [] if self.source is None else self.source.trainer_state.find_changed_methods(position)
        if changed and self.source is not None and self.resumes:
            raise UserError(
                f"{changed[0]}: its code has changed since {self.source.path} was written; restore it, or start "
                "a new run with these weights: load=… finetune=true save=…"
            )
        return tuple(f"the code of {file} has changed since the weights were trained" for file in changed)

    def load_weights(self, config: Config, model: Any) -> tuple[str, ...]:
        """Load the weights of the checkpoint for finetuning, before an engine is built; do nothing otherwise.

        Returns notes for the user.
        """
        if self.source is None or self.resumes:
            return ()
        return load_finetuned_weights(model, config, self.source.path, self.source.config)

    def restore(self, engine: Any, groups: ProcessGroups) -> None:
        """Restore the states of the checkpoint in a new DeepSpeed engine, except random states (`restore_rng`).

        All ranks must call this. Raises RunError if files are missing or damaged; a run never resumes from partial
        state.
        """
        assert self.reader is not None
        with _fail_together(groups):
            self.reader.restore(engine, groups.mesh)
        self.reader.synchronize(engine)

    def restore_rng(self, groups: ProcessGroups) -> tuple[str, ...]:
        """Restore this rank's random states, immediately before the first step.

        Returns notes for the user.

        All ranks must call this. Raises the same errors as `restore`.
        """
        assert self.source is not None
        assert self.reader is not None
        with _fail_together(groups):
            is_restored = self.reader.restore_rng(groups.mesh)
        if all(groups.gather_objects(is_restored)):
            return ()
        world_size = self.source.trainer_state.world
        writers = "1 process" if world_size == 1 else f"{world_size} processes"
        return (
            f"random states: the checkpoint has those of {writers}; ranks without stored states start with new ones",
        )


@contextmanager
def _fail_together(groups: ProcessGroups) -> Iterator[None]:
    """Raise an error of any rank on all ranks, which must all enter the block."""
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
    """Choose what a run starts from, by `load`, `save`, `finetune` and `rollback`, and check that it is compatible.

    All ranks must call this: each verifies a share of the checkpoint's files.

    Args:
        config: configuration of the run.
        groups: processes that call this.
        sizes: mesh of the run; that of `groups` by default.
        checksums: read every byte of the checkpoint; otherwise compare only names and sizes of its files.

    Raises:
        UserError: `load` has no checkpoint; `save` has checkpoints that this run would not continue; or the
            checkpoint's model differs (`Config.get_architecture_keys`), with the key and both values.
        RunError: the requested checkpoint is damaged, or all checkpoints are.
    """
    options, stages = config.checkpoint, build_stages(config)
    # As seen by the first process: other users of the folder may be changing it.
    saved = groups.gather_objects(layout.list_checkpoints(options.save) if options.save is not None else [])[0]
    if options.load is None:
        layout.check_run_is_new(options.save, next(reversed(saved), None))
        return ResumePlan(stages=stages)
    if _is_same_folder(options.load, options.save) and not saved:
        origin = groups.gather_objects(_find_origin(options.load))[0]
        if origin is not None:
            start_time = config.replace(load=origin[0], finetune=origin[1], rollback=False)
            plan = plan_resume(start_time, groups, sizes=sizes, checksums=checksums)
            note = f"load: {options.load} has no checkpoint yet; starting again from {origin[0]}"
            return replace(plan, notes=(note, *plan.notes))
        if not options.finetune:
            note = f"load: {options.load} has no checkpoint yet; starting at step 0"
            return ResumePlan(notes=(note,), stages=stages)
    if options.finetune and saved:
        raise UserError(
            f"save: {options.save} contains checkpoints up to {saved[-1].name}, but this run would start at step 0; "
            f"choose another folder, or resume from the newest with {format_resume_arguments(options)}"
        )
    checkpoint, notes = _find_valid_checkpoint(options.load, groups, weights_only=options.finetune, checksums=checksums)
    index = next((i for i, path in enumerate(saved) if _is_same_folder(path, checkpoint)), None)
    stored_config, is_named = load_checkpoint_config(checkpoint), layout.is_checkpoint(options.load)
    if index is None and not is_named and not options.finetune:
        _check_run_not_moved(options, stored_config)
    if saved and index is None:
        raise UserError(
            f"save: {options.save} contains checkpoints up to {saved[-1].name}, but this run would start from "
            f"{checkpoint}; choose another folder, or resume from the newest with {format_resume_arguments(options)}"
        )
    later = tuple(saved[index + 1 :]) if index is not None else ()
    if later and is_named and not options.rollback:  # otherwise the later checkpoints are damaged
        raise UserError(
            f"save: {options.save} contains checkpoints up to {later[-1].name}, but this run would resume from "
            f"{checkpoint}; choose another folder, resume from the newest with {format_resume_arguments(options)}, "
            "or roll back with rollback=true (later checkpoints are moved aside)"
        )
    state = TrainerState.read(checkpoint)
    if options.finetune:
        check_architecture(stages[0].config, checkpoint, stored_config, finetune=True)
        notes += (f"loading the weights of {checkpoint}; optimizer, data and step start fresh",)
        source = StoredCheckpoint(checkpoint, stored_config, state)
        return ResumePlan(source, notes=notes, stages=stages, origin=compute_origin(config, source))
    stages = build_stages(_restore_epoch_steps(config, stored_config))
    # Compare the checkpoint's configuration with that of its own stage.
    config = find_writing_stage(stages, state.step).config
    check_architecture(config, checkpoint, stored_config)
    check_optimizer(config, checkpoint, stored_config)
    is_legacy = (checkpoint / DEEPSPEED_FOLDER).is_dir()
    if not has_training_states(checkpoint):
        raise UserError(
            f"load: {checkpoint} contains only weights (an imported model), so training cannot resume; load "
            "the weights with finetune=true"
        )
    source = StoredCheckpoint(checkpoint, stored_config, state)
    reader: StateReader = (
        DeepSpeedStateReader(source.path, source.config, source.trainer_state)
        if is_legacy
        else ShardedStateReader(source.path, source.trainer_state)
    )
    qualifier = "" if is_named else ", the newest undamaged checkpoint"
    if options.save is not None and index is None:
        notes += (describe_branch(config, source), *describe_changes(config, source, "initialization"))
    else:
        notes += (f"resuming from {checkpoint} at step {state.step}{qualifier}", *describe_changes(config, source))
    layout_before = f"{state.sizes}, ZeRO {state.zero_stage}"
    layout_now = f"{sizes or groups.mesh.sizes}, ZeRO {config.training.zero_optimization.stage}"
    if layout_before != layout_now:
        notes += (f"layout: was {layout_before}, now {layout_now}",)
    is_own = index is not None or options.save is None
    origin = compute_origin(config, source, may_differ=LENGTH_KEYS if is_own else ())
    return ResumePlan(source, reader, state, notes, stages, later, origin)


def format_resume_arguments(options: CheckpointOptions) -> str:
    """Return the command-line keys that resume a run with these options from its newest checkpoint."""
    # The configuration of a finetuned run loads only weights, and only those of another run.
    return shlex.quote(f"load={options.save}") + (" finetune=false" if options.finetune else "")


def _find_origin(run: str) -> tuple[str, bool] | None:
    """Return the `load` and `finetune` values that a run without checkpoints started from, or None."""
    path = get_config_path(run)
    if not is_saved_config(path):
        return None
    options = read_config(path).checkpoint
    if options.load is None or _is_same_folder(options.load, run):
        return None
    return options.load, options.finetune


def _restore_epoch_steps(config: Config, stored: Config) -> Config:
    """Return the configuration with the number of steps computed when the run began, even if the corpus has changed."""
    training, before = config.training, stored.training
    if training.train_epochs is None or training.train_epochs != before.train_epochs:
        return config
    return config.replace(train_iters=before.train_iters)


def _is_same_folder(one: str | Path, other: str | Path | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _check_run_not_moved(options: CheckpointOptions, stored: Config) -> None:
    """Raise UserError if `save` is the folder in which the run of `load` was trained before it was moved or copied.

    Otherwise the moved run would continue as a branch in a new folder at its old path.
    """
    if options.save is not None and _is_same_folder(options.save, stored.checkpoint.save):
        raise UserError(
            f"save: {options.save} is the folder of {options.load} before it was moved or copied; resume it where it "
            f"is with {shlex.quote(f'save={options.load}')}, or branch from one of its checkpoints/step_…"
        )


def _find_valid_checkpoint(
    load: str, groups: ProcessGroups, *, weights_only: bool, checksums: bool
) -> tuple[Path, tuple[str, ...]]:
    """Return the checkpoint that `load` refers to (the newest undamaged one for a run), and notes for the user."""
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
        problem = forbidden = None
        try:
            problem = manifest.find_damage(
                checkpoint,
                manifest.MODEL_FILES if weights_only else None,
                rank=groups.rank,
                world_size=groups.world_size,
                checksums=checksums,
            )
        except PermissionError as error:
            forbidden = f"load: {error.filename}: cannot be read ({error.strerror})"
        if (forbidden := groups.find_first_error(forbidden)) is not None:
            raise UserError(forbidden)
        if (problem := groups.find_first_error(problem)) is None:
            if not manifest.has_checksums(checkpoint):
                notes += (f"{checkpoint}: has no checksums (written by an earlier version); not verified",)
            return checkpoint, notes
        if is_named:
            raise RunError(f"load: {checkpoint}: damaged: {problem}; choose another checkpoint")
        problems.append(f"{checkpoint.name}: {problem}")
        notes += (f"{checkpoint}: skipped because it is damaged: {problem}",)
    raise RunError(f"load: {load}: all checkpoints are damaged: {'; '.join(problems)}; {manifest.REWRITE_HINT}")


def archive_discarded_checkpoints(resume: ResumePlan, metrics: Path) -> tuple[str, ...]:
    """Move checkpoints later than the one being resumed to a subfolder.

    Called by the first process; returns notes.

    Args:
        resume: starting point of the run.
        metrics: metrics file of the run, which is about to lose the later steps; a copy is kept with the checkpoints.

    Raises RunError if the disk fails.
    """
    if not resume.discarded:
        return ()
    try:
        aside = layout.archive_checkpoints(resume.discarded, [metrics])
    except OSError as error:
        raise RunError(f"{resume.discarded[-1]}: cannot be moved aside: {error.strerror or error}") from None
    names = ", ".join(path.name for path in resume.discarded)
    if resume.stage.config.checkpoint.rollback:
        reason = "because of the rollback"
    else:
        reason = f"because {'it is' if len(resume.discarded) == 1 else 'they are'} damaged"
    point = "the start" if resume.source is None else resume.source.path.name
    return (f"{names}: moved to {aside}, with a copy of the metrics, {reason}; the run resumes from {point}",)

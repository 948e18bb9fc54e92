"""Continuing a run: what to start from, whether it is whole and fits, and putting every state back.

A run goes on bit for bit as if it had not stopped: masters, moments and loss scale, random states, and the place in the
data. In another layout, ZeRO stage or precision it goes on within rounding, because sums are taken in another order.
It goes on from the newest checkpoint whose files are what was written; one that is damaged is named and put aside. What
would silently make it another run is refused, naming the key.
"""

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint import engine_state, layout, legacy, manifest, rng_state, sharded_state, weight_changes
from megatron.checkpoint.stored_config import load_checkpoint_config
from megatron.checkpoint.trainer_state import TrainerState
from megatron.checkpoint.weights import read_shapes, read_weights
from megatron.config.schema import Config
from megatron.config.yaml_files import format_value
from megatron.distributed.mesh import ParallelSizes
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.parameter_groups import list_dispensable_weights, map_to_shared_names
from megatron.model.position_modules import canonical_position_options
from megatron.utils.errors import FarfieldError, RunError, UserError


@dataclass(frozen=True)
class ResumePlan:
    """What a run starts from."""

    checkpoint: Path | None = None
    """None: fresh weights."""
    weights_only: bool = False
    """Finetuning: the weights of `checkpoint`, everything else fresh."""
    progress: TrainerState = field(default_factory=TrainerState)
    notes: tuple[str, ...] = ()
    """Lines worth telling."""
    superseded: tuple[Path, ...] = ()
    """Later checkpoints in the run's folder, damaged or gone back behind: `give_up` moves them out of the way."""

    @property
    def resumes(self) -> bool:
        """Does the run go on with every state of the checkpoint?"""
        return self.checkpoint is not None and not self.weights_only


def plan_resume(config: Config, groups: ProcessGroups) -> ResumePlan:
    """Decide what a run starts from, by `load`, `save`, `finetune` and `rollback`, and check that it fits.

    All ranks must call this: each verifies a share of the checkpoint's files.

    Raises:
        UserError: `load` has no checkpoint; `save` has some that this run would not go on from; the checkpoint's model
            is another one (`Config.architecture_keys`), naming the key and both values.
        RunError: the checkpoint that was named is damaged, or all that there are.
    """
    options = config.checkpoint
    # As the first process sees it: the folder's other users may be changing it.
    saved = groups.gather_objects(layout.list_checkpoints(options.save) if options.save is not None else [])[0]
    if options.rollback and (options.load is None or options.finetune):
        raise UserError("rollback: it goes back to the checkpoint that load names, and does not go with finetune")
    if options.load is None:
        layout.refuse_existing_run(options.save, next(reversed(saved), None))
        return ResumePlan()
    if _is_same_folder(options.load, options.save) and not options.finetune and not saved:
        return ResumePlan(notes=(f"load: {options.load} has no checkpoint yet; starting at step 0",))
    if options.finetune and saved:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {saved[-1].name}, but this run would start at step 0; "
            f"choose another folder, or go on from the last with {shlex.quote(f'load={saved[-1]}')}"
        )
    checkpoint, notes = _find_valid_checkpoint(options.load, groups, weights_only=options.finetune)
    own = next((i for i, each in enumerate(saved) if _is_same_folder(each, checkpoint)), None)
    if saved and own is None:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {saved[-1].name}, but this run would go on from "
            f"{checkpoint}; choose another folder, or go on from the last with {shlex.quote(f'load={saved[-1]}')}"
        )
    later = tuple(saved[own + 1 :]) if own is not None else ()
    named = layout.is_checkpoint(options.load)  # else the later ones are those that were found damaged
    if later and named and not options.rollback:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {later[-1].name}, but this run would go on from "
            f"{checkpoint}; choose another folder, go on from the last with "
            f"{shlex.quote(f'load={options.save}')}, or give up the later "
            "ones with rollback=true (they are moved aside)"
        )
    check_architecture(config, checkpoint, finetune=options.finetune)
    if options.finetune:
        notes += (f"weights of {checkpoint}; optimizer, data and step begin anew",)
        return ResumePlan(checkpoint, True, notes=notes)
    if not (checkpoint / manifest.STATES).is_dir() and not _is_legacy(checkpoint):
        raise UserError(
            f"load: {checkpoint} holds weights alone (it was imported), so there is no training to go on with; take "
            "the weights with finetune=true"
        )
    progress = TrainerState.read(checkpoint)
    which = "" if named else ", the newest whole checkpoint"
    notes += (f"resuming from {checkpoint} at step {progress.step}{which}", *_describe_changes(config, checkpoint))
    before = f"{progress.sizes}, ZeRO {progress.zero_stage}"
    now = f"{groups.mesh.sizes}, ZeRO {config.training.zero_optimization.stage}"
    if before != now:
        notes += (f"layout: {before} until here, {now} from here on",)
    return ResumePlan(checkpoint, False, progress, notes, later)


def _is_same_folder(one: str | Path, other: str | Path | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _find_valid_checkpoint(load: str, groups: ProcessGroups, *, weights_only: bool) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint that `load` names or, of a run, the newest whose files are as they were written; what to say."""
    try:
        newest = layout.resolve_checkpoint_path(load)
    except UserError as error:
        raise UserError(f"load: {error}") from None
    named = layout.is_checkpoint(load)
    candidates = groups.gather_objects(
        [newest] if named else layout.list_checkpoints(layout.find_run_folder(load))[::-1]
    )[0]
    notes: tuple[str, ...] = ()
    problems: list[str] = []
    for checkpoint in candidates:
        problem = manifest.find_damage(
            checkpoint, manifest.MODEL_FILES if weights_only else None, rank=groups.rank, world_size=groups.world_size
        )
        if (problem := groups.find_first_error(problem)) is None:
            if not manifest.has_checksums(checkpoint):
                notes += (f"{checkpoint}: carries no checksums (an earlier version wrote it): taken unverified",)
            return checkpoint, notes
        if named:
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


def check_architecture(config: Config, checkpoint: Path, *, finetune: bool = False) -> None:
    """Refuse a checkpoint of another model.

    Finetuning may change what no weight's shape depends on, give every layer position parameters of its own, take
    another encoding or other options of it that it names itself (`changes.py`), and add a score processor
    (`load_model_weights` sees to it that it has no effect at first).

    Raises:
        UserError: naming the first key that differs and both values.
    """
    stored = load_checkpoint_config(checkpoint)
    new = {**config.architecture_keys(), **canonical_position_options(config.position)}
    old = {**stored.architecture_keys(), **canonical_position_options(stored.position)}
    free: set[str] = set()
    if finetune:
        free.update(config.keys_by_policy("context"), weight_changes.is_finetune_change(config, stored))
        if new["pos_emb_per_layer"]:
            free.add("pos_emb_per_layer")
        if old.get("score_processor") == "none":
            free.update(("score_processor", "score_processor_options"))
    for key in sorted(set(new) | set(old)):
        if key in free:
            continue
        if new.get(key) != old.get(key):
            what = "finetuning cannot change this" if finetune else "a run cannot change its model"
            if finetune and key in ("pos_emb", "pos_emb_options") and key not in config.position.model_fields_set:
                what = "it may be another one if you name it"
            raise UserError(
                f"{key}: this run has {format_value(new.get(key))}, but {checkpoint} was trained with "
                f"{format_value(old.get(key))}; {what}"
            )


def check_vocabulary(resume: ResumePlan, size: int, name: str, task: str | None) -> None:
    """Refuse data of another tokenizer, or another task, than the checkpoint's. Raises UserError."""
    if resume.checkpoint is None:
        return
    stored = TrainerState.read(resume.checkpoint).vocabulary
    if stored is not None and stored != {"size": size, "name": name}:
        before = load_checkpoint_config(resume.checkpoint).data.task
        one_of_each = (task is None) != (before is None)
        keys = "train_data_paths, task" if one_of_each else "train_data_paths" if task is None else "task"
        raise UserError(
            f"{keys}: the data have the vocabulary {name} ({size} tokens), but {resume.checkpoint} was trained with "
            f"the "
            f"vocabulary {stored.get('name')} ({stored.get('size')} tokens)"
        )


def _describe_changes(config: Config, checkpoint: Path) -> list[str]:
    """Changes that are allowed but make the run differ from an uninterrupted one."""
    stored = load_checkpoint_config(checkpoint)
    new, old = (
        config.keys_by_policy("data", "numerics", "schedule"),
        stored.keys_by_policy("data", "numerics", "schedule"),
    )
    notes = [
        f"{key}: {format_value(old[key])} until here, {format_value(new[key])} from here on"
        for key in new
        if new[key] != old[key]
    ]
    new, old = config.keys_by_policy("initialization"), stored.keys_by_policy("initialization")
    return notes + [
        f"{key}: {format_value(new[key])} has no effect: the weights come from {checkpoint}"
        for key in new
        if new[key] != old[key]
    ]


def load_model_weights(resume: ResumePlan, config: Config, model: Any) -> tuple[str, ...]:
    """Finetuning: copy the weights of the checkpoint into a model that no engine has yet.

    It computes the same then, but for an encoding that was chosen anew. Returns lines worth telling.

    Raises:
        UserError: the model has a score processor with an effect, which the checkpoint's has not.
    """
    assert resume.checkpoint is not None
    stored, path = load_checkpoint_config(resume.checkpoint), resume.checkpoint / layout.WEIGHTS
    processor = config.position.score_processor
    if processor != "none" and stored.position.score_processor == "none" and not list_dispensable_weights(model):
        raise UserError(
            f"score_processor: {resume.checkpoint} was trained without one; {processor} may be added with "
            "score_processor_options zero_init: true (and residual_bias: true), so that it has no effect at first"
        )
    found = weight_changes.find_weight_changes(model, config, stored, read_shapes(path), model.off_stage_prefixes)
    read_weights(
        model,
        path,
        tensor=model.groups.mesh.tensor,
        off_stage_prefixes=model.off_stage_prefixes,
        initialized=found.initialized,
        unused=found.unused,
        aliases=map_to_shared_names(model),
    )
    before, now = (
        {**each.position.model_dump(), **canonical_position_options(each.position)} for each in (stored, config)
    )
    unchanged = all(before[key] == now[key] for key in weight_changes.ENCODING_KEYS) and not (
        found.initialized or found.unused
    )
    return () if unchanged else (found.describe(config, stored),)


def check_engine_layout(resume: ResumePlan, config: Config, sizes: ParallelSizes) -> None:
    """Refuse an engine that the states of an old checkpoint cannot be loaded into, before anything is built.

    Raises:
        UserError: naming the key and both values.
    """
    if resume.checkpoint is not None and resume.resumes and _is_legacy(resume.checkpoint):
        legacy.check_legacy_engine(resume.checkpoint, resume.progress, config, sizes)


def _is_legacy(checkpoint: Path) -> bool:
    return (checkpoint / legacy.DEEPSPEED_FOLDER).is_dir()


def restore_engine(resume: ResumePlan, engine: Any, groups: ProcessGroups) -> None:
    """Put the states of a checkpoint back into a fresh DeepSpeed engine; random states come last (`restore_random`).

    All ranks must call this. Raises RunError if the files are missing or damaged: a run never goes on from less.
    """
    from megatron.checkpoint import optimizer_shards

    checkpoint, progress, error = resume.checkpoint, resume.progress, None
    assert checkpoint is not None
    old = _is_legacy(checkpoint)
    try:
        if old:
            legacy.restore_legacy_engine(checkpoint, progress, engine)
        else:
            sharded_state.restore_optimizer_states(engine, checkpoint, groups.mesh, progress.sizes)
    except FarfieldError as failure:
        error = str(failure)
    if (error := groups.find_first_error(error)) is not None:
        raise RunError(error)
    if not old:
        optimizer_shards.sync_model_weights(engine)
        engine_state.restore_engine_counts(engine, progress.counts or {}, progress.step)


def restore_rng(resume: ResumePlan, groups: ProcessGroups) -> tuple[str, ...]:
    """Put this rank's random states back: the last thing before the first step. Returns lines worth telling."""
    checkpoint, progress = resume.checkpoint, resume.progress
    assert checkpoint is not None
    error, fresh = None, False
    try:
        if not _is_legacy(checkpoint):
            found = sharded_state.read_rng_state(checkpoint, groups.mesh, progress.sizes)
            fresh = found is None
            if found is not None:
                rng_state.restore_rng_state(found)
        elif groups.rank < progress.world:
            legacy.restore_legacy_rng(checkpoint, groups.rank)
        else:
            fresh = True
    except FarfieldError as failure:
        error = str(failure)
    told = groups.gather_objects((error, fresh))
    if (error := next((each for each, _ in told if each is not None), None)) is not None:
        raise RunError(error)
    if any(fresh for _, fresh in told):
        before = "1 process" if progress.world == 1 else f"{progress.world} processes"
        return (f"random states: the checkpoint is of {before}; those that read more sequences begin with fresh ones",)
    return ()

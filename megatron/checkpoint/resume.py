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

from megatron.checkpoint import changes, counters, folder, legacy, manifest, random_states, states
from megatron.checkpoint.progress import Progress
from megatron.checkpoint.stored import config_of
from megatron.checkpoint.weights import read_weights, shapes_in
from megatron.config.schema import Config
from megatron.config.settings import show
from megatron.distributed.mesh import Sizes
from megatron.distributed.processes import Processes
from megatron.errors import FarfieldError, RunError, UserError
from megatron.model.parameter_groups import list_dispensable_weights, map_to_shared_names
from megatron.model.position_modules import canonical_position_options


@dataclass(frozen=True)
class Start:
    """What a run starts from."""

    checkpoint: Path | None = None
    """None: fresh weights."""
    weights_only: bool = False
    """Finetuning: the weights of `checkpoint`, everything else fresh."""
    progress: Progress = field(default_factory=Progress)
    notes: tuple[str, ...] = ()
    """Lines worth telling."""
    abandoned: tuple[Path, ...] = ()
    """Later checkpoints in the run's folder, damaged or gone back behind: `give_up` moves them out of the way."""

    @property
    def resumes(self) -> bool:
        """Does the run go on with every state of the checkpoint?"""
        return self.checkpoint is not None and not self.weights_only


def find_start(config: Config, processes: Processes) -> Start:
    """Decide what a run starts from, by `load`, `save`, `finetune` and `rollback`, and check that it fits.

    All ranks must call this: each verifies a share of the checkpoint's files.

    Raises:
        UserError: `load` has no checkpoint; `save` has some that this run would not go on from; the checkpoint's model
            is another one (`Config.architecture`), naming the key and both values.
        RunError: the checkpoint that was named is damaged, or all that there are.
    """
    options = config.checkpoint
    # As the first process sees it: the folder's other users may be changing it.
    saved = processes.gather(folder.checkpoints(options.save) if options.save is not None else [])[0]
    if options.rollback and (options.load is None or options.finetune):
        raise UserError("rollback: it goes back to the checkpoint that load names, and does not go with finetune")
    if options.load is None:
        folder.refuse_to_mix(options.save, next(reversed(saved), None))
        return Start()
    if _same(options.load, options.save) and not options.finetune and not saved:
        return Start(notes=(f"load: {options.load} has no checkpoint yet; starting at step 0",))
    if options.finetune and saved:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {saved[-1].name}, but this run would start at step 0; "
            f"choose another folder, or go on from the last with {shlex.quote(f'load={saved[-1]}')}"
        )
    checkpoint, notes = _whole(options.load, processes, weights_only=options.finetune)
    own = next((i for i, each in enumerate(saved) if _same(each, checkpoint)), None)
    if saved and own is None:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {saved[-1].name}, but this run would go on from "
            f"{checkpoint}; choose another folder, or go on from the last with {shlex.quote(f'load={saved[-1]}')}"
        )
    later = tuple(saved[own + 1 :]) if own is not None else ()
    named = folder.is_checkpoint(options.load)  # else the later ones are those that were found damaged
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
        return Start(checkpoint, True, notes=notes)
    if not (checkpoint / manifest.STATES).is_dir() and not _is_old(checkpoint):
        raise UserError(
            f"load: {checkpoint} holds weights alone (it was imported), so there is no training to go on with; take "
            "the weights with finetune=true"
        )
    progress = Progress.read(checkpoint)
    which = "" if named else ", the newest whole checkpoint"
    notes += (f"resuming from {checkpoint} at step {progress.step}{which}", *_notes(config, checkpoint))
    before = f"{progress.sizes}, ZeRO {progress.zero_stage}"
    now = f"{processes.mesh.sizes}, ZeRO {config.training.zero_optimization.stage}"
    if before != now:
        notes += (f"layout: {before} until here, {now} from here on",)
    return Start(checkpoint, False, progress, notes, later)


def _same(one: str | Path, other: str | Path | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _whole(load: str, processes: Processes, *, weights_only: bool) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint that `load` names or, of a run, the newest whose files are as they were written; what to say."""
    try:
        newest = folder.resolve(load)
    except UserError as error:
        raise UserError(f"load: {error}") from None
    named = folder.is_checkpoint(load)
    candidates = processes.gather([newest] if named else folder.checkpoints(folder.run_of(load))[::-1])[0]
    notes: tuple[str, ...] = ()
    problems: list[str] = []
    for checkpoint in candidates:
        problem = manifest.damage(
            checkpoint, manifest.MODEL_FILES if weights_only else None, rank=processes.rank, world=processes.world
        )
        if (problem := processes.agree(problem)) is None:
            if not manifest.has_checksums(checkpoint):
                notes += (f"{checkpoint}: carries no checksums (an earlier version wrote it): taken unverified",)
            return checkpoint, notes
        if named:
            raise RunError(f"load: {checkpoint}: is damaged: {problem}; name another checkpoint")
        problems.append(f"{checkpoint.name}: {problem}")
        notes += (f"{checkpoint}: is damaged, and passed over: {problem}",)
    raise RunError(f"load: {load}: no checkpoint in it is whole: {'; '.join(problems)}; {manifest.ANEW}")


def give_up(start: Start, metrics: Path) -> tuple[str, ...]:
    """Move the checkpoints that the run goes back behind out of its way. For the first process. Returns lines to tell.

    Args:
        start: what the run starts from.
        metrics: the run's records, which are about to lose the steps after `start`; a copy goes with the checkpoints.

    Raises RunError: the disk refuses.
    """
    if not start.abandoned:
        return ()
    try:
        aside = folder.abandon(start.abandoned, [metrics])
    except OSError as error:
        raise RunError(f"{start.abandoned[-1]}: cannot be moved aside: {error.strerror or error}") from None
    names = ", ".join(path.name for path in start.abandoned)
    return (f"{names}: moved to {aside}, with the metrics until now; this run goes on before them",)


def check_architecture(config: Config, checkpoint: Path, *, finetune: bool = False) -> None:
    """Refuse a checkpoint of another model.

    Finetuning may change what no weight's shape depends on, give every layer position parameters of its own, take
    another encoding or other options of it that it names itself (`changes.py`), and add a score processor
    (`load_weights` sees to it that it has no effect at first).

    Raises:
        UserError: naming the first key that differs and both values.
    """
    stored = config_of(checkpoint)
    new = {**config.architecture(), **canonical_position_options(config.position)}
    old = {**stored.architecture(), **canonical_position_options(stored.position)}
    free: set[str] = set()
    if finetune:
        free.update(config.of_role("context"), changes.asked(config, stored))
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
                f"{key}: this run has {show(new.get(key))}, but {checkpoint} was trained with "
                f"{show(old.get(key))}; {what}"
            )


def check_vocabulary(start: Start, size: int, name: str, task: str | None) -> None:
    """Refuse data of another tokenizer, or another task, than the checkpoint's. Raises UserError."""
    if start.checkpoint is None:
        return
    stored = Progress.read(start.checkpoint).vocabulary
    if stored is not None and stored != {"size": size, "name": name}:
        before = config_of(start.checkpoint).data.task
        one_of_each = (task is None) != (before is None)
        keys = "train_data_paths, task" if one_of_each else "train_data_paths" if task is None else "task"
        raise UserError(
            f"{keys}: the data have the vocabulary {name} ({size} tokens), but {start.checkpoint} was trained with the "
            f"vocabulary {stored.get('name')} ({stored.get('size')} tokens)"
        )


def _notes(config: Config, checkpoint: Path) -> list[str]:
    """Changes that are allowed but make the run differ from an uninterrupted one."""
    stored = config_of(checkpoint)
    new, old = config.of_role("data", "numerics", "schedule"), stored.of_role("data", "numerics", "schedule")
    notes = [
        f"{key}: {show(old[key])} until here, {show(new[key])} from here on" for key in new if new[key] != old[key]
    ]
    new, old = config.of_role("initialization"), stored.of_role("initialization")
    return notes + [
        f"{key}: {show(new[key])} has no effect: the weights come from {checkpoint}"
        for key in new
        if new[key] != old[key]
    ]


def load_weights(start: Start, config: Config, model: Any) -> tuple[str, ...]:
    """Finetuning: copy the weights of the checkpoint into a model that no engine has yet.

    It computes the same then, but for an encoding that was chosen anew. Returns lines worth telling.

    Raises:
        UserError: the model has a score processor with an effect, which the checkpoint's has not.
    """
    assert start.checkpoint is not None
    stored, path = config_of(start.checkpoint), start.checkpoint / folder.WEIGHTS
    processor = config.position.score_processor
    if processor != "none" and stored.position.score_processor == "none" and not list_dispensable_weights(model):
        raise UserError(
            f"score_processor: {start.checkpoint} was trained without one; {processor} may be added with "
            "score_processor_options zero_init: true (and residual_bias: true), so that it has no effect at first"
        )
    found = changes.changes(model, config, stored, shapes_in(path), model.off_stage_prefixes)
    read_weights(
        model,
        path,
        tensor=model.groups.mesh.tensor,
        elsewhere=model.off_stage_prefixes,
        fresh=found.fresh,
        dropped=found.dropped,
        stand_ins=map_to_shared_names(model),
    )
    before, now = (
        {**each.position.model_dump(), **canonical_position_options(each.position)} for each in (stored, config)
    )
    unchanged = all(before[key] == now[key] for key in changes.ENCODING) and not (found.fresh or found.dropped)
    return () if unchanged else (found.told(config, stored),)


def check_engine(start: Start, config: Config, sizes: Sizes) -> None:
    """Refuse an engine that the states of an old checkpoint cannot be loaded into, before anything is built.

    Raises:
        UserError: naming the key and both values.
    """
    if start.checkpoint is not None and start.resumes and _is_old(start.checkpoint):
        legacy.check_engine(start.checkpoint, start.progress, config, sizes)


def _is_old(checkpoint: Path) -> bool:
    return (checkpoint / legacy.DEEPSPEED).is_dir()


def restore(start: Start, engine: Any, processes: Processes) -> None:
    """Put the states of a checkpoint back into a fresh DeepSpeed engine; random states come last (`restore_random`).

    All ranks must call this. Raises RunError if the files are missing or damaged: a run never goes on from less.
    """
    from megatron.checkpoint import fragments

    checkpoint, progress, error = start.checkpoint, start.progress, None
    assert checkpoint is not None
    old = _is_old(checkpoint)
    try:
        if old:
            legacy.restore(checkpoint, progress, engine)
        else:
            states.restore(engine, checkpoint, processes.mesh, progress.sizes)
    except FarfieldError as failure:
        error = str(failure)
    if (error := processes.agree(error)) is not None:
        raise RunError(error)
    if not old:
        fragments.renew_copies(engine)
        counters.restore(engine, progress.counts or {}, progress.step)


def restore_random(start: Start, processes: Processes) -> tuple[str, ...]:
    """Put this rank's random states back: the last thing before the first step. Returns lines worth telling."""
    checkpoint, progress = start.checkpoint, start.progress
    assert checkpoint is not None
    error, fresh = None, False
    try:
        if not _is_old(checkpoint):
            found = states.random_of(checkpoint, processes.mesh, progress.sizes)
            fresh = found is None
            if found is not None:
                random_states.restore(found)
        elif processes.rank < progress.world:
            legacy.restore_random(checkpoint, processes.rank)
        else:
            fresh = True
    except FarfieldError as failure:
        error = str(failure)
    told = processes.gather((error, fresh))
    if (error := next((each for each, _ in told if each is not None), None)) is not None:
        raise RunError(error)
    if any(fresh for _, fresh in told):
        before = "1 process" if progress.world == 1 else f"{progress.world} processes"
        return (f"random states: the checkpoint is of {before}; those that read more sequences begin with fresh ones",)
    return ()

"""Continuing a run: what to start from, whether it is whole and fits, and putting every state back.

A run goes on bit for bit as if it had not stopped: weights, masters, optimizer states and loss scale (DeepSpeed's
files), random states, and the place in the data. It goes on from the newest checkpoint whose files are what was
written; one that is damaged is named and put aside. What would silently make it another run is refused, naming the key.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint import folder, manifest, random_states
from megatron.checkpoint.progress import Progress
from megatron.checkpoint.save import DEEPSPEED
from megatron.checkpoint.stored import config_of
from megatron.checkpoint.weights import read_weights
from megatron.config.schema import Config
from megatron.config.settings import show
from megatron.errors import FarfieldError, RunError, UserError
from megatron.model.identity import settled
from megatron.model.parameters import dispensable, shared_names
from megatron.parallel.mesh import Sizes
from megatron.parallel.processes import Processes


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
        if saved:
            raise UserError(
                f"save: {options.save} holds checkpoints already (the last is {saved[-1].name}); "
                f"add load={options.save} to go on from there, or choose another folder"
            )
        return Start()
    if _same(options.load, options.save) and not options.finetune and not saved:
        return Start(notes=(f"load: {options.load} has no checkpoint yet; starting at step 0",))
    if options.finetune and saved:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {saved[-1].name}, but this run would start at step 0; "
            f"choose another folder, or go on from the last with load={saved[-1]}"
        )
    checkpoint, notes = _whole(options.load, processes, weights_only=options.finetune)
    own = next((i for i, each in enumerate(saved) if _same(each, checkpoint)), None)
    if saved and own is None:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {saved[-1].name}, but this run would go on from "
            f"{checkpoint}; choose another folder, or go on from the last with load={saved[-1]}"
        )
    later = tuple(saved[own + 1 :]) if own is not None else ()
    named = folder.is_checkpoint(options.load)  # else the later ones are those that were found damaged
    if later and named and not options.rollback:
        raise UserError(
            f"save: {options.save} holds checkpoints up to {later[-1].name}, but this run would go on from "
            f"{checkpoint}; choose another folder, go on from the last with load={options.save}, or give up the later "
            "ones with rollback=true (they are moved aside)"
        )
    check_architecture(config, checkpoint, finetune=options.finetune)
    if options.finetune:
        notes += (f"weights of {checkpoint}; optimizer, data and step begin anew",)
        return Start(checkpoint, True, notes=notes)
    progress = Progress.read(checkpoint)
    which = "" if named else ", the newest whole checkpoint"
    notes += (f"resuming from {checkpoint} at step {progress.step}{which}", *_notes(config, checkpoint))
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

    Finetuning may change what no weight's shape depends on, give every layer position parameters of its own, and add a
    score processor (`load_weights` sees to it that it has no effect at first).

    Raises:
        UserError: naming the first key that differs and both values.
    """
    stored = config_of(checkpoint)
    new = {**config.architecture(), **settled(config.position)}
    old = {**stored.architecture(), **settled(stored.position)}
    free: set[str] = set()
    if finetune:
        free.update(config.of_role("context"))
        if new["pos_emb_per_layer"]:
            free.add("pos_emb_per_layer")
        if old.get("score_processor") == "none":
            free.update(("score_processor", "score_processor_options"))
    for key in sorted(set(new) | set(old)):
        if key in free:
            continue
        if new.get(key) != old.get(key):
            what = "finetuning cannot change this" if finetune else "a run cannot change its model"
            raise UserError(
                f"{key}: this run has {show(new.get(key))}, but {checkpoint} was trained with "
                f"{show(old.get(key))}; {what}"
            )


def check_vocabulary(start: Start, size: int, name: str) -> None:
    """Refuse data made by another tokenizer than the checkpoint's. Raises UserError."""
    if start.checkpoint is None:
        return
    stored = Progress.read(start.checkpoint).vocabulary
    if stored is not None and stored != {"size": size, "name": name}:
        raise UserError(
            f"train_data_paths: the data were made by tokenizer {name} ({size} tokens), but {start.checkpoint} was "
            f"trained on {stored.get('name')} ({stored.get('size')} tokens)"
        )


def _notes(config: Config, checkpoint: Path) -> list[str]:
    """Changes that are allowed but make the run differ from an uninterrupted one."""
    stored = config_of(checkpoint)
    new, old = config.of_role("data", "numerics", "schedule"), stored.of_role("data", "numerics", "schedule")
    notes = [f"{key}: {old[key]!r} until here, {new[key]!r} from here on" for key in new if new[key] != old[key]]
    new, old = config.of_role("initialization"), stored.of_role("initialization")
    return notes + [
        f"{key}: {new[key]!r} has no effect: the weights come from {checkpoint}" for key in new if new[key] != old[key]
    ]


def load_weights(start: Start, config: Config, model: Any) -> None:
    """Finetuning: copy the weights of the checkpoint into a model that no engine has yet, and that computes the same.

    Raises:
        UserError: the model has a score processor with an effect, which the checkpoint's has not.
    """
    assert start.checkpoint is not None
    optional = dispensable(model)
    processor = config.position.score_processor
    added = processor != "none" and config_of(start.checkpoint).position.score_processor == "none"
    if added and not optional:
        raise UserError(
            f"score_processor: {start.checkpoint} was trained without one; {processor} may be added with "
            "score_processor_options zero_init: true (and residual_bias: true), so that it has no effect at first"
        )
    read_weights(
        model,
        start.checkpoint / folder.WEIGHTS,
        tensor=model.processes.mesh.tensor,
        elsewhere=model.elsewhere,
        dispensable=optional if added else (),
        stand_ins=shared_names(model),
    )


def check_engine(start: Start, config: Config, sizes: Sizes) -> None:
    """Refuse what DeepSpeed's files cannot be loaded into, before anything is built.

    Each of the ranks that hold a model together stores its own part, so their numbers must stay. ZeRO 1–3 store one
    part of the optimizer states for each rank that divides the batch (data × context), so that number must stay too;
    without ZeRO it may change. Stages 1 and 2 store the same parts, except that stage 1 in bfloat16 has another
    optimizer where it accumulates gradients on the device. Stage 3 stores a part for each of its sub-groups.

    Raises:
        UserError: naming the key and both values.
    """
    if start.checkpoint is None or not start.resumes:
        return
    progress, before, now = start.progress, config_of(start.checkpoint).training, config.training
    stage, precision = now.zero_optimization.stage, now.compute_type
    same_parts = {progress.zero_stage, stage} == {1, 2} and precision != "bf16"
    was, steps = before.gradient_accumulation_steps, now.gradient_accumulation_steps
    old_zero, new_zero = before.zero_optimization, now.zero_optimization
    old_device, new_device = old_zero.offload_optimizer.device, new_zero.offload_optimizer.device
    accumulates, accumulated = steps > 1 and new_device == "none", was > 1 and old_device == "none"
    same_optimizer = stage != 1 or precision != "bf16" or accumulates == accumulated
    same_groups = stage != 3 or old_zero.sub_group_size == new_zero.sub_group_size
    for key, old, new, fits in (
        ("precision", progress.precision, precision, progress.precision == precision),
        ("zero_optimization.stage", progress.zero_stage, stage, progress.zero_stage == stage or same_parts),
        ("model_parallel_size", progress.tensor, sizes.tensor, progress.tensor == sizes.tensor),
        ("pipe_parallel_size", progress.pipeline, sizes.pipeline, progress.pipeline == sizes.pipeline),
        ("num_gpus", progress.world, sizes.world, progress.world == sizes.world or stage == 0),
        ("gradient_accumulation_steps", was, steps, same_optimizer or (was > 1) == (steps > 1)),
        ("zero_optimization.offload_optimizer.device", old_device, new_device, same_optimizer),
        ("zero_optimization.sub_group_size", old_zero.sub_group_size, new_zero.sub_group_size, same_groups),
    ):
        if not fits:
            raise UserError(
                f"{key}: {start.checkpoint} was written with {old}, this run has {new}; its optimizer states cannot be "
                "divided anew: go on as before, or take the weights alone (finetune=true)"
            )


def restore(start: Start, engine: Any, processes: Processes) -> None:
    """Put the states of a checkpoint back into a fresh DeepSpeed engine; random states come last (`restore_random`).

    All ranks must call this. Raises RunError if the files are missing or damaged: a run never goes on from less.
    """
    from megatron.checkpoint.deepspeed_files import safe_files  # DeepSpeed: only once its device is chosen

    checkpoint = start.checkpoint
    assert checkpoint is not None
    states, error = checkpoint / DEEPSPEED, None
    try:
        with safe_files(engine):
            engine.load_checkpoint(
                str(checkpoint), tag=DEEPSPEED, load_optimizer_states=True, load_lr_scheduler_states=False
            )
        if engine.global_steps != start.progress.step:
            error = (
                f"{states}: holds the states of step {engine.global_steps}, but progress.json is of step "
                f"{start.progress.step}; the files are not of one checkpoint"
            )
    except FarfieldError as failure:
        error = str(failure)
    except AssertionError as failure:
        what = "DeepSpeed finds none of its files there" if not any(states.glob("*.pt")) else _first_line(failure)
        error = f"{states}: cannot be loaded: {what}"
    except Exception as failure:  # states of another kind fail in as many ways as DeepSpeed has optimizers
        error = f"{states}: cannot be loaded: {_first_line(failure)}"
    if (error := processes.agree(error)) is not None:
        raise RunError(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'its files do not fit this run').splitlines()[0]}"


def restore_random(start: Start, processes: Processes) -> tuple[str, ...]:
    """Put this rank's random states back: the last thing before the first step. Returns lines worth telling."""
    assert start.checkpoint is not None
    before, error = start.progress.world, None
    if processes.rank < before:
        try:
            random_states.read(start.checkpoint, processes.rank)
        except RunError as failure:
            error = str(failure)
    if (error := processes.agree(error)) is not None:
        raise RunError(error)
    if processes.world > before:
        return (f"random states: the checkpoint is of {before} processes; the new ones begin with fresh ones",)
    return ()

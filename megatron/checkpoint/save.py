"""Writing a checkpoint: whole under a temporary name, then renamed, then `latest` points to it.

    step_0000500/
        model.safetensors     float32 weights, all of them (weights.py)
        config.yml            the resolved configuration; with it and the weights a model is rebuilt
        progress.json         how far the run was
        deepspeed/            DeepSpeed's files: optimizer states, masters, loss scale
        random_states/        one file per rank

Only the last three are read to resume, only the first three to evaluate.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import folder, random_states
from megatron.checkpoint.disk import reason
from megatron.checkpoint.progress import Progress
from megatron.checkpoint.weights import full_weights, write_weights
from megatron.config.schema import Config
from megatron.errors import FarfieldError, RunError

DEEPSPEED = "deepspeed"
Agree = Callable[[str | None], str | None]


def save_checkpoint(
    run: str | Path, engine: Any, config: Config, progress: Progress, *, rank: int, agree: Agree, keep: int | None
) -> Path:
    """Write the checkpoint of `progress.step` into a run's folder and delete those beyond the newest `keep`.

    All ranks must call this.

    Args:
        run: the run's folder.
        engine: DeepSpeed's.
        config: the resolved configuration.
        progress: how far the run is.
        rank: this process; 0 writes what all share.
        agree: tells every rank the first error that any of them has (`Processes.agree`).
        keep: checkpoints to keep; None keeps all.

    Returns:
        The checkpoint's folder. One that is there already for this step is left as it is.

    Raises:
        RunError: the disk refuses, or a weight is not finite. Nothing is left behind, and earlier checkpoints stay.
    """
    final = Path(run) / folder.CHECKPOINTS / folder.name(progress.step)
    temporary = final.with_name(f".{final.name}.tmp")
    there = (final / folder.PROGRESS).is_file()
    if agree("there" if there else None):
        return final

    def together(work: Callable[[], None]) -> None:
        """Do one part of the work; if any rank fails, all stop here."""
        error = None
        try:
            work()
        except (OSError, RuntimeError, FarfieldError) as failure:
            error = reason(failure)
        if (error := agree(error)) is not None:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(f"{final}: not saved: {error}; {_intact(run)}")

    def make_folder() -> None:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    def write_states() -> None:
        from megatron.checkpoint.deepspeed_files import safe_files  # DeepSpeed: only once its device is chosen

        with safe_files(engine) as files:
            engine.save_checkpoint(str(temporary), tag=DEEPSPEED, save_latest=False)
        if files.error is not None:
            raise OSError(files.error)

    def write_rest() -> None:
        weights = full_weights(engine, keep=rank == 0)
        random_states.write(temporary, rank)
        if weights is None:
            return
        for name, weight in weights.items():
            if not bool(torch.isfinite(weight).all()):
                raise RunError(f"{name} is not finite")
        write_weights(weights, temporary / folder.WEIGHTS, {"step": str(progress.step)})
        config.save(temporary / folder.CONFIG)
        progress.write(temporary)

    def publish() -> None:
        if rank == 0:
            os.replace(temporary, final)
            folder.point_to(final)
            folder.prune(run, keep)

    for work in (make_folder, write_states, write_rest, publish):
        together(work)
    return final


def _intact(run: str | Path) -> str:
    """What is still there, in words."""
    try:
        last = folder.latest(run)
    except RunError as error:
        return str(error)
    return f"the last good checkpoint is {last}" if last is not None else "the run has no checkpoint yet"

"""Writing a checkpoint: whole and on the disk under a temporary name, then renamed.

    step_0000500/
        model.safetensors     float32 weights, all of them (weights.py)
        config.yml            the resolved configuration; with it and the weights a model is rebuilt
        progress.json         how far the run was
        deepspeed/            DeepSpeed's files: optimizer states, masters, loss scale
        random_states/        one file per rank
        manifest.json         sizes and checksums of all of these, written last (manifest.py)

Evaluation reads the first three only, resuming all but the first.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import folder, manifest, parts, random_states
from megatron.checkpoint.manifest import Entry
from megatron.checkpoint.progress import Progress
from megatron.checkpoint.weights import held_weights, write_weights
from megatron.config.schema import Config
from megatron.errors import FarfieldError, RunError, reason
from megatron.parallel.processes import Processes

DEEPSPEED = "deepspeed"


def save_checkpoint(run: str | Path, engine: Any, config: Config, progress: Progress, *, processes: Processes) -> Path:
    """Write the checkpoint of `progress.step` into a run's folder and delete those that are not to be kept.

    All ranks must call this.

    Args:
        run: the run's folder; it has no checkpoint of this step.
        engine: DeepSpeed's.
        config: the resolved configuration; it says how many checkpoints are kept.
        progress: how far the run is.
        processes: this one and all others; the first writes what all share.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: the disk refuses, or a weight is not finite. Nothing is left behind, and earlier checkpoints stay.
    """
    final = Path(run) / folder.CHECKPOINTS / folder.name(progress.step)
    temporary = final.with_name(f".{final.name}.tmp")
    written: list[Path] = []  # by this process
    entries: dict[str, Entry] = {}
    weights: dict[str, Tensor] = {}  # all of them, on the first process
    mesh = processes.mesh
    shared = mesh.tensor.size * mesh.pipeline.size > 1

    def together(work: Callable[[], None]) -> None:
        """Do one part of the work; if any rank fails, all stop here."""
        error = None
        try:
            work()
        except (OSError, RuntimeError, FarfieldError) as failure:
            error = reason(failure)
        if (error := processes.agree(error)) is not None:
            if processes.first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(f"{final}: not saved: {error}; {_intact(run)}")

    def make_folder() -> None:
        if processes.first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    def write_states() -> None:
        from megatron.checkpoint.deepspeed_files import safe_files  # DeepSpeed: only once its device is chosen

        with safe_files(engine) as files:
            engine.save_checkpoint(str(temporary), tag=DEEPSPEED, save_latest=False)
        if files.error is not None:
            raise OSError(files.error)
        written.extend(files.paths)

    def write_parts() -> None:
        held = held_weights(engine, keep=parts.holds(mesh)) or {}
        written.append(random_states.write(temporary, processes.rank))
        for name, weight in held.items():
            if not bool(torch.isfinite(weight).all()):
                raise RunError(f"{name} is not finite")
        if shared and held:
            parts.write(temporary, held, engine.module, mesh)
        weights.update(held if processes.first else {})

    def write_rest() -> None:
        if not processes.first:
            return
        if shared:
            weights.update(parts.joined(temporary, mesh))
            shutil.rmtree(temporary / parts.FOLDER)
        write_weights(weights, temporary / folder.WEIGHTS, {"step": str(progress.step)})
        config.save(temporary / folder.CONFIG)
        progress.write(temporary)
        written.extend(temporary / name for name in manifest.MODEL_FILES)

    def seal() -> None:
        entries.update(manifest.seal(temporary, written))

    def publish() -> None:
        if processes.first:
            manifest.write(temporary, {name: entry for part in sealed for name, entry in part.items()})
            os.replace(temporary, final)
            manifest.sync_folder(final.parent)
            folder.prune(run, config.checkpoint.keep_last_n_checkpoints, config.checkpoint.extra_save_iters)

    for work in (make_folder, write_states, write_parts, write_rest, seal):
        together(work)
    sealed = processes.gather(entries)
    together(publish)
    return final


def _intact(run: str | Path) -> str:
    """What is still there, in words."""
    last = folder.newest(run)
    return f"the last good checkpoint is {last}" if last is not None else "the run has no checkpoint yet"

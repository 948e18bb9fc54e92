"""Writing a checkpoint while training goes on: whole and on the disk under a temporary name, then renamed.

    step_0000500/
        model.safetensors     float32 weights, all of them (weights.py)
        config.yml            the resolved configuration; with it and the weights a model is rebuilt
        progress.json         how far the run was
        states/               one file per rank: its fragments of Adam's moments, its random states (states.py)
        manifest.json         sizes and checksums of all of these, written last (manifest.py)

Evaluation reads the first three only, resuming all. A save goes through two phases, and training waits for neither:

    writing       every rank copies its states (that is what a save costs) and a thread of its own writes them
    publishing    once all ranks' files are whole, a thread of the first joins the weights, seals and renames

Threads exchange nothing. That a rank has done its part rides on the sum that the loop takes before each step (`done`);
when all have, all call `advance`.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint import folder, manifest, states
from megatron.checkpoint.manifest import Entry
from megatron.checkpoint.progress import Progress
from megatron.checkpoint.states import HostCopies, Snapshot
from megatron.config.schema import Config
from megatron.distributed.processes import Processes
from megatron.errors import FarfieldError, RunError, reason


@dataclass
class _Save:
    """A save that is not finished."""

    final: Path
    progress: Progress
    job: "Future[dict[str, Entry]] | None"
    """What this rank's thread does; None if it has nothing to do."""
    publishing: bool = False

    @property
    def temporary(self) -> Path:
        return self.final.with_name(f".{self.final.name}.tmp")

    def outcome(self) -> tuple[str | None, dict[str, Entry]]:
        """The error that this rank's thread met, and what it wrote. Waits for it."""
        try:
            return None, self.job.result() if self.job is not None else {}
        except (OSError, RuntimeError, FarfieldError) as error:
            return str(error) if isinstance(error, FarfieldError) else reason(error), {}


@dataclass
class Saver:
    """Writes the checkpoints of a run, one at a time. Every rank has one, and all call its methods together."""

    run: Path
    config: Config
    """The resolved configuration; it says how many checkpoints are kept."""
    processes: Processes
    last: Path | None = None
    """The last checkpoint that got its name."""
    _save: _Save | None = None
    _copies: HostCopies = field(default_factory=HostCopies)
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))

    @property
    def pending(self) -> int | None:
        """The step of a save that is not finished, if there is one: the same on all ranks."""
        return None if self._save is None else self._save.progress.step

    @property
    def done(self) -> bool:
        """Has this rank done its part of the pending save's phase?"""
        return self._save is not None and (self._save.job is None or self._save.job.done())

    def begin(self, engine: Any, progress: Progress, say: Callable[[str], None] = lambda line: None) -> None:
        """Copy the states of a run and begin to write them; a save that is not finished is waited for.

        Args:
            engine: DeepSpeed's.
            progress: how far the run is; it has no checkpoint of this step.
            say: gets a line if there was something to wait for.

        Raises:
            RunError: the save before could not be finished.
        """
        if self._save is not None and not self.done:
            say(f"step {progress.step}: waits until the checkpoint of step {self.pending} is written")
        self.finish()
        self._save = save = _Save(self.run / folder.CHECKPOINTS / folder.name(progress.step), progress, None)
        try:
            snapshot = Snapshot(engine, self.processes.mesh, self._copies)
        except (RuntimeError, MemoryError) as error:  # as one rank may run out of memory, and all must hear of it
            save.job = Future()
            save.job.set_exception(RunError(f"its states cannot be copied ({reason(error)})"))
        else:
            save.job = self._threads.submit(snapshot.write, save.temporary)

    def advance(self) -> None:
        """Go on with the pending save, whose phase all ranks have done (or are waited for).

        Raises:
            RunError: the disk refuses, or a weight is not finite. Nothing is left behind, and earlier checkpoints stay.
        """
        save = self._save
        assert save is not None
        told = self.processes.gather(save.outcome())
        error = next((error for error, _ in told if error is not None), None)
        if error is not None:
            self._save = None
            if self.processes.first:
                shutil.rmtree(save.temporary, ignore_errors=True)
            if save.final.is_dir():
                raise RunError(f"{save.final}: saved, but older ones cannot be deleted: {error}")
            raise RunError(f"{save.final}: not saved: {error}; {_intact(self.run)}")
        if save.publishing:
            self.last, self._save = save.final, None
            return
        save.publishing, save.job = True, None
        if self.processes.first:
            entries = {name: entry for _, part in told for name, entry in part.items()}
            save.job = self._threads.submit(self._publish, save, entries)

    def finish(self) -> None:
        """Wait until the pending save has its name. Raises RunError if it cannot be finished."""
        while self._save is not None:
            self.advance()

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._threads.shutdown()

    def _publish(self, save: _Save, entries: dict[str, Entry]) -> dict[str, Entry]:
        where, options = save.temporary, self.config.checkpoint
        weights = states.join_weights(where, self.processes.world, {"step": str(save.progress.step)})
        self.config.save(where / folder.CONFIG)
        save.progress.write(where)
        small = manifest.seal(where, [where / folder.CONFIG, where / folder.PROGRESS])
        manifest.write(where, entries | {folder.WEIGHTS: weights} | small)
        os.replace(where, save.final)
        manifest.sync_folder(save.final.parent)
        folder.prune(self.run, options.keep_last_n_checkpoints, options.extra_save_iters)
        return {}


def _intact(run: Path) -> str:
    """What is still there, in words."""
    last = folder.newest(run)
    return f"the last good checkpoint is {last}" if last is not None else "the run has no checkpoint yet"

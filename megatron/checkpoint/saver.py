"""Asynchronous checkpoint writing: files are synced to disk under a temporary name, then the folder is renamed.

    step_0000500/
        model.safetensors     all float32 weights (weights.py)
        config.yml            resolved configuration; sufficient with the weights to rebuild the model
        progress.json         progress of the run (trainer_state.py)
        states/               one file per rank: its shards of Adam's moments, its random states (sharded_state.py)
        manifest.json         sizes and checksums of all of these, written last (manifest.py)

Evaluation reads only the first three files; resuming reads all. A save has two phases, neither of which blocks
training:

    writing       every rank copies its states (the only cost to training), and a background thread writes the copies
    publishing    once all ranks' files are complete, a thread of the first rank merges the weights, writes the
                  manifest and renames the folder

Threads do not communicate. Each rank reports through the reduction before each step that its part is complete
(`is_done`); once all have, all call `advance`.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout, manifest, sharded_state
from megatron.checkpoint.manifest import FileChecksum
from megatron.checkpoint.run_folder import MissingFolderError
from megatron.checkpoint.sharded_state import NonFiniteWeightError, PinnedStagingBuffers, Snapshot
from megatron.checkpoint.tensor_files import OpenFile, open_plain_file
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.schema import CONFIG_FILE, Config
from megatron.distributed.process_groups import ProcessGroups
from megatron.utils.atomic_io import remove_empty_folders
from megatron.utils.errors import FarfieldError, RunError, describe_cause

Entries = dict[str, FileChecksum]
"""Manifest entries by file name within the checkpoint."""


@dataclass(frozen=True)
class SaveHooks:
    """Hooks that Python callers can set on a process's saves; the defaults make a plain save.

    No configuration key sets them.
    """

    build_staging_buffers: Callable[[], PinnedStagingBuffers] = PinnedStagingBuffers
    """Builds the buffers that a rank's states are copied to."""
    open_file: OpenFile = open_plain_file
    """Opens tensor files for writing."""
    complete: Callable[[Path, int, Entries], Entries] = lambda folder, step, entries: entries
    """Called in the publishing thread of the first process before anything is merged.

    Arguments: the folder, which is not published yet, the step, and the entries of the ranks' files. Returns the
    entries of all state files.
    """
    on_published: Callable[[Path], None] = lambda checkpoint: None
    """Called in the same thread after the checkpoint was renamed."""


@dataclass
class _PendingSave:
    """Unfinished save."""

    final: Path
    state: TrainerState
    job: "Future[Entries] | None"
    """Work of this rank's thread, or None if it has none."""
    publishing: bool = False

    @property
    def temporary(self) -> Path:
        return self.final.with_name(f".{self.final.name}.tmp")

    def get_outcome(self) -> tuple[FarfieldError | None, Entries]:
        """Wait for this rank's thread and return its error, if any, and the entries of the files it wrote."""
        try:
            return None, self.job.result() if self.job is not None else {}
        except FarfieldError as error:
            return error, {}
        except (OSError, RuntimeError) as error:
            return RunError(describe_cause(error)), {}


@dataclass
class Saver:
    """Writer of a run's checkpoints, one at a time. Every rank has one, and all ranks call its methods together."""

    run: Path | None
    """Folder of the run, or None if nothing is saved."""
    config: Config
    """Resolved configuration, which sets the number of checkpoints to keep."""
    groups: ProcessGroups
    last_checkpoint: Path | None = None
    """Last complete checkpoint: of this run, or the one it resumed from."""
    hooks: SaveHooks = field(default_factory=SaveHooks)
    check_folder: Callable[[], None] = lambda: None
    """Raises MissingFolderError if the run's folder was moved or removed; only the first rank can detect this."""
    _save: _PendingSave | None = None
    _good_step: int = 0
    """Last step known to be good (`confirm`)."""
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))

    def __post_init__(self) -> None:
        self._copies = self.hooks.build_staging_buffers()

    @property
    def pending_step(self) -> int | None:
        """Step of the unfinished save, if any; the same on all ranks."""
        return None if self._save is None else self._save.state.step

    @property
    def is_done(self) -> bool:
        """True if this rank has completed its part of the pending save's current phase."""
        return self._save is not None and (self._save.job is None or self._save.job.done())

    def has(self, step: int) -> bool:
        """Return True if a checkpoint of this step exists or is being written."""
        last = layout.parse_step(self.last_checkpoint) if self.last_checkpoint is not None else None
        return step in (last, self.pending_step)

    def begin(self, engine: Any, state: TrainerState, log: Callable[[str], None] = lambda line: None) -> None:
        """Copy the states of a run and start writing them, after waiting for an unfinished save.

        Args:
            engine: DeepSpeed engine.
            state: progress of the run, which has a folder and no checkpoint of this step.
            log: receives a line if the save had to wait.

        Raises:
            RunError: the previous save failed.
        """
        if self._save is not None and not self.is_done:
            log(f"step {state.step}: waiting until the checkpoint of step {self.pending_step} is written")
        self.finish()
        assert self.run is not None
        self._save = save = _PendingSave(layout.get_checkpoint_path(self.run, state.step), state, None)
        try:
            snapshot = Snapshot(engine, self.groups.mesh, self._copies)
        except (RuntimeError, MemoryError) as error:  # one rank may run out of memory, and all ranks must learn of it
            save.job = Future()
            save.job.set_exception(RunError(f"cannot copy the states ({describe_cause(error)})"))
        else:
            save.job = self._submit(snapshot.write, save.temporary, self.hooks.open_file)

    def advance(self) -> None:
        """Advance the pending save to its next phase, waiting for ranks that have not completed the current one.

        Raises:
            NonFiniteWeightError: a weight is not finite.
            RunError: the disk fails. Partial files are removed, and earlier checkpoints are kept.
        """
        save = self._save
        assert save is not None
        assert self.run is not None
        outcomes = self.groups.gather_objects(save.get_outcome())
        error = next((error for error, _ in outcomes if error is not None), None)
        if error is not None:
            self._save = None
            if self.groups.is_main:
                shutil.rmtree(save.temporary, ignore_errors=True)
            if isinstance(error, MissingFolderError):
                if self.groups.is_main:  # other ranks may have recreated it
                    remove_empty_folders([save.final.parent, self.run])
                raise error
            if save.final.is_dir():
                raise RunError(f"{save.final}: saved, but older checkpoints could not be deleted: {error}")
            if isinstance(error, NonFiniteWeightError):
                raise NonFiniteWeightError(f"{save.final}: not saved: {error}")
            raise RunError(f"{save.final}: not saved: {error}; {_find_intact_checkpoint(self.run)}")
        if save.publishing:
            self.last_checkpoint, self._save = save.final, None
            return
        save.publishing, save.job = True, None
        if self.groups.is_main:
            entries = {name: entry for _, part in outcomes for name, entry in part.items()}
            save.job = self._submit(self._publish, self.run, save, entries)

    def _submit(self, write: Callable[..., Entries], *arguments: Any) -> "Future[Entries]":
        """Start writing in the thread; fail if the run's folder is missing."""

        def work() -> Entries:
            self.check_folder()
            try:
                return write(*arguments)
            except (OSError, FarfieldError):
                self.check_folder()
                raise

        return self._threads.submit(work)

    def finish(self) -> None:
        """Wait until the pending save is complete. Raises RunError if it fails."""
        while self._save is not None:
            self.advance()

    def confirm(self, step: int) -> None:
        """Mark the states before a step as good, so that checkpoints of earlier steps may replace older ones.

        A checkpoint is complete before it is known whether the run survives the next step. Until then, the checkpoints
        it will replace are kept.
        """
        is_new = self._good_step <= self._unconfirmed_step < step
        self._good_step = step
        if is_new and self.run is not None and self.groups.is_main and self._save is None:
            options = self.config.checkpoint
            layout.prune_checkpoints(self.run, options.keep_last_n_checkpoints, options.extra_save_iters)

    @property
    def _unconfirmed_step(self) -> int:
        last = self.last_checkpoint
        return -1 if last is None or self.run is None else layout.parse_step(last) or 0

    def close(self) -> None:
        """Shut down the thread after its current work."""
        self._threads.shutdown()

    def _publish(self, run: Path, save: _PendingSave, entries: Entries) -> Entries:
        folder, options, step = save.temporary, self.config.checkpoint, save.state.step
        entries = self.hooks.complete(folder, step, entries)
        weights = sharded_state.merge_weight_shards(
            folder, self.groups.world_size, {"step": str(step)}, self.hooks.open_file
        )
        self.config.save(folder / CONFIG_FILE)
        save.state.write(folder)
        small = manifest.compute_checksums(folder, [folder / CONFIG_FILE, folder / layout.PROGRESS])
        manifest.write_manifest(folder, entries | {layout.WEIGHTS: weights} | small)
        os.replace(folder, save.final)
        manifest.sync_folder(save.final.parent)
        if step < self._good_step:
            layout.prune_checkpoints(run, options.keep_last_n_checkpoints, options.extra_save_iters)
        self.hooks.on_published(save.final)
        return {}


def _find_intact_checkpoint(run: Path) -> str:
    """Return a clause about the last good checkpoint."""
    last = layout.find_latest_checkpoint(run)
    return f"the last good checkpoint is {last}" if last is not None else "the run has no checkpoint yet"

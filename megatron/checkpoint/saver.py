"""Writing a checkpoint while training goes on: whole and on the disk under a temporary name, then renamed.

    step_0000500/
        model.safetensors     float32 weights, all of them (weights.py)
        config.yml            the resolved configuration; with it and the weights a model is rebuilt
        progress.json         how far the run was (trainer_state.py)
        states/               one file per rank: its shards of Adam's moments, its random states (sharded_state.py)
        manifest.json         sizes and checksums of all of these, written last (manifest.py)

Evaluation reads the first three only, resuming all. A save goes through two phases, and training waits for neither:

    writing       every rank copies its states (that is what a save costs) and a thread of its own writes them
    publishing    once all ranks' files are whole, a thread of the first merges the weights, lists them and renames

Threads exchange nothing. That a rank has done its part rides on the sum that the loop takes before each step
(`is_done`); when all have, all call `advance`.
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
from megatron.config.schema import Config
from megatron.distributed.process_groups import ProcessGroups
from megatron.utils.atomic_io import remove_empty_folders
from megatron.utils.errors import FarfieldError, RunError, describe_cause

Entries = dict[str, FileChecksum]
"""What a manifest says of files, by their names in the checkpoint."""


@dataclass(frozen=True)
class SaveHooks:
    """What a caller from Python has done in the saves of a process; as it stands, a plain save. No key sets it."""

    build_staging_buffers: Callable[[], PinnedStagingBuffers] = PinnedStagingBuffers
    """Where a rank's states are copied to."""
    open_file: OpenFile = open_plain_file
    """Opens the files of tensors that are written."""
    complete: Callable[[Path, int, Entries], Entries] = lambda folder, step, entries: entries
    """Called in the first process, in the thread that publishes, before anything is merged: with the folder that is not
    published yet, the step, and the entries of the ranks' files. Returns the entries of all files of states."""
    on_published: Callable[[Path], None] = lambda checkpoint: None
    """Called there when the checkpoint has its name."""


@dataclass
class _PendingSave:
    """A save that is not finished."""

    final: Path
    state: TrainerState
    job: "Future[Entries] | None"
    """What this rank's thread does; None if it has nothing to do."""
    publishing: bool = False

    @property
    def temporary(self) -> Path:
        return self.final.with_name(f".{self.final.name}.tmp")

    def get_outcome(self) -> tuple[FarfieldError | None, Entries]:
        """Wait for this rank's thread; return the error that it met, and what it wrote."""
        try:
            return None, self.job.result() if self.job is not None else {}
        except FarfieldError as error:
            return error, {}
        except (OSError, RuntimeError) as error:
            return RunError(describe_cause(error)), {}


@dataclass
class Saver:
    """Writes the checkpoints of a run, one at a time. Every rank has one, and all call its methods together."""

    run: Path | None
    """The run's folder; None: nothing is saved."""
    config: Config
    """The resolved configuration; it says how many checkpoints are kept."""
    groups: ProcessGroups
    last_checkpoint: Path | None = None
    """The last checkpoint that is whole: of this run, or the one that it resumed from."""
    hooks: SaveHooks = field(default_factory=SaveHooks)
    check_folder: Callable[[], None] = lambda: None
    """Raises MissingFolderError if the run's folder was moved or removed; the first rank alone can know."""
    _save: _PendingSave | None = None
    _good_step: int = 0
    """Last step that is known to be good (`confirm`)."""
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))

    def __post_init__(self) -> None:
        self._copies = self.hooks.build_staging_buffers()

    @property
    def pending_step(self) -> int | None:
        """The step of a save that is not finished, if there is one: the same on all ranks."""
        return None if self._save is None else self._save.state.step

    @property
    def is_done(self) -> bool:
        """Has this rank done its part of the pending save's phase?"""
        return self._save is not None and (self._save.job is None or self._save.job.done())

    def has(self, step: int) -> bool:
        """Is there a checkpoint of this step, or will there be one?"""
        last = layout.parse_step(self.last_checkpoint) if self.last_checkpoint is not None else None
        return step in (last, self.pending_step)

    def begin(self, engine: Any, state: TrainerState, log: Callable[[str], None] = lambda line: None) -> None:
        """Copy the states of a run and begin to write them; a save that is not finished is waited for.

        Args:
            engine: DeepSpeed's.
            state: of the run, which has a folder and no checkpoint of this step.
            log: gets a line if there was something to wait for.

        Raises:
            RunError: the save before could not be finished.
        """
        if self._save is not None and not self.is_done:
            log(f"step {state.step}: waits until the checkpoint of step {self.pending_step} is written")
        self.finish()
        assert self.run is not None
        self._save = save = _PendingSave(layout.get_checkpoint_path(self.run, state.step), state, None)
        try:
            snapshot = Snapshot(engine, self.groups.mesh, self._copies)
        except (RuntimeError, MemoryError) as error:  # as one rank may run out of memory, and all must hear of it
            save.job = Future()
            save.job.set_exception(RunError(f"its states cannot be copied ({describe_cause(error)})"))
        else:
            save.job = self._submit(snapshot.write, save.temporary, self.hooks.open_file)

    def advance(self) -> None:
        """Go on with the pending save, whose phase all ranks have done (or are waited for).

        Raises:
            NonFiniteWeightError: a weight is not finite.
            RunError: the disk refuses. Nothing is left behind, and earlier checkpoints stay.
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
                if self.groups.is_main:  # other ranks may have made it anew
                    remove_empty_folders([save.final.parent, self.run])
                raise error
            if save.final.is_dir():
                raise RunError(f"{save.final}: saved, but older ones cannot be deleted: {error}")
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
        """Let the thread write, unless the run's folder is gone."""

        def work() -> Entries:
            self.check_folder()
            try:
                return write(*arguments)
            except (OSError, FarfieldError):
                self.check_folder()
                raise

        return self._threads.submit(work)

    def finish(self) -> None:
        """Wait until the pending save has its name. Raises RunError if it cannot be finished."""
        while self._save is not None:
            self.advance()

    def confirm(self, step: int) -> None:
        """Take the states before a step as good: checkpoints of earlier steps may now push out older ones.

        A checkpoint is whole before anybody knows whether the run survives its next step. Until then it is kept beside
        those that it will replace.
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
        """End the thread, after what it is doing."""
        self._threads.shutdown()

    def _publish(self, run: Path, save: _PendingSave, entries: Entries) -> Entries:
        folder, options, step = save.temporary, self.config.checkpoint, save.state.step
        entries = self.hooks.complete(folder, step, entries)
        weights = sharded_state.merge_weight_shards(
            folder, self.groups.world_size, {"step": str(step)}, self.hooks.open_file
        )
        self.config.save(folder / layout.CONFIG)
        save.state.write(folder)
        small = manifest.compute_checksums(folder, [folder / layout.CONFIG, folder / layout.PROGRESS])
        manifest.write_manifest(folder, entries | {layout.WEIGHTS: weights} | small)
        os.replace(folder, save.final)
        manifest.sync_folder(save.final.parent)
        if step < self._good_step:
            layout.prune_checkpoints(run, options.keep_last_n_checkpoints, options.extra_save_iters)
        self.hooks.on_published(save.final)
        return {}


def _find_intact_checkpoint(run: Path) -> str:
    """What is still there, in words."""
    last = layout.find_latest_checkpoint(run)
    return f"the last good checkpoint is {last}" if last is not None else "the run has no checkpoint yet"

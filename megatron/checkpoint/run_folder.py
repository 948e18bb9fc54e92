"""A run's folder: one run at a time in it, its configuration beside what somebody else put there, and its checkpoints.

Two runs in one folder would mix their metrics, and the second would find "its" checkpoints written by the first. The
lock (`RunLock`) belongs to the process: however it ends, the system releases it, so no stale lock is ever left to
remove. What a killed process leaves for a moment (its other ranks, the processes that read its data) may still hold it,
so a run that begins right after waits a little.

What a person wrote is never written over. A configuration of theirs keeps its name, and the run's goes beside it:

    RUN/config.yml              of the run; or a person's own, from which they train
    RUN/config.resolved.yml     then: the run's

Records and heartbeats have one name each, by which others find them, so a folder that holds such files of somebody else
takes no run.

All of this works without torch, so that a listing of a thousand checkpoints on a login node takes no longer than it
must.
"""

import fcntl
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.layout import CONFIG, list_checkpoints
from megatron.config.load import read_config
from megatron.config.schema import Config
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.folder_lock import FolderLock

LOCK = ".lock"
SWEEP_LOCK = ".sweep.lock"
"""In a sweep's folder, which is no run's: by `LOCK` runs are known."""
LOCK_TIMEOUT = 10.0
"""Seconds to wait for whoever holds the folder; a process that reads data sees within five that its run is gone."""
BUSY = "another run is writing there; choose another folder or wait"
"""Of a folder that a run holds."""


def is_lock_held(path: Path) -> bool | None:
    """Does a process hold a lock (`RunLock`) by its file? None where that cannot be known."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None  # a file system without locks
    finally:
        os.close(descriptor)
    return False


def is_sweep_running(folder: Path) -> bool:
    """Does a sweep on this machine work in a folder?"""
    return bool(is_lock_held(folder / SWEEP_LOCK))


class RunLock(FolderLock):
    """Lock on a run's folder, or on a sweep's. `patience` is `LOCK_TIMEOUT` if None; see `FolderLock`."""

    def __init__(
        self,
        run: str | Path,
        *,
        name: str = LOCK,
        key: str = "save",
        busy: str = BUSY,
        patience: float | None = None,
    ) -> None:
        super().__init__(run, name=name, key=key, busy=busy, patience=LOCK_TIMEOUT if patience is None else patience)
        self._run = run

    def check_folder(self) -> None:
        """Raise MissingFolderError if the folder was moved or removed since it was locked."""
        if not self.is_in_place:
            raise MissingFolderError(
                f"save: {self._run}: the folder was moved or removed while the run trained; if it was moved, start "
                "again with the new folder as save and load to continue from its last checkpoint"
            )


class MissingFolderError(RunError):
    """A run's folder was moved or removed while it trained."""


RESOLVED_CONFIG = "config.resolved.yml"


def get_config_path(run: str | Path) -> Path:
    """Where the whole configuration of a run lies, whether it is there or not."""
    path = Path(run) / RESOLVED_CONFIG
    return path if path.is_file() else Path(run) / CONFIG


def save_config(config: Config, run: str | Path) -> str | None:
    """Write the whole configuration into a run's folder. Returns a line to tell if a person's own lies there.

    Raises:
        UserError: it may not be written there; RunError if the disk refuses.
    """
    usual_path, other_path = Path(run) / CONFIG, Path(run) / RESOLVED_CONFIG
    if usual_path.exists() and not is_saved_config(usual_path):
        config.save(other_path)
        return f"{usual_path} was not written by a run and stays as it is; the whole configuration is in {other_path}"
    config.save(usual_path)
    if other_path.is_file() and is_saved_config(other_path):
        other_path.unlink()  # of an earlier run, when there was somebody else's in its place
    return None


def refuse_foreign_run_files(run: str | Path | None, names: tuple[str, ...]) -> None:
    """Refuse a folder in which no run has begun, but which holds files that a run would replace.

    Args:
        run: where `save` points; None if nothing is saved.
        names: of the files that a run begins anew.

    Raises:
        UserError: with the first of them.
    """
    # A folder that cannot be looked into is refused, with the key, by whoever makes files in it.
    if (
        run is None
        or os.path.exists(Path(run) / LOCK)
        or not os.access(run, os.R_OK | os.X_OK)
        or list_checkpoints(run)
    ):
        return
    foreign = [name for name in names if os.path.exists(Path(run) / name)]
    if os.path.exists(Path(run) / RESOLVED_CONFIG) and not is_saved_config(Path(run) / RESOLVED_CONFIG):
        foreign.append(RESOLVED_CONFIG)
    if foreign:
        raise UserError(
            f"save: {run} holds {foreign[0]}, which no run wrote and a run would replace; choose another folder, or "
            "move it away"
        )


def is_saved_config(path: Path) -> bool:
    """Is a file, byte for byte, what `Config.save` makes of the configuration in it?"""
    try:
        return path.read_bytes() == read_config(path).to_yaml().encode()
    except (OSError, FarfieldError):
        return False


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint."""

    path: Path
    step: int
    bytes: int
    written: float
    """When it got its name, in seconds since 1970."""
    problem: str | None
    """What is wrong with its files; None if nothing is."""


def list_checkpoint_infos(run: Path, *, checksums: bool) -> list[CheckpointInfo]:
    """All checkpoints of a run, oldest first.

    Args:
        run: its folder.
        checksums: compare every byte with the manifest, and not names and sizes alone.

    Raises UserError: there is no such folder, or no checkpoint in it.
    """
    run = layout.find_run_folder(run)
    checkpoints = layout.list_checkpoints(run)
    if not checkpoints:
        layout.resolve_checkpoint_path(run)  # says why
        raise UserError(f"{run}: is a checkpoint; give the run's folder")
    infos = [_read_checkpoint_info(path, checksums=checksums) for path in checkpoints]
    return [info for info in infos if info is not None]


def _read_checkpoint_info(path: Path, *, checksums: bool) -> CheckpointInfo | None:
    """What is to be said of a checkpoint; None if the run deleted it meanwhile."""
    try:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        info = CheckpointInfo(
            path,
            layout.parse_step(path) or 0,
            size,
            path.stat().st_mtime,
            manifest.find_damage(path, checksums=checksums),
        )
    except FileNotFoundError:
        if path.is_dir():
            raise
    return info if path.is_dir() else None


@dataclass(frozen=True)
class PruneResult:
    """What came of keeping only some checkpoints."""

    deleted: list[Path]
    damaged: list[tuple[Path, str]]
    """Those that stayed and were not counted, and what is wrong with them."""
    num_valid: int
    """How many of those that stayed are as they were written."""


def prune_with_verification(run: Path, count: int, spare: Collection[int]) -> PruneResult:
    """Delete what is older than the newest `count` checkpoints that are whole; those of the steps in `spare` stay.

    Every byte of those that stay is compared with the manifest: what is damaged is no checkpoint to rely on, so it is
    not counted. It is not deleted either unless it is older than all that are.

    Raises UserError: a training is writing there, or no checkpoint is whole.
    """
    run = layout.find_run_folder(run)
    lock = RunLock(run)
    try:
        damaged: list[tuple[Path, str]] = []
        valid = 0
        left = [path for path in layout.list_checkpoints(run) if layout.parse_step(path) not in spare]
        while left and valid < count:
            newest = left.pop()
            problem = manifest.find_damage(newest)
            if problem is None:
                valid += 1
            else:
                damaged.append((newest, problem))
        if damaged and not valid:
            raise UserError(f"--keep {count}: {damaged[0][0]} and all others are damaged; nothing was deleted")
        layout.delete_checkpoints(left)
        layout.prune_checkpoints(run, None)  # what interrupted saves left
        return PruneResult(left, damaged, valid)
    finally:
        lock.release()

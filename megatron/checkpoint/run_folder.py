"""A run's folder: its lock, its configuration file, and its checkpoints.

Two runs in one folder would mix their metrics, and the second would find the first one's checkpoints. The lock
(`RunLock`) belongs to the process. The operating system releases it when the process ends in any way, so stale locks
cannot remain. Remaining processes of a killed run (other ranks, data workers) may keep it briefly, so a run that starts
immediately afterwards waits.

Files written by a user are never overwritten. A user's configuration keeps its name, and the run's is stored next to
it:

    RUN/config.yml              the run's configuration, or the user's own file from which the run was started
    RUN/config.resolved.yml     the run's configuration in the latter case

Metrics and heartbeats have fixed names by which other tools find them. A folder that contains such files from another
source is therefore rejected.

This module does not import torch, so that listing a thousand checkpoints on a login node is fast.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.layout import list_checkpoints
from megatron.config.load import read_config
from megatron.config.schema import CONFIG_FILE, Config
from megatron.utils.atomic_io import LOCK, FolderLock, check_writable, is_lock_held
from megatron.utils.errors import FarfieldError, RunError, UserError

SWEEP_LOCK = ".sweep.lock"
"""Lock in a sweep's folder; runs are recognized by `LOCK`."""
LOCK_TIMEOUT = 10.0
"""Seconds to wait for the holder of the lock; a data worker notices within 5 s that its run has ended."""
BUSY = "another run is using this folder; choose another one or wait"
"""Error for a folder that another run has locked."""


def is_sweep_running(folder: Path) -> bool:
    """Return True if a sweep on this machine is running in a folder."""
    return bool(is_lock_held(folder / SWEEP_LOCK))


class RunLock(FolderLock):
    """Lock on a run's or a sweep's folder. `lock_timeout` defaults to `LOCK_TIMEOUT`; see `FolderLock`."""

    def __init__(
        self,
        run: str | Path,
        *,
        name: str = LOCK,
        key: str = "save",
        busy_message: str = BUSY,
        lock_timeout: float | None = None,
    ) -> None:
        super().__init__(
            run,
            name=name,
            key=key,
            busy_message=busy_message,
            lock_timeout=LOCK_TIMEOUT if lock_timeout is None else lock_timeout,
        )
        self._run = run

    def check_folder(self) -> None:
        """Raise MissingFolderError if the folder was moved or removed since it was locked."""
        if not self.is_in_place:
            raise MissingFolderError(
                f"save: {self._run}: the folder was moved or removed during training; if it was moved, run "
                "again with the new folder as save and load to resume from its newest checkpoint"
            )


class MissingFolderError(RunError):
    """Error for a run's folder that was moved or removed during training."""


RESOLVED_CONFIG = "config.resolved.yml"


def get_config_path(run: str | Path) -> Path:
    """Return the path of a run's resolved configuration. The file may not exist."""
    path = Path(run) / RESOLVED_CONFIG
    return path if path.is_file() else Path(run) / CONFIG_FILE


def save_config(config: Config, run: str | Path) -> str | None:
    """Write the resolved configuration to a run's folder.

    Returns a note if a user's own configuration is there.

    Raises:
        UserError: it may not be written there.
        RunError: the disk fails.
    """
    usual_path, other_path = Path(run) / CONFIG_FILE, Path(run) / RESOLVED_CONFIG
    if usual_path.exists() and not is_saved_config(usual_path):
        config.save(other_path)
        return f"{usual_path} was not written by a run and is left unchanged; resolved configuration: {other_path}"
    config.save(usual_path)
    if other_path.is_file() and is_saved_config(other_path):
        other_path.unlink()  # left from a run when a user's own was there
    return None


def check_run_writable(key: str, run: Path, advice: str) -> None:
    """Check that files can be created in a run's folder, and checkpoints in its subfolder.

    Arguments and errors are those of `check_writable`.
    """
    check_writable(key, run, advice)
    check_writable(f"{key} is {run}, whose folder of checkpoints", run / layout.CHECKPOINTS, advice)


def check_no_foreign_run_files(run: str | Path | None, names: tuple[str, ...]) -> None:
    """Reject a folder without a run that contains files which a run would replace.

    Args:
        run: value of `save`, or None if nothing is saved.
        names: names of the files that a run replaces.

    Raises:
        UserError: names the first of these files.
    """
    # Unreadable folders are rejected later, with the key, when files are created there.
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
            f"save: {run} contains {foreign[0]}, which was not written by a run and would be replaced; choose another "
            "folder, or move the file away"
        )


PREPARED_SUFFIXES = (".yml", ".yaml", ".sh", ".sbatch", ".out", ".err", ".log", ".txt", ".md")
"""Suffixes of files that a user or a scheduler puts into a run's folder before the run: configurations and logs."""
MAX_NAMES = 3


def describe_other_contents(run: str | Path | None) -> tuple[str, ...]:
    """Return a note if a new run would be saved in a folder of other files or folders; empty otherwise.

    run: value of `save`, or None if nothing is saved.
    """
    if run is None or not os.access(run, os.R_OK | os.X_OK) or (Path(run) / LOCK).exists() or list_checkpoints(run):
        return ()
    names = sorted(
        path.name for path in Path(run).iterdir() if path.suffix not in PREPARED_SUFFIXES and path.name[0] != "."
    )
    if not names:
        return ()
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    return (f"save: {run} has files that no run wrote ({shown}); the run's files are added to them",)


def is_saved_config(path: Path) -> bool:
    """Return True if a file is byte for byte what `Config.save` writes for the configuration in it."""
    try:
        return path.read_bytes() == read_config(path).to_yaml().encode()
    except (OSError, FarfieldError):
        return False


@dataclass(frozen=True)
class CheckpointInfo:
    """Summary of one checkpoint."""

    path: Path
    step: int
    bytes: int
    written: float
    """Time of completion, in seconds since 1970."""
    problem: str | None
    """Description of the damage to its files, or None."""


def list_checkpoint_infos(run: Path, *, checksums: bool) -> list[CheckpointInfo]:
    """Return summaries of all checkpoints of a run, oldest first.

    Args:
        run: folder of the run.
        checksums: compare every byte with the manifest rather than only names and sizes.

    Raises UserError if the folder does not exist or contains no checkpoint.
    """
    run = layout.find_run_folder(run)
    checkpoints = layout.list_checkpoints(run)
    if not checkpoints:
        layout.resolve_checkpoint_path(run)  # raises an error with the reason
        raise UserError(f"{run}: is a checkpoint; it must be the run's folder")
    infos = [_read_checkpoint_info(path, checksums=checksums) for path in checkpoints]
    return [info for info in infos if info is not None]


def _read_checkpoint_info(path: Path, *, checksums: bool) -> CheckpointInfo | None:
    """Return the summary of a checkpoint, or None if the run deleted it meanwhile."""
    try:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        try:
            problem = manifest.find_damage(path, checksums=checksums)
        except PermissionError as error:
            problem = f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
        info = CheckpointInfo(path, layout.parse_step(path) or 0, size, path.stat().st_mtime, problem)
    except FileNotFoundError:
        if path.is_dir():
            raise
    return info if path.is_dir() else None


@dataclass(frozen=True)
class PruneResult:
    """Result of pruning checkpoints."""

    deleted: list[Path]
    damaged: list[tuple[Path, str]]
    """Damaged checkpoints that were kept and not counted, with a description of the damage."""
    num_valid: int
    """Number of undamaged checkpoints that were kept."""


def verify_and_prune(run: Path, count: int, protected_steps: Collection[int]) -> PruneResult:
    """Delete checkpoints older than the newest `count` undamaged ones; those of `protected_steps` are kept.

    Every byte of the kept checkpoints is compared with the manifest. Damaged checkpoints are not counted, and are
    deleted only if they are older than all counted ones.

    Raises UserError if the folder is not writable, a run is training in it, or no checkpoint is undamaged.
    """
    run = layout.find_run_folder(run)
    check_run_writable("RUN", run, "no checkpoint was deleted")
    option = f"--keep {count}"
    busy_message = "another run is using this folder; no checkpoint was deleted; wait until the run ends"
    lock = RunLock(run, key=option, busy_message=busy_message)
    try:
        damaged: list[tuple[Path, str]] = []
        valid = 0
        left = [path for path in layout.list_checkpoints(run) if layout.parse_step(path) not in protected_steps]
        while left and valid < count:
            newest = left.pop()
            problem = manifest.find_damage(newest)
            if problem is None:
                valid += 1
            else:
                damaged.append((newest, problem))
        if damaged and not valid:
            raise UserError(f"{option}: {damaged[0][0]} and all others are damaged; nothing was deleted")
        layout.delete_checkpoints(left)
        layout.prune_checkpoints(run, None)  # remains of interrupted saves
        return PruneResult(left, damaged, valid)
    finally:
        lock.release()


def find_started_run(path: str | Path) -> Path:
    """Return the folder of a run that has started, given that folder or one of its checkpoints.

    Raises UserError if there is neither a checkpoint nor a run's configuration.
    """
    path = Path(path)
    run = layout.get_run_of_checkpoint(path) if layout.is_checkpoint(path) else layout.find_run_folder(path)
    if not list_checkpoints(run) and not is_saved_config(get_config_path(run)):
        layout.resolve_checkpoint_path(path)  # raises an error with the reason
    return run

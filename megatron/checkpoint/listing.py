"""What checkpoints a run has: their size, whether they are whole, and what is removed when only some are kept.

Read without torch, so that a listing of a thousand checkpoints on a login node takes no longer than it must.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.lock import RunLock
from megatron.utils.errors import UserError


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
    infos = layout.list_checkpoints(run)
    if not infos:
        layout.resolve_checkpoint_path(run)  # says why
        raise UserError(f"{run}: is a checkpoint; give the run's folder")
    rows = [_read_checkpoint_info(path, checksums=checksums) for path in infos]
    return [row for row in rows if row is not None]


def _read_checkpoint_info(path: Path, *, checksums: bool) -> CheckpointInfo | None:
    """What is to be said of a checkpoint; None if the run deleted it meanwhile."""
    try:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        row = CheckpointInfo(
            path,
            layout.parse_step(path) or 0,
            size,
            path.stat().st_mtime,
            manifest.find_damage(path, checksums=checksums),
        )
    except FileNotFoundError:
        if path.is_dir():
            raise
    return row if path.is_dir() else None


@dataclass(frozen=True)
class PruneResult:
    """What came of keeping only some checkpoints."""

    deleted: list[Path]
    damaged: list[tuple[Path, str]]
    """Those that stayed and were not counted, and what is wrong with them."""
    num_valid: int
    """How many of those that stayed are as they were written."""


def prune_run(run: Path, count: int, spare: Collection[int]) -> PruneResult:
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
        layout.delete_checkpoint(left)
        layout.prune_checkpoints(run, None)  # what interrupted saves left
        return PruneResult(left, damaged, valid)
    finally:
        lock.release()

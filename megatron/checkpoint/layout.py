"""Names and paths of checkpoints in a run's folder.

    RUN/checkpoints/step_0000500/       model.safetensors, config.yml, progress.json, and what resuming needs
    RUN/checkpoints/abandoned/0001/     checkpoints that a run went back behind, with the metrics of that time

A checkpoint is written under a name that begins with a dot and renamed when it is whole, so a name of the form `step_N`
is enough: the newest is the one with the highest step, and no other file says so. Whether its files are still what was
written is for `manifest.py` to say.
"""

import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from megatron.utils.errors import UserError
from megatron.utils.suggestions import find_nearest_name

CHECKPOINTS, SUPERSEDED = "checkpoints", "abandoned"
WEIGHTS, CONFIG, PROGRESS = "model.safetensors", "config.yml", "progress.json"
MAX_RUNS_LISTED = 10
"""Runs that a line names."""
MAX_FOLDER_DEPTH = 4
"""Folders inside each other that are looked through for runs."""
_NAME = re.compile(r"step_(\d{7,})")


def format_checkpoint_name(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step_{step:07d}"


def get_checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in a run's folder, whether it is there or not."""
    return run / CHECKPOINTS / format_checkpoint_name(step)


def parse_step(checkpoint: Path) -> int | None:
    """The step in a checkpoint's name, or None if it is not one."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def list_checkpoints(run: str | Path) -> list[Path]:
    """All checkpoints of a run, oldest first."""
    folder = Path(run) / CHECKPOINTS
    if not folder.is_dir():
        return []
    checkpoints = [path for path in folder.iterdir() if parse_step(path) is not None and path.is_dir()]
    return sorted(checkpoints, key=lambda path: parse_step(path) or 0)


def find_latest_checkpoint(run: str | Path) -> Path | None:
    """The checkpoint with the highest step; None if the run has none."""
    return next(reversed(list_checkpoints(run)), None)


def refuse_existing_run(save: str | Path | None, newest: Path | None) -> None:
    """A run that begins anew has a folder without checkpoints.

    Args:
        save: the run's folder, as it was given.
        newest: the last checkpoint in it, if there is one.

    Raises UserError, with what to write instead, if there is one.
    """
    if newest is not None:
        raise UserError(
            f"save: {save} holds checkpoints already (the last is {newest.name}); "
            f"add {shlex.quote(f'load={save}')} to go on from there, or choose another folder"
        )


def is_checkpoint(path: str | Path) -> bool:
    """Does a path name a single checkpoint rather than a run?"""
    path = Path(path)
    return (path / PROGRESS).is_file() or (parse_step(path) is not None and path.is_dir())


def find_run_folder(path: str | Path) -> Path:
    """A run's folder, given it or its folder of checkpoints."""
    path = Path(path)
    return path.parent if path.name == CHECKPOINTS else path


def get_run_of_checkpoint(checkpoint: str | Path) -> Path:
    """The run's folder that a checkpoint lies in, abandoned ones included; of one that lies alone, its own folder."""
    path = Path(checkpoint).resolve()
    return next((parent.parent for parent in path.parents if parent.name == CHECKPOINTS), path)


def resolve_checkpoint_path(path: str | Path) -> Path:
    """The checkpoint meant by a run's folder (its newest) or a checkpoint's own folder.

    Raises UserError: there is no such folder, or no checkpoint in it.
    """
    path = Path(path)
    if is_checkpoint(path):
        return path
    if not path.is_dir():
        problem = "is a file; " if path.exists() else f"no such folder; {suggest_folder(path)}"
        raise UserError(f"{path}: {problem}give a run's folder or one of its {CHECKPOINTS}/step_…")
    latest = find_latest_checkpoint(find_run_folder(path))
    if latest is None:
        if runs := _list_runs_in(path):
            shown = " ".join(shlex.quote(str(run)) for run in runs[:MAX_RUNS_LISTED])
            more = f" and {len(runs) - MAX_RUNS_LISTED} more" if len(runs) > MAX_RUNS_LISTED else ""
            raise UserError(
                f"{path}: this folder has no checkpoint, but contains runs that do; name one of them: {shown}{more}"
            )
        raise UserError(f"{path}: no checkpoint in it; give a run's folder or one of its {CHECKPOINTS}/step_…")
    return latest


def suggest_folder(path: Path) -> str:
    """`did you mean runs/kerple? ` for `runs/kerpel` or `rnus/kerple`, where there is such a folder; else nothing."""
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    if folder is None:
        return ""
    for name in path.relative_to(folder).parts:
        if not (folder / name).is_dir():
            try:
                names = [child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
            except OSError:
                return ""
            near = find_nearest_name(name, names)
            if near is None:
                return ""
            name = near
        folder = folder / name
    return f"did you mean {folder}? "


def _list_runs_in(path: Path) -> list[Path]:
    """Runs with checkpoints in a folder or the folders in it, in order: a sweep's lie two below."""
    runs: list[Path] = []
    for folder, subfolders, _ in os.walk(path):
        run = Path(folder)
        if CHECKPOINTS in subfolders and list_checkpoints(run):
            runs.append(run)
            subfolders.clear()
        if len(run.parts) - len(path.parts) >= MAX_FOLDER_DEPTH:
            subfolders.clear()
        subfolders.sort()
    return runs


def move_aside(checkpoints: Sequence[Path], also: Sequence[Path] = ()) -> Path:
    """Move checkpoints of one run out of the way, newest first, so that a run can go on from before them.

    Args:
        checkpoints: at least one.
        also: files of the run to copy there first, as they are now.

    Returns:
        The new folder that holds them: `checkpoints/abandoned/0001`, `0002` and so on. Nothing there is ever deleted.
    """
    parent = checkpoints[0].parent / SUPERSEDED
    taken = [int(path.name) for path in parent.iterdir() if path.name.isdigit()] if parent.is_dir() else []
    folder = parent / f"{max(taken, default=0) + 1:04d}"
    folder.mkdir(parents=True)
    for path in also:
        if path.is_file():
            shutil.copy2(path, folder / path.name)
    for checkpoint in sorted(checkpoints, key=lambda path: parse_step(path) or 0, reverse=True):
        os.replace(checkpoint, folder / checkpoint.name)
    return folder


def prune_checkpoints(run: str | Path, keep: int | None, spare: Collection[int] = ()) -> list[Path]:
    """Delete all but the newest `keep` checkpoints; None deletes nothing. Returns what was deleted.

    The checkpoints of the steps in `spare` stay, and are not counted. Remains of a save that was interrupted are
    deleted too; what was abandoned stays.
    """
    for remains in (Path(run) / CHECKPOINTS).glob(".step_*"):
        shutil.rmtree(remains, ignore_errors=True)
    if keep is None:
        return []
    old = [path for path in list_checkpoints(run) if parse_step(path) not in spare][:-keep]
    delete_checkpoints(old)
    return old


def delete_checkpoints(checkpoints: Iterable[Path]) -> None:
    """Delete checkpoints."""
    for path in checkpoints:
        # First out of sight: a half-deleted folder must not look like a checkpoint.
        hidden = path.with_name(f".{path.name}.old")
        os.replace(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

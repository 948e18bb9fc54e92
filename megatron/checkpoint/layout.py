"""Names and paths of checkpoints in a run's folder.

    RUN/checkpoints/step_0000500/       model.safetensors, config.yml, progress.json, and the state for resuming
    RUN/checkpoints/abandoned/0001/     checkpoints discarded by a rollback, with the metrics at that time

A checkpoint is written under a name that begins with a dot and renamed when complete. The newest checkpoint is
therefore the folder `step_N` with the highest step; no other file records it. `manifest.py` verifies that its files are
unchanged.
"""

import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from megatron.config.schema import CONFIG_FILE
from megatron.utils.errors import UserError, check_reachable
from megatron.utils.formatting import suggest_path

CHECKPOINTS, ARCHIVE_FOLDER = "checkpoints", "abandoned"
WEIGHTS, PROGRESS = "model.safetensors", "progress.json"
TRANSFORMERS_CONFIG = "config.json"
"""Configuration of a model folder of transformers, such as an export."""
MAX_RUNS_LISTED = 10
"""Maximum number of runs listed in a message."""
MAX_FOLDER_DEPTH = 4
"""Maximum depth of nested folders searched for runs."""
_NAME = re.compile(r"step_(\d{7,})")


def format_checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint at a step."""
    return f"step_{step:07d}"


def get_checkpoint_path(run: Path, step: int) -> Path:
    """Return the path of the checkpoint at a step, whether it exists or not."""
    return run / CHECKPOINTS / format_checkpoint_name(step)


def parse_step(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's name, or None if it is not a checkpoint name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def list_checkpoints(run: str | Path) -> list[Path]:
    """Return all checkpoints of a run, oldest first."""
    folder = Path(run) / CHECKPOINTS
    if not folder.is_dir():
        return []
    checkpoints = [path for path in folder.iterdir() if parse_step(path) is not None and path.is_dir()]
    return sorted(checkpoints, key=lambda path: parse_step(path) or 0)


def find_latest_checkpoint(run: str | Path) -> Path | None:
    """Return the checkpoint with the highest step, or None if the run has none."""
    return next(reversed(list_checkpoints(run)), None)


def check_run_is_new(save: str | Path | None, newest: Path | None) -> None:
    """Check that a new run does not start in a folder with checkpoints.

    Args:
        save: folder of the run, as given by the user.
        newest: newest checkpoint in it, if any.

    Raises UserError with a suggestion if there is a checkpoint.
    """
    if newest is not None:
        raise UserError(
            f"save: {save} already contains checkpoints (newest: {newest.name}); "
            f"add {shlex.quote(f'load={save}')} to resume, or choose another folder"
        )


def is_checkpoint(path: str | Path) -> bool:
    """Return True if a path is a single checkpoint rather than a run."""
    path = Path(path)
    return (path / PROGRESS).is_file() or (parse_step(path) is not None and path.is_dir())


def find_run_folder(path: str | Path) -> Path:
    """Return a run's folder, given that folder or its checkpoints folder."""
    path = Path(path)
    return path.parent if path.name == CHECKPOINTS else path


def get_run_of_checkpoint(checkpoint: str | Path) -> Path:
    """Return the run that contains a checkpoint, or the checkpoint itself if it is in no run.

    The checkpoint may be rolled back.
    """
    path = Path(checkpoint).resolve()
    return next((parent.parent for parent in path.parents if parent.name == CHECKPOINTS), path)


def resolve_checkpoint_path(path: str | Path) -> Path:
    """Return the checkpoint that a path refers to: a run's newest one, or the checkpoint itself.

    Raises UserError if the folder does not exist, contains no checkpoint, or is one of another program.
    """
    path = Path(path)
    if is_checkpoint(path):
        if not any((path / name).exists() for name in (CONFIG_FILE, PROGRESS)):  # with one of them, it is damaged
            raise UserError(f"{path}: is not a checkpoint of Farfield (no {CONFIG_FILE})")
        return path
    if not path.is_dir():
        check_reachable(path)
        problem = "is a file; " if path.exists() else f"no such folder; {suggest_path(path, is_folder=True)}"
        raise UserError(f"{path}: {problem}give a run's folder or one of its {CHECKPOINTS}/step_…")
    latest = find_latest_checkpoint(find_run_folder(path))
    if latest is None:
        if runs := _list_runs_in(path):
            shown = " ".join(shlex.quote(str(run)) for run in runs[:MAX_RUNS_LISTED])
            more = f" and {len(runs) - MAX_RUNS_LISTED} more" if len(runs) > MAX_RUNS_LISTED else ""
            raise UserError(
                f"{path}: this folder has no checkpoint but contains runs that do; choose one of: {shown}{more}"
            )
        if (path / TRANSFORMERS_CONFIG).is_file():
            raise UserError(
                f"{path}: is a model folder of transformers ({TRANSFORMERS_CONFIG}), not a run; give the run it was "
                f"exported from, or import it: ./deepy.py import {shlex.quote(str(path))} -o RUN"
            )
        raise UserError(f"{path}: contains no checkpoint; give a run's folder or one of its {CHECKPOINTS}/step_…")
    return latest


def _list_runs_in(path: Path) -> list[Path]:
    """Return the runs with checkpoints in a folder and its subfolders, sorted; a sweep's runs are two levels down."""
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


def archive_checkpoints(checkpoints: Sequence[Path], copied_files: Sequence[Path] = ()) -> Path:
    """Move checkpoints of one run to a subfolder, newest first, so that the run can resume from before them.

    Args:
        checkpoints: checkpoints to move, at least one.
        copied_files: files of the run to copy to the subfolder first.

    Returns:
        The new folder, `checkpoints/abandoned/0001`, `0002` and so on. Its content is never deleted.
    """
    parent = checkpoints[0].parent / ARCHIVE_FOLDER
    taken = [int(path.name) for path in parent.iterdir() if path.name.isdigit()] if parent.is_dir() else []
    folder = parent / f"{max(taken, default=0) + 1:04d}"
    folder.mkdir(parents=True)
    for path in copied_files:
        if path.is_file():
            shutil.copy2(path, folder / path.name)
    for checkpoint in sorted(checkpoints, key=lambda path: parse_step(path) or 0, reverse=True):
        os.replace(checkpoint, folder / checkpoint.name)
    return folder


def prune_checkpoints(run: str | Path, keep: int | None, protected_steps: Collection[int] = ()) -> list[Path]:
    """Delete all but the newest `keep` checkpoints and return the deleted ones; None deletes nothing.

    Checkpoints of `protected_steps` are kept and not counted. Remains of interrupted saves are deleted too; rolled-back
    checkpoints are kept.
    """
    for remains in (Path(run) / CHECKPOINTS).glob(".step_*"):
        shutil.rmtree(remains, ignore_errors=True)
    if keep is None:
        return []
    old = [path for path in list_checkpoints(run) if parse_step(path) not in protected_steps][:-keep]
    delete_checkpoints(old)
    return old


def delete_checkpoints(checkpoints: Iterable[Path]) -> None:
    for path in checkpoints:
        # Rename first: a partially deleted folder must not look like a checkpoint.
        hidden = path.with_name(f".{path.name}.old")
        os.replace(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

"""Names and places of checkpoints in a run's folder.

    RUN/checkpoints/latest              the name of the newest checkpoint, written last
    RUN/checkpoints/step_0000500/       model.safetensors, config.yml, progress.json, and what resuming needs

A checkpoint is written under a name that begins with a dot and renamed when it is whole, so whatever has a name of the
form `step_N` is complete.
"""

import os
import re
import shutil
from pathlib import Path

from megatron.errors import RunError, UserError

CHECKPOINTS, LATEST = "checkpoints", "latest"
WEIGHTS, CONFIG, PROGRESS = "model.safetensors", "config.yml", "progress.json"
_NAME = re.compile(r"step_(\d{7,})")


def name(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step_{step:07d}"


def step_of(checkpoint: Path) -> int | None:
    """The step in a checkpoint's name, or None if it is not one."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def checkpoints(run: str | Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    folder = Path(run) / CHECKPOINTS
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if step_of(path) is not None and (path / PROGRESS).is_file()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def latest(run: str | Path) -> Path | None:
    """The checkpoint that `latest` names; None if the run has none.

    Raises:
        RunError: `latest` names a checkpoint that is not there, or there are checkpoints but no `latest`: going on from
            another one, or from nothing, must be somebody's decision.
    """
    pointer = Path(run) / CHECKPOINTS / LATEST
    there = checkpoints(run)
    choices = f"name one of {', '.join(path.name for path in there)}" if there else "no checkpoint is there"
    try:
        named = pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        if there:
            raise RunError(f"{pointer}: is missing; {choices} as {Path(run) / CHECKPOINTS}/…") from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{pointer}: cannot be read ({error})") from None
    if pointer.parent / named not in there:
        raise RunError(f"{pointer}: names {named!r}, which is not a complete checkpoint; {choices}")
    return pointer.parent / named


def resolve(path: str | Path) -> Path:
    """The checkpoint meant by a run's folder (its latest) or a checkpoint's own folder.

    Raises:
        UserError: there is no such folder, or no checkpoint in it.
        RunError: the run's `latest` is damaged.
    """
    path = Path(path)
    if (path / PROGRESS).is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a run's folder or one of its {CHECKPOINTS}/step_…")
    found = latest(path.parent if path.name == CHECKPOINTS else path)
    if found is None:
        raise UserError(f"{path}: no checkpoint in it; give a run's folder or one of its {CHECKPOINTS}/step_…")
    return found


def point_to(checkpoint: Path) -> None:
    """Make `latest` name a checkpoint; the old `latest` stays until the new one is whole."""
    pointer = checkpoint.parent / LATEST
    temporary = pointer.with_name(f".{LATEST}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(checkpoint.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, pointer)


def prune(run: str | Path, keep: int | None) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, never the one that `latest` names; None deletes nothing.

    Remains of a save that was interrupted are deleted too. Returns what was deleted.
    """
    folder = Path(run) / CHECKPOINTS
    for remains in folder.glob(".step_*"):
        shutil.rmtree(remains, ignore_errors=True)
    if keep is None:
        return []
    newest = latest(run)
    gone = [path for path in checkpoints(run)[:-keep] if path != newest]
    for path in gone:
        # First out of sight: a half-deleted folder must not look like a checkpoint.
        hidden = path.with_name(f".{path.name}.old")
        os.replace(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return gone

"""`manifest.json`: the size and the checksum of every file of a checkpoint, so that none is believed unseen.

    {"format": 6, "files": {"model.safetensors": {"bytes": 123456, "crc32": "9ae0daaf"}, …}}

It is written last of all, before the checkpoint's folder gets its name: what it lists was whole on the disk by then.
Every rank takes the checksums of what it wrote itself. Before anything is loaded the files are compared with it, so a
flipped bit, a file cut short, two files swapped or a number edited by hand is named instead of trained on. Checkpoints
that were written before there were manifests have none, and are taken as they are.

CRC-32 is for accidents, which it misses once in four thousand million; it reads files more than twice as fast as
SHA-256. It is no signature: files from elsewhere are safe because none is read with an unrestricted pickle.
"""

import json
import os
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.checkpoint.layout import CONFIG, PROGRESS, WEIGHTS, get_run_of_checkpoint, list_checkpoints
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, describe_cause

MANIFEST = "manifest.json"
FORMAT = 6
"""Of checkpoints as they are written now. It rises when what one holds changes its meaning; see `stored_config.py`."""

MODEL_FILES = (CONFIG, PROGRESS, WEIGHTS)
"""The files that a model is rebuilt from. Every checkpoint has them."""

REWRITE_HINT = "to begin anew choose another folder, or remove this one"
STATES = "states"
"""The folder that every checkpoint since format 3 has, and none before."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileChecksum:
    """What is known of one file."""

    bytes: int
    crc32: str
    """Eight hexadecimal digits."""


def compute_checksums(checkpoint: Path, paths: Iterable[Path]) -> dict[str, FileChecksum]:
    """Bring files to the disk and describe them, by their names within the checkpoint.

    Raises OSError if the disk refuses.
    """
    entries = {}
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        entries[path.relative_to(checkpoint).as_posix()] = FileChecksum(path.stat().st_size, _crc32(path))
    return entries


def write_manifest(checkpoint: Path, entries: Mapping[str, FileChecksum], name: str = MANIFEST) -> None:
    """Write the manifest and bring it, and all folders of the checkpoint, to the disk. Raises OSError if it refuses."""
    content = {"format": FORMAT, "files": {file: asdict(entries[file]) for file in sorted(entries)}}
    with open(checkpoint / name, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for folder in (*(path for path in checkpoint.rglob("*") if path.is_dir()), checkpoint):
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_checksums(checkpoint: Path) -> bool:
    """Was it written with a manifest?"""
    return (checkpoint / MANIFEST).exists()


def read_format_version(checkpoint: Path) -> int:
    """The format a checkpoint was written in; 0 for those without a manifest.

    Raises RunError: a later version wrote it, or the manifest is damaged.
    """
    if not has_checksums(checkpoint):
        return 0
    try:
        number = parse_json((checkpoint / MANIFEST).read_text(encoding="utf-8"))["format"]
        if not isinstance(number, int) or number < 1:
            raise ValueError
    except (OSError, ValueError, LookupError, TypeError):
        raise RunError(f"{checkpoint}: {MANIFEST} cannot be read") from None
    if number > FORMAT:
        raise RunError(
            f"{checkpoint}: a later version of this program wrote it (format {number}); this one reads up to {FORMAT}"
        )
    return number


def find_damage(
    checkpoint: Path,
    only: Collection[str] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    checksums: bool = True,
) -> str | None:
    """The first difference between a checkpoint's files and its manifest, in words; None if there is none.

    Without a manifest nothing is compared: the files of the model must be there, that is all that can be said.

    Args:
        checkpoint: its folder.
        only: names of the files to look at; None means all, and then a file that does not belong into one of its
            folders is a difference too.
        rank, world_size: of several processes each computes the checksums of its share of the files.
        checksums: look at every byte, and not at names and sizes alone.
    """
    for name in MODEL_FILES:
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    if not has_checksums(checkpoint):
        return f"{MANIFEST} is missing" if (checkpoint / STATES).is_dir() else None
    try:
        read_format_version(checkpoint)
    except RunError as error:
        return str(error).removeprefix(f"{checkpoint}: ")
    entries = read_manifest(checkpoint / MANIFEST)
    if entries is None:
        return f"{MANIFEST} cannot be read"
    names = sorted(entries) if only is None else list(only)
    unlisted = [name for name in (*MODEL_FILES, *names) if name not in entries]
    if only is None:
        inside = (path for path in checkpoint.glob("*/**/*") if path.is_file() and not path.name.startswith("."))
        unlisted += sorted({path.relative_to(checkpoint).as_posix() for path in inside} - set(entries))
    if unlisted:
        return f"{unlisted[0]} is not in its {MANIFEST}"
    return find_difference(
        checkpoint, {name: entries[name] for name in names}, rank=rank, world_size=world_size, checksums=checksums
    )


def find_difference(
    folder: Path, entries: Mapping[str, FileChecksum], *, rank: int = 0, world_size: int = 1, checksums: bool = True
) -> str | None:
    """The first difference between files of a folder and what was written of them, in words; None if there is none.

    rank, world_size, checksums: as of `find_damage`.
    """
    for name in entries:
        path, expected = folder / name, entries[name].bytes
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != expected:
            return f"{name} has {size:,} bytes, {expected:,} were written"
    for name in sorted(entries, key=lambda name: (-entries[name].bytes, name))[rank::world_size] if checksums else ():
        try:
            checksum = _crc32(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({describe_cause(error)})"
        if checksum != entries[name].crc32:
            return f"{name} is not as it was written: its checksum is {checksum}, not {entries[name].crc32}"
    return None


def verify_checkpoint(checkpoint: Path, only: Collection[str]) -> None:
    """Raises RunError, with what else of its run can be read, if one of these files of a checkpoint is damaged."""
    if (problem := find_damage(checkpoint, only)) is not None:
        raise RunError(f"{checkpoint}: is damaged: {problem}; {_describe_other_checkpoints(checkpoint)}")


def _describe_other_checkpoints(checkpoint: Path) -> str:
    """What else of the same run can be read, in words."""
    others = [path for path in list_checkpoints(get_run_of_checkpoint(checkpoint)) if path.name != checkpoint.name]
    valid = (path.name for path in reversed(others) if find_damage(path, MODEL_FILES) is None)
    if (newest := next(valid, None)) is not None:
        return f"the newest other one that is whole is {newest}"
    return "its other checkpoints are damaged too" if others else "there is no other"


def find_latest_valid(run: str | Path) -> Path | None:
    """The newest checkpoint of a run whose files are as they were written; None if the run has none.

    Raises RunError: there are checkpoints, and all are damaged.
    """
    problems = []
    for checkpoint in reversed(list_checkpoints(run)):
        problem = find_damage(checkpoint)
        if problem is None:
            return checkpoint
        problems.append(f"{checkpoint}: {problem}")
    if problems:
        raise RunError(f"{run}: no checkpoint in it is whole: {'; '.join(problems)}; {REWRITE_HINT}")
    return None


def read_manifest(path: Path) -> dict[str, FileChecksum] | None:
    """The entries of a manifest; None if it is not one."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        return {
            name: FileChecksum(int(entry["bytes"]), str(entry["crc32"])) for name, entry in content["files"].items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _crc32(path: Path) -> str:
    """The CRC-32 of a file. Reading and computing let other threads run."""
    value = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"

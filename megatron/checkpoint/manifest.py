"""Format of a checkpoint: the checksums of its files, and the migration of its configuration and weight names.

    {"format": 6, "files": {"model.safetensors": {"bytes": 123456, "crc32": "9ae0daaf"}, …}}

`manifest.json` is written last, before the checkpoint's folder is renamed, so all files it lists are complete on disk.
Each rank computes the checksums of the files it wrote. Before anything is loaded, the files are compared with the
manifest. A flipped bit, a truncated file, swapped files or a number edited by hand therefore raise an error instead of
being trained on. Checkpoints that predate manifests are loaded without verification.

CRC-32 detects accidents, except for about one in four billion, and is more than twice as fast as SHA-256. It is not a
signature: files from untrusted sources are safe because none is read with an unrestricted pickle.

A checkpoint's configuration was valid when it was written. It therefore bypasses the loader of configuration files and
the checks across keys: both change with the project, and a run must not become unreadable. The format number in its
manifest identifies how it was written; `MIGRATIONS` and `WEIGHT_RENAMES` translate it to the current format. To remove
or rename a key or a weight, or to change a key's meaning, raise `FORMAT` and add a migration.
`tests/checkpoint/formats` contains a checkpoint of every format.
"""

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.checkpoint.layout import PROGRESS, WEIGHTS, get_run_of_checkpoint, list_checkpoints
from megatron.config.schema import CONFIG_FILE, Config, describe_validation_error, map_key_owners
from megatron.config.yaml_files import read_yaml
from megatron.options.model import GATED_ACTIVATIONS, compute_intermediate_size
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, UserError, check_reachable, describe_cause

MANIFEST = "manifest.json"
FORMAT = 6
"""Format version of new checkpoints. It increases when the meaning of their content changes (`MIGRATIONS`)."""

MODEL_FILES = (CONFIG_FILE, PROGRESS, WEIGHTS)
"""Files required to rebuild a model. Every checkpoint has them."""

REWRITE_HINT = "to start over, choose another folder or remove this one"
STATES = "states"
"""Folder present in every checkpoint since format 3, and in none before."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileChecksum:
    """Size and checksum of one file."""

    bytes: int
    crc32: str
    """CRC-32 as eight hexadecimal digits."""


def compute_checksums(checkpoint: Path, paths: Iterable[Path]) -> dict[str, FileChecksum]:
    """Sync files to disk and return their checksums by name within the checkpoint.

    Raises OSError if the disk fails.
    """
    entries = {}
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        entries[path.relative_to(checkpoint).as_posix()] = FileChecksum(path.stat().st_size, _compute_crc32(path))
    return entries


def write_manifest(checkpoint: Path, entries: Mapping[str, FileChecksum], name: str = MANIFEST) -> None:
    """Write the manifest and sync it, and all folders of the checkpoint, to disk. Raises OSError if the disk fails."""
    content = {"format": FORMAT, "files": {file: asdict(entries[file]) for file in sorted(entries)}}
    with open(checkpoint / name, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for folder in (*(path for path in checkpoint.rglob("*") if path.is_dir()), checkpoint):
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_checksums(checkpoint: Path) -> bool:
    """Return True if the checkpoint was written with a manifest."""
    return (checkpoint / MANIFEST).exists()


def read_format_version(checkpoint: Path) -> int:
    """Return the format version of a checkpoint; 0 if it has no manifest.

    Raises RunError if a later version wrote it or the manifest is damaged, PermissionError if it may not be read.
    """
    if not has_checksums(checkpoint):
        return 0
    try:
        number = parse_json((checkpoint / MANIFEST).read_text(encoding="utf-8"))["format"]
        if not isinstance(number, int) or number < 1:
            raise ValueError
    except PermissionError:
        raise
    except (OSError, ValueError, LookupError, TypeError):
        raise RunError(f"{checkpoint}: {MANIFEST} cannot be read") from None
    if number > FORMAT:
        raise RunError(
            f"{checkpoint}: written by a later version of this program (format {number}); this version reads up to "
            f"{FORMAT}"
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
    """Return the first difference between a checkpoint's files and its manifest as text, or None if there is none.

    Without a manifest, only the presence of the model's files is checked.

    Args:
        checkpoint: folder of the checkpoint.
        only: names of the files to compare. None compares all and also reports unlisted files in subfolders.
        rank, world_size: each process computes the checksums of its share of the files.
        checksums: compare every byte rather than only names and sizes.

    Raises PermissionError if a file may not be read, which is no damage.
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
        return f"{unlisted[0]} is not listed in {MANIFEST}"
    return find_difference(
        checkpoint, {name: entries[name] for name in names}, rank=rank, world_size=world_size, checksums=checksums
    )


def find_difference(
    folder: Path, entries: Mapping[str, FileChecksum], *, rank: int = 0, world_size: int = 1, checksums: bool = True
) -> str | None:
    """Return the first difference between files of a folder and their recorded entries as text, or None.

    rank, world_size, checksums, and errors: as in `find_damage`.
    """
    for name in entries:
        path, expected = folder / name, entries[name].bytes
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != expected:
            return f"{name} has {size:,} bytes instead of {expected:,}"
    for name in sorted(entries, key=lambda name: (-entries[name].bytes, name))[rank::world_size] if checksums else ():
        try:
            checksum = _compute_crc32(folder / name)
        except PermissionError:
            raise
        except OSError as error:
            return f"{name} cannot be read ({describe_cause(error)})"
        if checksum != entries[name].crc32:
            return f"{name} changed since it was written: its checksum is {checksum}, not {entries[name].crc32}"
    return None


def verify_checkpoint(checkpoint: Path, only: Collection[str]) -> None:
    """Raise RunError if one of these files of a checkpoint is damaged, and suggest another checkpoint of the run."""
    if (problem := find_damage(checkpoint, only)) is not None:
        raise RunError(f"{checkpoint}: damaged: {problem}; {_describe_other_checkpoints(checkpoint)}")


def _describe_other_checkpoints(checkpoint: Path) -> str:
    """Return a clause about the other readable checkpoints of the same run."""
    others = [path for path in list_checkpoints(get_run_of_checkpoint(checkpoint)) if path.name != checkpoint.name]
    valid = (path.name for path in reversed(others) if find_damage(path, MODEL_FILES) is None)
    if (newest := next(valid, None)) is not None:
        return f"newest undamaged one: {newest}"
    return "the run's other checkpoints are damaged too" if others else "the run has no other checkpoint"


def find_latest_valid(run: str | Path) -> Path | None:
    """Return the newest checkpoint of a run with unchanged files, or None if the run has no checkpoints.

    The run may be training: if it replaces its checkpoints meanwhile, the new ones are read.

    Raises RunError if there are checkpoints but all are damaged.
    """
    while checkpoints := list_checkpoints(run):
        problems = []
        for checkpoint in reversed(checkpoints):
            problem = find_damage(checkpoint)
            if problem is None:
                return checkpoint
            problems.append(f"{checkpoint}: {problem}")
        if list_checkpoints(run) == checkpoints:
            raise RunError(f"{run}: all checkpoints are damaged: {'; '.join(problems)}; {REWRITE_HINT}")
    return None


def read_manifest(path: Path) -> dict[str, FileChecksum] | None:
    """Return the entries of a manifest, or None if it is invalid. Raises PermissionError if it may not be read."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        return {
            name: FileChecksum(int(entry["bytes"]), str(entry["crc32"])) for name, entry in content["files"].items()
        }
    except PermissionError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _compute_crc32(path: Path) -> str:
    """Return the CRC-32 of a file. Reading and computing release the GIL."""
    value = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


ConfigValues = dict[str, Any]


def _split_bias_key(values: ConfigValues) -> None:
    """Copy use_bias_in_attn_linear, which until format 1 also applied to the feed-forward layer, to use_bias_in_mlp."""
    values["use_bias_in_mlp"] = values.get("use_bias_in_attn_linear", True)


def _scale_gated_width(values: ConfigValues) -> None:
    """Scale intermediate_size, which until format 3 was the width of a gated layer, by default 4 × hidden_size."""
    if (activation := values.get("activation")) in GATED_ACTIVATIONS:
        width = values.get("intermediate_size") or 4 * values["hidden_size"]
        values["intermediate_size"] = compute_intermediate_size(width, activation)


def _keep_scaled_cope(values: ConfigValues) -> None:
    """Set `scaled` for cope, which until format 5 always divided its query-table products by √d."""
    names = values.get("pos_emb", "learned")
    if "cope" in (names if isinstance(names, list) else [names]):
        values["pos_emb_options"] = {"scaled": True} | (values.get("pos_emb_options") or {})


MIGRATIONS: Mapping[int, Callable[[ConfigValues], None]] = {
    1: _split_bias_key,
    3: _scale_gated_width,
    5: _keep_scaled_cope,
}
"""Functions that update the flat keys of a format to the next one; formats without an entry need no change.

Format 0 is that of checkpoints that predate manifests.
"""

WEIGHT_RENAMES: Mapping[int, tuple[str, str]] = {
    4: (".self_attention.core_attention._own.", ".self_attention.core_attention.position.")
}
"""Replacements in the names of weights and optimizer states, from a format to the next one."""


def migrate_weight_name(name: str, written: int) -> str:
    """Return the current name of a weight that a checkpoint of the format `written` calls `name`."""
    for number in range(written, FORMAT):
        if number in WEIGHT_RENAMES:
            name = name.replace(*WEIGHT_RENAMES[number])
    return name


def map_to_stored_names(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the name in the files for the current name of each of a checkpoint's weights.

    Args:
        checkpoint: folder of the checkpoint.
        names: names of the weights in the files.

    Raises RunError if its manifest is damaged or a later version wrote it.
    """
    written = read_format_version(checkpoint)
    return {migrate_weight_name(name, written): name for name in names}


def load_checkpoint_config(checkpoint: Path) -> Config:
    """Return the configuration of the run that wrote a checkpoint.

    Raises RunError if it is missing or damaged, or a later version wrote it.
    """
    path = Path(checkpoint) / CONFIG_FILE
    if not path.is_file():
        check_reachable(path)
        raise RunError(f"{path}: not found; the checkpoint is damaged")
    written = read_format_version(Path(checkpoint))
    try:
        values = dict(read_yaml(path).values)
        for number in range(written, FORMAT):
            MIGRATIONS.get(number, lambda values: None)(values)
        if unknown := sorted(set(values) - map_key_owners().keys()):
            raise UserError(f"unknown key {unknown[0]!r} for checkpoint format {written}")
        return Config.from_flat(values)
    except ValidationError as error:
        problem = next(describe_validation_error(error, lambda _: None))
    except UserError as error:
        problem = str(error).removeprefix(f"{path}: ")
    raise RunError(f"{path}: not a checkpoint's configuration: {problem}")

"""Request of an export: the run, the folder to create and the options, checked before the model is built."""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.trained_run import TrainedRun, open_run
from megatron.conversion.families.farfield import FARFIELD, TOKENIZER_CONFIG_FILE, TOKENIZER_TYPE_KEY
from megatron.conversion.hf_checkpoint import find_exact_family
from megatron.conversion.model_family import ModelFamily
from megatron.utils.atomic_directory import FolderVersion, read_folder_version
from megatron.utils.atomic_io import check_new_folder, parse_json
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices

DTYPES = ("float32", "bfloat16", "float16")
_EXPORT_FILE_NAMES = re.compile(
    r"[\w-]+\.py|[\w.-]+\.json|model[\w-]*\.safetensors|README\.md|results\.png|merges\.txt|tokenizer\.model"
)
"""Names of files that an export may contain."""
_SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class ExportRequest:
    """Valid request of an export."""

    run: TrainedRun
    target: Path
    family: ModelFamily
    """Family of transformers models that the export belongs to."""
    dtype: str
    max_shard_bytes: int
    license: str | None
    replaced_version: FolderVersion | None
    """Version of the existing export, or None if there is none."""

    @property
    def is_native(self) -> bool:
        """True if transformers has the model's class, so that the export contains no code."""
        return self.family is not FARFIELD


def read_export_request(
    source: str | Path,
    target: str | Path,
    *,
    native: bool = False,
    dtype: str = "float32",
    max_shard_size: str = "2GB",
    license: str | None = None,
    overwrite: bool = False,
) -> ExportRequest:
    """Open the run to export, and check the target and the options. For arguments see `export_model`.

    Raises:
        UserError: the run does not exist, `target` is something else or not writable, or no native model, or none in
            transformers at all, computes the same results.
        RunError: the checkpoint is damaged.
    """
    max_shard_bytes = _parse_size(max_shard_size)
    if dtype not in DTYPES:
        raise UserError(f"--dtype: unknown value {dtype!r}; {format_choices(dtype, DTYPES)}")
    run, target = open_run(source), Path(target)
    replaced_version = read_folder_version(target)
    _check_target(target, overwrite)  # before a family that needs PyTorch to decide
    family = _find_native_family(run) if native else FARFIELD
    if (reason := family.describe_unsupported(run.config)) is not None:
        raise UserError(f"{run.name}: cannot be exported: {reason}")
    return ExportRequest(run, target, family, dtype, max_shard_bytes, license, replaced_version)


def _find_native_family(run: TrainedRun) -> ModelFamily:
    family, reasons = find_exact_family(run.config)
    if family is None:
        common_reasons = {reason.partition(";")[0] for reason in reasons.values()}
        messages = (
            common_reasons if len(common_reasons) == 1 else [f"{name}: {reason}" for name, reason in reasons.items()]
        )
        raise UserError(
            f"--native: no native transformers model computes the same as {run.name} with pos_emb "
            f"{run.config.position.pos_emb}: {', '.join(messages)}; omit --native"
        )
    return family


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]B)", text.strip().upper())
    if match is None or int(match[1]) < 1:
        raise UserError(f"--shard is {text!r}; it must be a size with its unit, such as 500MB or 2GB")
    return int(match[1]) * _SIZE_UNITS[match[2]]


def _check_target(target: Path, overwrite: bool) -> None:
    """Reject a target that is not an export to replace, or cannot be created. Raises UserError."""
    check_new_folder("--output", target)
    if not target.exists():
        return
    file_names = sorted(path.name for path in target.iterdir())
    if file_names and not overwrite:
        raise UserError(f"{target}: is not empty; choose another folder, or replace an export with --overwrite")
    if file_names and not _is_export(target):
        raise UserError(f"{target}: is not empty and not an export; --overwrite replaces only exports")
    if foreign_files := [
        name for name in file_names if not _EXPORT_FILE_NAMES.fullmatch(name) or (target / name).is_dir()
    ]:
        raise UserError(
            f"{target}: contains {foreign_files[0]} in addition to an export, which --overwrite would delete; move it "
            "away"
        )


def _is_export(folder: Path) -> bool:
    """Return True if this project wrote the export; only its exports name one of its tokenizer types."""
    try:
        values = parse_json((folder / TOKENIZER_CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and TOKENIZER_TYPE_KEY in values

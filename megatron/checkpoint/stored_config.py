"""Configuration and weight names of a checkpoint, migrated to the current format.

A checkpoint's configuration was valid when it was written. It therefore bypasses the loader of configuration files and
the checks across keys: both change with the project, and a run must not become unreadable. The format number in its
manifest identifies how it was written; `MIGRATIONS` and `WEIGHT_RENAMES` translate it to the current format. To remove
or rename a key or a weight, or to change a key's meaning, raise `manifest.FORMAT` and add a migration.
`tests/checkpoint/formats` contains a checkpoint of every format.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.checkpoint import manifest
from megatron.checkpoint.layout import CONFIG
from megatron.config.schema import Config, describe_validation_error, map_key_owners
from megatron.config.yaml_files import read_yaml
from megatron.options.model import GATED_ACTIVATIONS, compute_intermediate_size
from megatron.utils.errors import RunError, UserError, check_reachable

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
    for number in range(written, manifest.FORMAT):
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
    written = manifest.read_format_version(checkpoint)
    return {migrate_weight_name(name, written): name for name in names}


def load_checkpoint_config(checkpoint: Path) -> Config:
    """Return the configuration of the run that wrote a checkpoint.

    Raises RunError if it is missing or damaged, or a later version wrote it.
    """
    path = Path(checkpoint) / CONFIG
    if not path.is_file():
        check_reachable(path)
        raise RunError(f"{path}: not found; the checkpoint is damaged")
    written = manifest.read_format_version(Path(checkpoint))
    try:
        values = dict(read_yaml(path).values)
        for number in range(written, manifest.FORMAT):
            MIGRATIONS.get(number, lambda values: None)(values)
        if unknown := sorted(set(values) - map_key_owners().keys()):
            raise UserError(f"no checkpoint of format {written} has the key {unknown[0]!r}")
        return Config.from_flat(values)
    except ValidationError as error:
        problem = next(describe_validation_error(error, lambda _: None))
    except UserError as error:
        problem = str(error).removeprefix(f"{path}: ")
    raise RunError(f"{path}: not a checkpoint's configuration: {problem}")

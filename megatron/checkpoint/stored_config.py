"""The configuration of a checkpoint, and the names of its weights, in today's terms.

What a checkpoint holds was right when it was written, so it passes neither the loader of configuration files nor the
checks across keys: both change with the project, and a run must not be lost to a later opinion. Its manifest's format
number says how it was written, and `MIGRATIONS` and `WEIGHT_RENAMES` what that means now. Whoever removes or renames a
key or a weight, or gives a key another meaning, raises `manifest.FORMAT` and adds a migration;
`tests/checkpoint/formats` holds a checkpoint of every format that there was.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.checkpoint import manifest
from megatron.checkpoint.layout import CONFIG
from megatron.config.schema import Config, map_key_owners
from megatron.config.validation_errors import describe_validation_error
from megatron.config.yaml_files import read_yaml
from megatron.options.model import GATED_ACTIVATIONS, intermediate_size_of
from megatron.utils.errors import RunError, UserError

ConfigValues = dict[str, Any]


def _split_bias_key(values: ConfigValues) -> None:
    """Until format 1, use_bias_in_attn_linear was for the feed-forward layer too."""
    values["use_bias_in_mlp"] = values.get("use_bias_in_attn_linear", True)


def _scale_gated_width(values: ConfigValues) -> None:
    """Until format 3, intermediate_size was the width of a gated feed-forward layer, and 4 × hidden_size by default."""
    if (activation := values.get("activation")) in GATED_ACTIVATIONS:
        width = values.get("intermediate_size") or 4 * values["hidden_size"]
        values["intermediate_size"] = intermediate_size_of(width, activation)


def _keep_scaled_cope(values: ConfigValues) -> None:
    """Until format 5, cope divided the products of queries with its table by √d, which is its option `scaled` now."""
    names = values.get("pos_emb", "learned")
    if "cope" in (names if isinstance(names, list) else [names]):
        values["pos_emb_options"] = {"scaled": True} | (values.get("pos_emb_options") or {})


MIGRATIONS: Mapping[int, Callable[[ConfigValues], None]] = {
    1: _split_bias_key,
    3: _scale_gated_width,
    5: _keep_scaled_cope,
}
"""What has to change in the flat keys of a format to make them the next one's; a format that is absent needs nothing.
Format 0 is that of checkpoints from before there were manifests."""

WEIGHT_RENAMES: Mapping[int, tuple[str, str]] = {
    4: (".self_attention.core_attention._own.", ".self_attention.core_attention.position.")
}
"""What in the names of a format's weights, and of their optimizer states, is something else in the next one's."""


def migrate_weight_name(name: str, written: int) -> str:
    """Today's name of a weight that a checkpoint of the format `written` holds under `name`."""
    for number in range(written, manifest.FORMAT):
        if number in WEIGHT_RENAMES:
            name = name.replace(*WEIGHT_RENAMES[number])
    return name


def map_to_stored_names(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    """For today's name of each of a checkpoint's weights the one that it has in the files.

    Args:
        checkpoint: its folder.
        names: of the weights as they are in the files.

    Raises RunError: its manifest is damaged, or a later version wrote it.
    """
    written = manifest.read_format_version(checkpoint)
    return {migrate_weight_name(name, written): name for name in names}


def load_checkpoint_config(checkpoint: Path) -> Config:
    """The configuration of the run that wrote a checkpoint.

    Raises RunError: it is missing or damaged, or a later version wrote it.
    """
    path = Path(checkpoint) / CONFIG
    if not path.is_file():
        raise RunError(f"{path}: is missing; the checkpoint is damaged")
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
    raise RunError(f"{path}: not the configuration of a checkpoint: {problem}")

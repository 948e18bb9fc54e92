"""`./deepy.py export --refresh FOLDER`: update the code of an export that an earlier version wrote.

Weights, tokenizer and model card are unchanged. config.json gets keys that the new code needs and earlier versions did
not write; results are unchanged. New code files have different names (`modeling_code.add_content_digest`), and
config.json, which is replaced atomically, selects the files to run. A reader sees either the old model or the new one.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.conversion.families.farfield import (
    ADD_BOS_KEY,
    AUTO_MAP,
    FARFIELD,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_TYPE_KEY,
)
from megatron.conversion.hf_checkpoint import build_hf_source, read_json_object
from megatron.conversion.hf_config import HF_TRAINING_KEYS, IGNORED_KEYS, find_code_suffix, strip_repository_prefix
from megatron.conversion.hf_tokenizer import build_tokenization_code, name_tokenizer_class
from megatron.conversion.model_family import HF_CONFIG_FILE
from megatron.conversion.modeling_code import add_content_digest, bundle_modeling_code, remove_content_digest
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import UserError, check_reachable
from megatron.utils.formatting import format_quantity

_CODE_FILE = re.compile(r"\w+(_[0-9a-f]{8})\.py")


def refresh_export(folder: str | Path, *, overwrite: bool = False, log: Callable[[str], object] = print) -> Path:
    """Update the code of an export, and the keys of its configuration.

    Args:
        folder: the export, or a finetuned copy saved by transformers.
        overwrite: also replace edited code; the edited files stay in the folder but are no longer run.

    Raises:
        UserError: there is no such export, its code was edited, or this version does not support the model.
        RunError: its weights do not match its configuration, or the disk fails.
    """
    folder = Path(folder)
    read = _read_config(folder)
    values = {**read, "auto_map": _find_own_classes(read["auto_map"])}
    source = build_hf_source(folder, values)
    config = source.build_config()
    with source.open_weights(config) as weights:
        weights.check_names([mapping.megatron_name for mapping in FARFIELD.weight_mappings(config)])
    position = config.position
    code, suffix = add_content_digest(
        bundle_modeling_code(position.encodings, position.processors, position.temperatures)
    )
    new_values = _add_keys(values, FARFIELD.to_hf_keys(config))
    old_suffixes = {find_code_suffix(values["auto_map"]["AutoConfig"])}
    new_values["auto_map"] = {name: class_name.replace(".", f"{suffix}.") for name, class_name in AUTO_MAP.items()}
    configs = {HF_CONFIG_FILE: (read, new_values)}
    tokenizer_values = _read_tokenizer_config(folder)
    if old_class := _find_tokenizer_class(tokenizer_values):
        files, tokenizer_suffix = build_tokenization_code()
        code |= files
        old_suffixes.add(find_code_suffix(old_class))
        # Earlier exports name a bos_token only if they add it, and transformers 5 omits add_bos_token when it saves.
        add_bos = tokenizer_values.get("add_bos_token", "bos_token" in tokenizer_values)
        renewed = {ADD_BOS_KEY: add_bos, **tokenizer_values, "auto_map": name_tokenizer_class(tokenizer_suffix)}
        configs[TOKENIZER_CONFIG_FILE] = (tokenizer_values, renewed)
    if tokenizer_values.get("model_max_length") == config.model.seq_length:  # what earlier versions wrote
        renewed = configs.get(TOKENIZER_CONFIG_FILE, (tokenizer_values, tokenizer_values))[1]
        renewed = {**renewed, "model_max_length": new_values["max_position_embeddings"]}
        configs[TOKENIZER_CONFIG_FILE] = (tokenizer_values, renewed)
    unchanged, edited = _sort_old_code(folder, old_suffixes)
    if edited and not overwrite:
        raise UserError(
            f"{folder}: {_name_files(edited)} may have been edited since the export; use --overwrite to run the code "
            "of this version instead and keep the edited files"
        )
    _write(folder, code, configs)
    for name in unchanged.keys() - code.keys():
        (folder / name).unlink()
    _report(folder, code, unchanged, edited, configs, log)
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises UserError if its code cannot be updated."""
    if not folder.is_dir():
        check_reachable(folder)
        raise UserError(f"{folder}: no such folder; give the folder of an export")
    if not (folder / HF_CONFIG_FILE).exists():
        raise UserError(f"{folder}: not an export: {HF_CONFIG_FILE} is missing")
    values = read_json_object(folder / HF_CONFIG_FILE)
    classes = values.get("auto_map")
    if values.get("model_type") != FARFIELD.model_type or not isinstance(classes, dict) or not classes:
        raise UserError(
            f"{folder}: model_type is {values.get('model_type')!r}; --refresh updates the code of exports of this "
            "project"
        )
    return values


def _find_own_classes(classes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `auto_map` as in an export.

    For a model that was loaded and saved, transformers writes a different one: only the classes used to load it,
    prefixed with the folder.
    """
    local = {name: strip_repository_prefix(text) for name, text in classes.items() if isinstance(text, str)}
    suffix = find_code_suffix(next(iter(local.values()), ""))
    own = {name: text.replace(".", f"{suffix}.") for name, text in AUTO_MAP.items()}
    return own if local.items() <= own.items() else classes


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, or an empty mapping if the tokenizer is not one of ours."""
    path = folder / TOKENIZER_CONFIG_FILE
    values = read_json_object(path) if path.is_file() else {}
    return values if TOKENIZER_TYPE_KEY in values else {}


def _find_tokenizer_class(values: Mapping[str, Any]) -> str | None:
    """Return the class in a tokenizer's configuration, or None if it is part of transformers."""
    classes = values.get("auto_map")
    names = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    return next((name for name in names if isinstance(name, str)), None) if isinstance(names, list) else None


def _add_keys(values: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with missing keys of this version's exports added.

    Existing values are kept, except for method options, which are written explicitly if a default has changed
    (`families/farfield.py` interprets earlier versions), and for the longest input, which the other keys determine.
    """
    unread = {*IGNORED_KEYS, *HF_TRAINING_KEYS}
    changed = {
        name: value
        for name, value in written.items()
        if (name not in values and name not in unread)
        or ((name.endswith("_options") or name == "max_position_embeddings") and values.get(name) != value)
    }
    return {**values, **changed}


def _sort_old_code(folder: Path, run: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return the unmodified code files of an export, by name, and the names of files that may have been edited.

    Args:
        run: suffixes of the files in use; empty for exports that predate suffixes.
    """
    sets: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*.py")):
        if match := _CODE_FILE.fullmatch(path.name):
            sets.setdefault(match[1], {})[path.name] = path.read_text(encoding="utf-8", errors="replace")
    unchanged: dict[str, str] = {}
    edited: list[str] = []
    for suffix, files in sets.items():
        if add_content_digest(remove_content_digest(files, suffix))[1] == suffix:
            unchanged |= files
        elif suffix in run:
            edited += files
    if "" in run:
        edited += [path.name for path in sorted(folder.glob("*.py")) if not _CODE_FILE.fullmatch(path.name)]
    return unchanged, edited


def _write(folder: Path, code: Mapping[str, str], configs: Mapping[str, tuple[Any, Any]]) -> None:
    """Write code files first, then the configuration files that refer to them."""
    for name, text in code.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
            write_text_atomically(path, text)
    for name, (old, new) in configs.items():
        if old != new:
            write_text_atomically(folder / name, json.dumps(new, indent=2, ensure_ascii=False) + "\n")


def _report(
    folder: Path,
    code: Mapping[str, str],
    unchanged: Mapping[str, str],
    edited: list[str],
    configs: Mapping[str, tuple[dict[str, Any], dict[str, Any]]],
    log: Callable[[str], object],
) -> None:
    removed, added = sorted(unchanged.keys() - code.keys()), sorted(code.keys() - unchanged.keys())
    for name, (old, new) in configs.items():
        if keys := [key for key in new if key != "auto_map" and (key not in old or old[key] != new[key])]:
            log(f"{folder / name}: set {', '.join(keys)}")
    if added:
        instead = f" instead of {_count_files(removed)}" if removed else ""
        log(f"{folder}: wrote {_count_files(added)}{instead}")
    else:
        log(f"{folder}: already has the code of this version")
    if edited:
        log(f"note: {_name_files(edited)} are kept in {folder} but no longer run")
    if "document_end_token_id" not in configs[HF_CONFIG_FILE][1]:
        end = configs[HF_CONFIG_FILE][1].get("eos_token_id")
        log(
            f"note: {folder / HF_CONFIG_FILE} does not record whether the run was trained with attention_mask: "
            f"document; if it was, add document_end_token_id: {end}"
        )


def _count_files(names: list[str]) -> str:
    suffixes = sorted({match[1] for name in names if (match := _CODE_FILE.fullmatch(name))})
    return f"{format_quantity(len(names), 'code file')} ({', '.join(suffixes)})"


def _name_files(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

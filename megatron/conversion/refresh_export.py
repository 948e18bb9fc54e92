"""`./deepy.py export --refresh FOLDER`: the code of this version for an export that an earlier one wrote.

Weights, tokenizer and model card stay as they are. config.json gets the keys that the code needs and that an earlier
version did not write; what it computes is the same. New files of code have other names than old ones
(`modeling_code.add_content_digest`), and config.json, replaced in one step, says which are run: a reader sees the old
model or the new one.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.conversion.families.farfield import AUTO_MAP, FARFIELD, TOKENIZER_CONFIG_FILE, TOKENIZER_TYPE_KEY
from megatron.conversion.hf_checkpoint import build_hf_source, read_json_object
from megatron.conversion.hf_config import HF_TRAINING_KEYS, IGNORED_KEYS, find_code_suffix
from megatron.conversion.hf_tokenizer import build_tokenization_code, name_tokenizer_class
from megatron.conversion.model_family import HF_CONFIG_FILE
from megatron.conversion.modeling_code import add_content_digest, bundle_modeling_code, remove_content_digest
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import UserError

_CODE_FILE = re.compile(r"\w+(_[0-9a-f]{8})\.py")
_REPOSITORY_PREFIX = re.compile(r"^.*--")
"""Prefix that transformers gives to the name of a module from another folder or from the Hub."""


def refresh_export(folder: str | Path, *, overwrite: bool = False, log: Callable[[str], object] = print) -> Path:
    """Renew the code of an export, and the keys of its configuration.

    Args:
        folder: the export, or one that was finetuned and saved by transformers.
        overwrite: renew code that was edited, too; the edited files stay in the folder, and are run no longer.

    Raises:
        UserError: there is no such export, its code was edited, or it cannot be a model of this version.
        RunError: its weights do not fit its configuration, or the disk refuses.
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
        renewed = {**tokenizer_values, "auto_map": name_tokenizer_class(tokenizer_suffix)}
        configs[TOKENIZER_CONFIG_FILE] = (tokenizer_values, renewed)
    unchanged, edited = _sort_old_code(folder, old_suffixes)
    if edited and not overwrite:
        raise UserError(
            f"{folder}: {_name_files(edited)} may have been edited since the export; --overwrite runs the code of this "
            "version instead, and keeps the edited files"
        )
    _write(folder, code, configs)
    for name in unchanged.keys() - code.keys():
        (folder / name).unlink()
    _report(folder, code, unchanged, edited, configs, log)
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises UserError: it is of no model whose code we renew."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name an export")
    if not (folder / HF_CONFIG_FILE).exists():
        raise UserError(f"{folder}: not an export: it has no {HF_CONFIG_FILE}")
    values = read_json_object(folder / HF_CONFIG_FILE)
    classes = values.get("auto_map")
    if values.get("model_type") != FARFIELD.model_type or not isinstance(classes, dict) or not classes:
        raise UserError(
            f"{folder}: model_type is {values.get('model_type')!r}; --refresh renews the code of an export of this "
            "project, and there is none here"
        )
    return values


def _find_own_classes(classes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `auto_map` as an export has it; transformers writes another one for a model that it loaded and saved: the
    classes that it was loaded by, and the folder before their names."""
    local = {name: _REPOSITORY_PREFIX.sub("", text) for name, text in classes.items() if isinstance(text, str)}
    suffix = find_code_suffix(next(iter(local.values()), ""))
    own = {name: text.replace(".", f"{suffix}.") for name, text in AUTO_MAP.items()}
    return own if local.items() <= own.items() else classes


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; nothing for a tokenizer that is none of ours."""
    path = folder / TOKENIZER_CONFIG_FILE
    values = read_json_object(path) if path.is_file() else {}
    return values if TOKENIZER_TYPE_KEY in values else {}


def _find_tokenizer_class(values: Mapping[str, Any]) -> str | None:
    """Return the class that a tokenizer's configuration names, or None if transformers has it itself."""
    classes = values.get("auto_map")
    names = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    return next((name for name in names if isinstance(name, str)), None) if isinstance(names, list) else None


def _add_keys(values: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys that an export of this version has and it lacks.

    Values that are there stay, except for options of methods: these are written out where a default has changed
    (`families/farfield.py` reads what an earlier version meant).
    """
    unread = {*IGNORED_KEYS, *HF_TRAINING_KEYS}
    changed = {
        name: value
        for name, value in written.items()
        if (name not in values and name not in unread) or (name.endswith("_options") and values.get(name) != value)
    }
    return {**values, **changed}


def _sort_old_code(folder: Path, run: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return the files of code that are as an export wrote them, by name, and the names of those that may not be.

    Args:
        run: suffixes of the files that are run; empty for files of exports from before there were suffixes.
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
    """Write files of code, and only then what names them."""
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
        log(f"{folder}: its code is that of this version")
    if edited:
        log(f"note: {_name_files(edited)} stay in {folder} and are run no longer")
    if "document_end_token_id" not in configs[HF_CONFIG_FILE][1]:
        end = configs[HF_CONFIG_FILE][1].get("eos_token_id")
        log(
            f"note: {folder / HF_CONFIG_FILE} does not say if the run was trained with attention_mask: document; if it "
            f"was, add document_end_token_id: {end}"
        )


def _count_files(names: list[str]) -> str:
    suffixes = sorted({match[1] for name in names if (match := _CODE_FILE.fullmatch(name))})
    return f"{len(names)} files of code ({', '.join(suffixes)})"


def _name_files(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

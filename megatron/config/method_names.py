"""Names of position encodings, score processors and temperatures.

They are values of `pos_emb`, `score_processor` and `attention_temperature`.

Names that GPT-NeoX, KERPLE and DAPE use in configurations are accepted (`neox_keys.POSITION_ALIASES`). Other names that
a method's file declares are rejected, with a hint to our name. This module does not import torch
(`megatron/position/catalog.py`).
"""

import itertools
import re
from collections.abc import Container, Mapping
from functools import cache
from typing import Any

from megatron.config.schema import Config
from megatron.config.yaml_files import read_yaml
from megatron.options.position import PositionOptions
from megatron.position.catalog import (
    MethodFacts,
    MethodFileError,
    compute_method_digests,
    list_encodings,
    list_processors,
    list_temperatures,
    read_encoding_facts,
    read_processor_facts,
    read_temperature_facts,
)
from megatron.utils.errors import UserError
from megatron.utils.formatting import suggest_names
from megatron.utils.project import SHIPPED_CONFIGS


def list_processor_values() -> list[str]:
    """List the valid values of `score_processor`, including `none`."""
    return ["none", *list_processors()]


def list_temperature_values() -> list[str]:
    """List the valid values of `attention_temperature`, including `none`."""
    return ["none", *list_temperatures()]


def find_method(text: str) -> tuple[str, str] | None:
    """Return key and name of the method with a given name or other name, or None if unknown.

    For example, RoPE is ("pos_emb", "rotary").
    """
    normalized = normalize_name(text)
    for key, methods in (
        ("pos_emb", list_encodings()),
        ("score_processor", list_processors()),
        ("attention_temperature", list_temperatures()),
    ):
        for method in methods:
            if normalized in map(normalize_name, (method, *list_other_names(method))):
                return key, method
    return None


def normalize_name(name: str) -> str:
    """Return a name in lower case, without dashes, underscores and spaces."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def list_other_names(method: str) -> tuple[str, ...]:
    """List the other names of one of our methods; empty if its file cannot be read."""
    try:
        return _read_facts(method).other_names
    except MethodFileError:
        return ()


def list_encoding_options(name: str) -> tuple[str, ...] | None:
    """List the names of `pos_emb_options` for an encoding; None if its file does not declare them."""
    defaults = read_encoding_facts(name).defaults
    return None if defaults is None else tuple(defaults)


def list_processor_options(name: str) -> tuple[str, ...] | None:
    """List the names of `score_processor_options` for a processor; None if its file does not declare them."""
    if name == "none":
        return ()
    defaults = read_processor_facts(name).defaults
    return None if defaults is None else tuple(defaults)


def list_temperature_options(name: str) -> tuple[str, ...] | None:
    """List the names of `attention_temperature_options` for a temperature; None if its file does not declare them."""
    if name == "none":
        return ()
    defaults = read_temperature_facts(name).defaults
    return None if defaults is None else tuple(defaults)


def list_readable_options(method: str) -> tuple[str, ...]:
    """List the option names of one of our methods; empty if its file cannot be read."""
    try:
        return tuple(_read_facts(method).defaults or ())
    except MethodFileError:
        return ()


def changes_scores(encoding: str) -> bool:
    """Return False if an encoding implements none of the hooks that add to attention scores or multiply them."""
    return encoding not in list_encodings() or read_encoding_facts(encoding).changes_scores


def list_overlays() -> list[str]:
    """List the overlays in configs/position, named after methods or combinations of keys."""
    return sorted(path.stem for path in (SHIPPED_CONFIGS / "position").glob("*.yml"))


def find_missing_published_keys(config: Config, set_keys: Container[tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """Find the keys that methods have as published, and a configuration neither has nor sets, by method.

    The file of a method in configs/position defines it as published.

    Args:
        config: the configuration.
        set_keys: paths of the keys that its files or overrides set.
    """
    position = config.position
    found: dict[str, dict[str, Any]] = {}
    for key, names in (
        ("pos_emb", position.encodings),
        ("score_processor", position.processors),
        ("attention_temperature", position.temperatures),
    ):
        for name in names:
            if _read_overlay(name).get(key) == name and (
                missing := find_keys_differing_from_overlay(config, name, set_keys)
            ):
                found[name] = missing
    return found


def find_keys_differing_from_overlay(
    config: Config, name: str, set_keys: Container[tuple[str, ...]] = ()
) -> dict[str, Any]:
    """Find the keys of a file in configs/position that have other values in a configuration; of options, these alone.

    Args:
        config: the configuration.
        name: name of the file.
        set_keys: paths of keys to leave out.
    """
    values, position = config.to_flat(), config.position
    differing: dict[str, Any] = {}
    methods = {
        "pos_emb_options": position.encodings,
        "score_processor_options": position.processors,
        "attention_temperature_options": position.temperatures,
    }
    for key, value in _read_overlay(name).items():
        if key in methods:
            options: dict[str, Any] = {}
            for method in methods[key]:
                options |= {} if method == "none" else _read_facts(method).defaults or {}
            options |= values[key]
            changed = {each: v for each, v in value.items() if (key, each) not in set_keys and options.get(each) != v}
            differing |= {key: changed} if changed else {}
        elif (key,) not in set_keys and values.get(key) != value:
            differing[key] = value
    return differing


@cache
def _read_overlay(name: str) -> Mapping[str, Any]:
    """Read a file in configs/position; empty if there is none."""
    path = SHIPPED_CONFIGS / "position" / f"{name}.yml"
    return read_yaml(path).values if path.is_file() else {}


def describe_compositions() -> dict[str, str]:
    """Map each overlay in configs/position that is not a single method to the first sentence of its comment."""
    methods = {*list_encodings(), *list_processors(), *list_temperatures()}
    found = {}
    for name in list_overlays():
        if name not in methods:
            text = (SHIPPED_CONFIGS / "position" / f"{name}.yml").read_text(encoding="utf-8")
            lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
            comment = " ".join(line.lstrip("# ") for line in lines)
            found[name] = re.split(r"(?<!et al)\.(?= |$)", comment)[0]
    return found


def compute_user_method_digests(position: PositionOptions) -> dict[str, str]:
    """Compute digests of a model's methods that are defined outside the project, by file.

    Raises UserError if a method's file is missing.
    """
    names = {
        "encodings": position.encodings,
        "processors": [name for name in position.processors if name != "none"],
        "temperatures": [name for name in position.temperatures if name != "none"],
    }
    try:
        return compute_method_digests(names)
    except MethodFileError as error:
        raise UserError(str(error)) from error


def find_methods(text: str) -> list[str]:
    """Find the methods of any kind with a name that contains a text, ignoring case: `rope` finds rotary.

    Raises:
        UserError: no method matches; the message suggests similar names.
    """
    pattern = text.replace("-", "_").lower()
    all_names = {
        method: tuple(name.lower().replace("-", "_") for name in (method, *list_other_names(method)))
        for method in (*list_encodings(), *list_processor_values(), *list_temperatures())
    }
    methods = [method for method, names in all_names.items() if any(pattern in name for name in names)]
    if not methods and (overlays := [name for name in list_overlays() if pattern in name]):
        files = ", ".join(f"configs/position/{name}.yml" for name in overlays)
        raise UserError(f"no method's name contains {text!r}, but these overlays match: {files}")
    if not methods:
        owners = {name: method for method, names in all_names.items() for name in names}
        hint = suggest_names(pattern, owners, max_suggestions=3, shown=owners)
        choices = hint or f"choose from {', '.join(all_names)}"
        raise UserError(f"no method's name contains {text!r}; {choices}")
    return methods


def _read_facts(method: str) -> MethodFacts:
    if method in list_encodings():
        return read_encoding_facts(method)
    return read_temperature_facts(method) if method in list_temperatures() else read_processor_facts(method)

"""Overrides of a trained model's position options for evaluation, analysis and generation.

They are the window, the document mask, a temperature without learned parameters, and rotary's frequencies or far
distances.

This module does not import torch, so that an error in a command's options is reported at once.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from megatron.config import method_names
from megatron.config.validation import validate_methods
from megatron.config.yaml_files import parse_scalar, read_yaml
from megatron.options.model import ModelOptions, get_attention_sizes
from megatron.options.position import PositionOptions
from megatron.options.section import ConfigSection
from megatron.position.catalog import read_encoding_facts, read_temperature_facts, select_encoding_options
from megatron.utils.errors import UserError

OVERRIDES = ("window", "attention_mask", "attention_temperature", "rope")
"""Command options that override a run's positions: the keyword arguments of `override_position`."""

ROPE_KINDS = {
    "pi": "linear", "linear": "linear", "ntk": "ntk", "dynamic": "dynamic", "yarn": "yarn", "longrope": "longrope",
    "selfextend": "selfextend", "rerope": "rerope",
}  # fmt: skip
"""Names accepted by `rope`, with rotary's scaling (`position/rotary_scaling.py`). The first name of a scaling is
canonical."""
ROPE_OPTIONS = {
    "linear": ("factor",), "ntk": ("factor",), "dynamic": ("factor",),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor"),
    "selfextend": ("group", "neighbors"), "rerope": ("neighbors",),
}  # fmt: skip
"""Options of each scaling. Those in `ROPE_FORMS` may be given without their names."""
ROPE_FORMS = {
    "pi": "FACTOR", "ntk": "FACTOR", "dynamic": "", "yarn": "FACTOR", "longrope": "FILE",
    "selfextend": "GROUP,NEIGHBORS", "rerope": "NEIGHBORS",
}  # fmt: skip
ROPE_EXAMPLES = {"selfextend": "selfextend:8,256", "rerope": "rerope:256"}
LONGROPE_SECTIONS = ("rope_scaling", "rope_parameters")
"""Sections of a transformers config.json that contain the keys of a longrope file."""
LONGROPE_KEYS = {
    "short_factor": "short_factor", "long_factor": "long_factor", "factor": "factor",
    "attention_factor": "attention_factor", "original_max_position_embeddings": "original_length",
}  # fmt: skip
"""transformers' names, with those of rotary's options."""


def list_overrides(options: ConfigSection) -> dict[str, Any]:
    """Return the overrides among a command's options, as keyword arguments."""
    return {name: getattr(options, name) for name in OVERRIDES if name in type(options).model_fields}


def override_position(
    model: ModelOptions,
    position: PositionOptions,
    *,
    window: int | None = None,
    attention_mask: Literal["causal", "document"] | None = None,
    attention_temperature: str | None = None,
    rope: str | None = None,
) -> PositionOptions:
    """Return a run's position options with some of them overridden.

    Args:
        model, position: options of the run.
        window, attention_mask: replace attention_window and attention_mask; None keeps the run's.
        attention_temperature: replaces the run's temperature, as `NAME` or `NAME:OPTION=VALUE,…`; None keeps the run's.
        rope: scaling of rotary's frequencies or far distances, as `parse_rope` reads it; None keeps the run's.

    Raises:
        UserError: invalid value; learned parameters in the run's or the new temperature; or rope for a run that does
            not
            use rotary or already has a scaling.
    """
    if rope is not None:
        position = _scale_rotary(model, position, rope)
    if window is not None:
        if not isinstance(window, int) or window < 1:
            raise UserError(f"window is {window!r}; it must be an integer, at least 1")
        position = position.replace(attention_window=window)
    if attention_mask is not None:
        position = position.replace(attention_mask=attention_mask)
    if attention_temperature is None:
        return position
    name, options = parse_temperature(attention_temperature)
    chosen = position.replace(attention_temperature=name, attention_temperature_options=options)
    if chosen == position:
        return position
    if learned := list_learned_temperatures(model, position):
        raise UserError(
            f"attention_temperature {attention_temperature}: the run was trained with {', '.join(learned)}, whose "
            "learned parameters cannot be replaced"
        )
    if list_learned_temperatures(model, chosen):
        fixed = _disable_learning(name)
        raise UserError(
            f"attention_temperature {attention_temperature}: it has learned parameters, so it cannot be added to a "
            f"trained model; train with attention_temperature={name}{'' if fixed == name else f', or use {fixed}'}"
        )
    return chosen


def _scale_rotary(model: ModelOptions, position: PositionOptions, rope: str) -> PositionOptions:
    options = parse_rope(rope)
    if "rotary" not in position.encodings:
        raise UserError(f"rope {rope}: the run's pos_emb is {', '.join(position.encodings)}; scaling needs rotary")
    trained = position.pos_emb_options
    if (scaling := trained.get("scaling", "none")) != "none":
        raise UserError(f"rope {rope}: the run was trained with scaling {scaling}, which cannot be replaced")
    if position.randomized_positions is not None:
        raise UserError(
            f"rope {rope}: the run's positions are drawn from {position.randomized_positions} "
            "(randomized_positions), so it has already learned long distances"
        )
    if options["scaling"] in ("dynamic", "yarn", "longrope"):
        options.setdefault("original_length", model.seq_length)
    return position.replace(pos_emb_options={**trained, **options})


@contextmanager
def locate_rope_errors(rope: str | None) -> Iterator[None]:
    """Prefix errors about rotary's options, which are found when it is built, with the `rope` value that set them."""
    try:
        yield
    except UserError as error:
        if rope is None or not (error.key or "").startswith("pos_emb_options"):
            raise
        raise UserError(f"rope {rope}: {str(error).removeprefix('pos_emb: ')}") from error


def parse_rope(text: str) -> dict[str, Any]:
    """Return rotary's options for `yarn:8`, `yarn:factor=8,beta_fast=64`, `selfextend:8,256` or `dynamic`.

    The training length is not included unless a longrope file sets it. Raises UserError for an invalid text.
    """
    name, _, rest = text.partition(":")
    if name not in ROPE_KINDS:
        forms = (":".join(filter(None, form)) for form in ROPE_FORMS.items())
        raise UserError(f"rope {text}: unknown scaling {name!r}; choose from {', '.join(forms)}")
    scaling = ROPE_KINDS[name]
    if scaling == "longrope":
        return {"scaling": scaling, **_read_longrope(text, rest)}
    known = ROPE_OPTIONS[scaling]
    _, unnamed, named = _split_override("rope", text, max_unnamed=2 if scaling == "selfextend" else 1)
    parts: dict[str, Any] = {**dict(zip(known, unnamed, strict=False)), **named}
    if scaling == "dynamic":
        parts.setdefault("factor", 1.0)
    for option, value in parts.items():
        if option not in known:
            raise UserError(f"rope {text}: {name} has no option {option!r}; it takes {', '.join(known)}")
        _check_number(text, option, value)
    if "factor" not in known:
        for option in known:
            if option not in parts:
                raise UserError(f"rope {text}: {option} is missing, as in {ROPE_EXAMPLES[scaling]}")
            if not isinstance(parts[option], int):
                raise UserError(f"rope {text}: {option} is {parts[option]!r}; it must be an integer")
        return {"scaling": scaling, **parts}
    if parts.get("factor", 0) < 1:
        given = f"factor is {parts['factor']}" if "factor" in parts else "the factor is missing"
        raise UserError(f"rope {text}: {given}; it must be at least 1, as in {name}:8")
    return {"scaling": scaling, **{option: float(value) for option, value in parts.items()}}


def _check_number(text: str, option: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise UserError(f"rope {text}: {option} is {value!r}; it must be a positive number")


def _read_longrope(text: str, path: str) -> dict[str, Any]:
    """Read rotary's options from a file of factors with transformers' names.

    It is JSON or YAML: a mapping of `LONGROPE_KEYS` or a complete config.json.
    """
    if not path:
        raise UserError(f"rope {text}: the file of factors is missing, as in longrope:factors.json")
    values = dict(read_yaml(Path(path)).values)
    longest = values.get("max_position_embeddings")
    for section in LONGROPE_SECTIONS:
        if isinstance(values.get(section), dict):
            outer = values.get("original_max_position_embeddings")
            values = {"original_max_position_embeddings": outer, **values[section]}
    kinds = {values.get(key) for key in ("rope_type", "type")} - {None, "longrope"}
    if kinds:
        raise UserError(f"{path}: rope_type is {kinds.pop()!r}; it must be longrope")
    for key in ("short_factor", "long_factor"):
        if not isinstance(values.get(key), list):
            raise UserError(f"{path}: {key} is {values.get(key)!r}; it must be a list of numbers")
        for number in values[key]:
            _check_number(text, f"{key} of {path}", number)
    original = values.get("original_max_position_embeddings")
    if values.get("factor") is None and values.get("attention_factor") is None:
        if original is None or longest is None:
            raise UserError(f"{path}: factor or attention_factor is missing; it scales cosines and sines")
        values["factor"] = longest / original
    options = {ours: values[key] for key, ours in LONGROPE_KEYS.items() if values.get(key) is not None}
    for name in ("factor", "attention_factor", "original_length"):
        if name in options:
            _check_number(text, f"{name} of {path}", options[name])
    return {**options, **{name: [float(x) for x in options[name]] for name in ("short_factor", "long_factor")}}


def format_rope(options: Mapping[str, Any]) -> str:
    """Format rotary's options as a value of `rope`, the inverse of `parse_rope`.

    For longrope, whose file is unknown, it contains a hash of the factors.
    """
    scaling = options["scaling"]
    name = next(name for name, kind in ROPE_KINDS.items() if kind == scaling)
    if scaling == "longrope":
        factors = [
            options[key] for key in ("short_factor", "long_factor", "factor", "attention_factor") if key in options
        ]
        return f"longrope:{hashlib.sha256(json.dumps(factors).encode()).hexdigest()[:8]}"
    known = ROPE_OPTIONS[scaling]
    if "factor" not in known:
        return f"{name}:{','.join(str(options[key]) for key in known)}"
    factor = [] if scaling == "dynamic" and options["factor"] == 1 else [f"{options['factor']:g}"]
    others = [f"{key}={options[key]:g}" for key in known[1:] if key in options]
    return ":".join(filter(None, (name, ",".join(factor + others))))


def has_two_rotations(position: PositionOptions) -> bool:
    """Return True if a layer rotates queries and keys a second time for far keys."""
    return any(
        read_encoding_facts(name).count_rotations(select_encoding_options(name, position.pos_emb_options)) > 1
        for name in position.encodings
    )


def _split_override(key: str, text: str, *, max_unnamed: int = 0) -> tuple[str, list[Any], dict[str, Any]]:
    """Split `NAME:OPTION=VALUE,…` into name and options, and the leading values without names."""
    name, _, rest = text.partition(":")
    unnamed: list[Any] = []
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if not equals and (options or len(unnamed) == max_unnamed):
            raise UserError(f"{key} {text}: {part!r} must be OPTION=VALUE")
        parsed = parse_scalar(value if equals else part, f"{key} {text}")
        if equals:
            options[option.strip()] = parsed
        else:
            unnamed.append(parsed)
    return name, unnamed, options


def parse_temperature(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of `logn` or `logn:length=512`. Raises UserError for an unknown temperature."""
    name, _, options = _split_override("attention_temperature", text)
    known, list_options = method_names.list_temperature_values(), method_names.list_temperature_options
    if name not in known:
        known = [_disable_learning(each) for each in known]
    for _, problem in validate_methods("attention_temperature", [name], known, options, list_options):
        raise UserError(problem)
    return name, options


def _disable_learning(temperature: str) -> str:
    """Return a temperature's name, with `learned=false` if it has this option."""
    has_option = temperature != "none" and "learned" in method_names.list_readable_options(temperature)
    return f"{temperature}:learned=false" if has_option else temperature


def list_learned_temperatures(model: ModelOptions, position: PositionOptions) -> list[str]:
    """List the temperatures of a configuration that have learned parameters, as declared in their files."""
    options, sizes = position.attention_temperature_options, get_attention_sizes(model)
    names = (name for name in position.temperatures if name != "none")
    return [name for name in names if read_temperature_facts(name).has_parameters(options, **sizes)]

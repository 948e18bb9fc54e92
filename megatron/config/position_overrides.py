"""What reading a trained model may change of its positions: its window, which documents it keeps
apart, a temperature without learned parameters, and the frequencies of rotary positions.

Nothing here depends on torch, so that a mistake in an option of a command is reported at once.
"""

from collections.abc import Mapping
from typing import Any, Literal

from megatron.config import method_names
from megatron.config.validation import validate_methods
from megatron.config.yaml_files import parse_scalar
from megatron.options.model import ModelOptions, PositionOptions, get_attention_sizes
from megatron.options.section import ConfigSection
from megatron.position.catalog import read_temperature_facts
from megatron.utils.errors import UserError

OVERRIDES = ("window", "attention_mask", "temperature", "rope")
"""The options of commands that override something of a run's positions: the arguments of `override_position`."""

ROPE_KINDS = {"pi": "linear", "linear": "linear", "ntk": "ntk", "dynamic": "dynamic", "yarn": "yarn"}
"""What `rope` may name, and rotary's scaling (`position/encodings/rotary.py`); the first name of one is the usual."""
ROPE_OPTIONS = {
    "linear": ("factor",), "ntk": ("factor",), "dynamic": ("factor",),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor"),
}  # fmt: skip


def list_overrides(options: ConfigSection) -> dict[str, Any]:
    """Those of a command's options that do, as arguments."""
    return {name: getattr(options, name) for name in OVERRIDES if name in type(options).model_fields}


def override_position(
    model: ModelOptions,
    position: PositionOptions,
    *,
    window: int | None = None,
    attention_mask: Literal["causal", "document"] | None = None,
    temperature: str | None = None,
    rope: str | None = None,
) -> PositionOptions:
    """The positions of a run as it is read.

    Args:
        model, position: the run's.
        window, attention_mask: instead of its attention_window and attention_mask; None keeps that.
        temperature: instead of its attention_temperature, as `NAME` or `NAME:OPTION=VALUE,…`; None keeps that.
        rope: scaling of rotary's frequencies, as `NAME:FACTOR` or `NAME:OPTION=VALUE,…`; None keeps them.

    Raises:
        UserError: a value that makes no sense, a temperature with learned parameters, the run's or the other, or rope
            for a run that is not rotary, or has a scaling already.
    """
    if rope is not None:
        position = _scale_rotary(model, position, rope)
    if window is not None:
        if not isinstance(window, int) or window < 1:
            raise UserError(f"window is {window!r}; it must be a whole number, at least 1")
        position = position.replace(attention_window=window)
    if attention_mask is not None:
        position = position.replace(attention_mask=attention_mask)
    if temperature is None:
        return position
    name, options = parse_temperature(temperature)
    chosen = position.replace(attention_temperature=name, attention_temperature_options=options)
    if chosen == position:
        return position
    if learned := list_learned_temperatures(model, position):
        raise UserError(
            f"temperature {temperature}: the run was trained with {', '.join(learned)}, whose parameters are learned; "
            "no other can take its place"
        )
    if list_learned_temperatures(model, chosen):
        raise UserError(
            f"temperature {temperature}: its parameters are learned, so it cannot be put on when a model is read; "
            f"train with attention_temperature={name}"
        )
    return chosen


def _scale_rotary(model: ModelOptions, position: PositionOptions, rope: str) -> PositionOptions:
    options = parse_rope(rope)
    if "rotary" not in position.encodings:
        raise UserError(f"rope {rope}: the run's pos_emb is {', '.join(position.encodings)}; it scales rotary alone")
    trained = position.pos_emb_options
    if (scaling := trained.get("scaling", "none")) != "none":
        raise UserError(f"rope {rope}: the run was trained with scaling {scaling}; no other can take its place")
    if position.randomized_positions is not None:
        raise UserError(
            f"rope {rope}: the run's positions are drawn from {position.randomized_positions} "
            "(randomized_positions), so that it has learned the long distances"
        )
    if options["scaling"] in ("dynamic", "yarn"):
        options["original_length"] = model.seq_length
    return position.replace(pos_emb_options={**trained, **options})


def parse_rope(text: str) -> dict[str, Any]:
    """Rotary's options for `yarn:8`, `yarn:factor=8,beta_fast=64` or `dynamic`, without the length of the training.
    Raises UserError for what is none."""
    name, parts = _split_override("rope", text)
    if name not in ROPE_KINDS:
        raise UserError(f"rope {text}: there is no {name!r}; choose from pi:FACTOR, ntk:FACTOR, dynamic, yarn:FACTOR")
    scaling = ROPE_KINDS[name]
    if None in parts:
        parts = {"factor": parts[None], **{key: value for key, value in parts.items() if key is not None}}
    if scaling == "dynamic":
        parts.setdefault("factor", 1.0)
    for option, value in parts.items():
        if option not in ROPE_OPTIONS[scaling]:
            raise UserError(
                f"rope {text}: {name} has no option {option!r}; it takes {', '.join(ROPE_OPTIONS[scaling])}"
            )
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise UserError(f"rope {text}: {option} is {value!r}; it must be a positive number")
    if parts.get("factor", 0) < 1:
        given = f"factor is {parts['factor']}" if "factor" in parts else "the factor is missing"
        raise UserError(f"rope {text}: {given}; it must be at least 1, as in {name}:8")
    return {"scaling": scaling, **{str(option): float(value) for option, value in parts.items()}}


def format_rope(options: Mapping[str, Any]) -> str:
    """What `parse_rope` reads, of rotary's options."""
    scaling = options["scaling"]
    name = next(name for name, kind in ROPE_KINDS.items() if kind == scaling)
    factor = [] if scaling == "dynamic" and options["factor"] == 1 else [f"{options['factor']:g}"]
    others = [f"{key}={options[key]:g}" for key in ROPE_OPTIONS[scaling][1:] if key in options]
    return ":".join(filter(None, (name, ",".join(factor + others))))


def _split_override(key: str, text: str) -> tuple[str, dict[str | None, Any]]:
    """Name and options of `NAME:OPTION=VALUE,…`; with the key None a value at the beginning that has no name, of an
    override that takes one (rope)."""
    name, _, rest = text.partition(":")
    options: dict[str | None, Any] = {}
    for number, part in enumerate(filter(None, rest.split(","))):
        option, equals, value = part.partition("=")
        if not equals and not (key == "rope" and number == 0):
            raise UserError(f"{key} {text}: {part!r} must be OPTION=VALUE")
        options[option.strip() if equals else None] = parse_scalar(value if equals else part, f"{key} {text}")
    return name, options


def parse_temperature(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `logn` or `logn:length=512`. Raises UserError for what is no temperature."""
    name, parts = _split_override("temperature", text)
    options = {str(option): value for option, value in parts.items()}
    known, list_options = method_names.list_temperature_values(), method_names.list_temperature_options
    for _, problem in validate_methods("attention_temperature", [name], known, options, list_options):
        raise UserError(problem)
    return name, options


def list_learned_temperatures(model: ModelOptions, position: PositionOptions) -> list[str]:
    """Those of a configuration's temperatures that have parameters, as far as their files say."""
    options, sizes = position.attention_temperature_options, get_attention_sizes(model)
    names = (name for name in position.temperatures if name != "none")
    return [name for name in names if read_temperature_facts(name).has_parameters(options, **sizes)]

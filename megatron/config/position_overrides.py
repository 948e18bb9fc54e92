"""What reading a trained model may change of its positions: its window, which documents it keeps
apart, and a temperature without learned parameters.

Nothing here depends on torch, so that a mistake in an option of a command is reported at once.
"""

from typing import Any, Literal

from megatron.config import method_names
from megatron.config.validation import validate_methods
from megatron.config.yaml_files import parse_scalar
from megatron.options.model import ModelOptions, PositionOptions, get_attention_sizes
from megatron.options.section import ConfigSection
from megatron.position.catalog import read_temperature_facts
from megatron.utils.errors import UserError

OVERRIDES = ("window", "attention_mask", "temperature")
"""The options of commands that override something of a run's positions: the arguments of `override_position`."""


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
) -> PositionOptions:
    """The positions of a run as it is read.

    Args:
        model, position: the run's.
        window, attention_mask: instead of its attention_window and attention_mask; None keeps that.
        temperature: instead of its attention_temperature, as `NAME` or `NAME:OPTION=VALUE,…`; None keeps that.

    Raises:
        UserError: a value that makes no sense, or a temperature with learned parameters, the run's or the other.
    """
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
    if has_learned_temperature(model, position):
        raise UserError(
            f"temperature {temperature}: the run was trained with {', '.join(position.temperatures)}, whose "
            "parameters are learned; no other can take its place"
        )
    if has_learned_temperature(model, chosen):
        raise UserError(
            f"temperature {temperature}: its parameters are learned, so it cannot be put on when a model is read; "
            f"train with attention_temperature={name}"
        )
    return chosen


def parse_temperature(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `logn` or `logn:length=512`. Raises UserError for what is no temperature."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"temperature {text}: {part!r} must be OPTION=VALUE")
        options[option.strip()] = parse_scalar(value, f"temperature {text}")
    known, list_options = method_names.list_temperature_values(), method_names.list_temperature_options
    for _, problem in validate_methods("attention_temperature", [name], known, options, list_options):
        raise UserError(problem)
    return name, options


def has_learned_temperature(model: ModelOptions, position: PositionOptions) -> bool:
    """Has the temperature of a configuration parameters, as far as its file says?"""
    options, sizes = position.attention_temperature_options, get_attention_sizes(model)
    facts = (read_temperature_facts(name) for name in position.temperatures if name != "none")
    return any(each.has_parameters(options, **sizes) for each in facts)

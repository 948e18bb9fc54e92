"""Construction of position modules from a configuration, without the rest of the model (or megatron-core).

`canonicalize_position_options` gives a unique form of configurations that compute the same. The classes of methods need
torch, which is imported only when a class is requested: planning a run needs only `build_attention_dims`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.options.model import ModelOptions, get_attention_sizes
from megatron.options.position import PositionOptions
from megatron.position.catalog import (
    MethodFileError,
    list_encodings,
    list_processors,
    list_temperatures,
    select_encoding_options,
    select_processor_options,
    select_temperature_options,
)
from megatron.position.facts import AttentionDims, OptionError
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.position.base import PositionModule
    from megatron.position.encoding import Encoding
    from megatron.position.processor import Processor
    from megatron.position.temperature import Temperature


def build_attention_dims(model: ModelOptions) -> AttentionDims:
    """Return the sizes for which encodings and processors are built."""
    return AttentionDims(**get_attention_sizes(model))


def list_layer_positions(position: PositionOptions, num_layers: int) -> list[PositionOptions]:
    """Return the position options of each layer.

    With several encodings or processors, each gets the options that it has. Equal layers share one object, and without
    patterns all layers have `position`.

    Raises UserError if the file of a method cannot be read, or no method has an option.
    """
    patterns = position.list_patterns()
    if not patterns:
        return [position] * num_layers
    kinds: dict[tuple[Any, ...], PositionOptions] = {}
    positions = []
    for layer in range(num_layers):
        key = tuple(values[layer % len(values)] for values in patterns.values())
        if key not in kinds:
            kinds[key] = _select_options(position.get_layer_options(layer))
        positions.append(kinds[key])
    for name in ("pos_emb_options", "score_processor_options", "attention_temperature_options"):
        for option in getattr(position, name):
            if not any(option in getattr(own, name) for own in kinds.values()):
                raise UserError(f"{name}.{option}: no layer's method has this option", f"{name}.{option}")
    return positions


def list_layer_types(position: PositionOptions, num_layers: int) -> list[PositionOptions]:
    """Return the distinct entries of `list_layer_positions`, in the order of their first layers."""
    return list({id(own): own for own in list_layer_positions(position, num_layers)}.values())


def _select_options(own: PositionOptions) -> PositionOptions:
    """Drop options of other layers' methods. An unknown method, which is rejected elsewhere, keeps all options."""
    values: dict[str, Any] = {}
    try:
        if own.encoding in list_encodings():
            values["pos_emb_options"] = select_encoding_options(own.encoding, own.pos_emb_options)
        if own.processor in ("none", *list_processors()):
            values["score_processor_options"] = select_processor_options(own.processor, own.score_processor_options)
        if own.temperature in ("none", *list_temperatures()):
            given = own.attention_temperature_options
            values["attention_temperature_options"] = select_temperature_options(own.temperature, given)
    except MethodFileError as error:
        raise UserError(f"pos_emb: {error}", "pos_emb") from error
    return own.replace(**values)


def canonicalize_options(method: type[PositionModule], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options that a trained model depends on, including defaults, without initialization options."""
    defaults = {name: parameter.default for name, parameter in method.options().items()}
    initialization = method.initialization_options()
    return {name: value for name, value in {**defaults, **options}.items() if name not in initialization}


def canonicalize_position_options(position: PositionOptions) -> dict[str, Any]:
    """Return the options of encoding, processor and temperature in a form in which equal models compare equal."""
    from megatron.position.registry import load_encoding_class, load_processor_class, load_temperature_class

    kinds = (
        ("pos_emb_options", position.encodings, select_encoding_options, load_encoding_class),
        ("score_processor_options", position.processors, select_processor_options, load_processor_class),
        ("attention_temperature_options", position.temperatures, select_temperature_options, load_temperature_class),
    )
    options: dict[str, dict[str, Any]] = {}
    for key, names, select_options, load_class in kinds:
        options[key] = {}
        for name in names:
            # `none` is an encoding, but neither a processor nor a temperature.
            if name != "none" or key == "pos_emb_options":
                given = getattr(position, key) if len(names) == 1 else select_options(name, getattr(position, key))
                options[key] |= canonicalize_options(load_class(name), given)
    return options


def build_encoding_from_options(options: PositionOptions, dims: AttentionDims) -> Encoding:
    """Build a new encoding. Raises UserError that names the key."""
    from megatron.position.registry import build_encoding

    try:
        return build_encoding(options.encoding, dims, options.pos_emb_options)
    except ValueError as error:
        raise UserError(f"pos_emb: {error}", _find_key("pos_emb", error)) from error


def build_processor_from_options(options: PositionOptions, dims: AttentionDims, encoding: Encoding) -> Processor | None:
    """Build a new processor for an encoding, or return None if there is none. Raises UserError that names the key."""
    from megatron.position.registry import build_processor

    if options.processor == "none":
        if options.score_processor_options:
            raise UserError(
                "score_processor_options are given, but score_processor is none",
                f"score_processor_options.{next(iter(options.score_processor_options))}",
            )
        return None
    try:
        return build_processor(options.processor, dims, options.score_processor_options, has_bias=encoding.adds_bias)
    except ValueError as error:
        raise UserError(f"score_processor: {error}", _find_key("score_processor", error)) from error


def build_temperature_from_options(options: PositionOptions, dims: AttentionDims) -> Temperature | None:
    """Build a new temperature, or return None if there is none. Raises UserError that names the key."""
    from megatron.position.registry import build_temperature

    if options.temperature == "none":
        if options.attention_temperature_options:
            raise UserError(
                "attention_temperature_options are given, but attention_temperature is none",
                f"attention_temperature_options.{next(iter(options.attention_temperature_options))}",
            )
        return None
    try:
        return build_temperature(options.temperature, dims, options.attention_temperature_options)
    except ValueError as error:
        raise UserError(f"attention_temperature: {error}", _find_key("attention_temperature", error)) from error


def _find_key(key: str, error: ValueError) -> str:
    """Return the configuration key of an error: the key of the option, or the key that names the method."""
    return f"{key}_options.{error.option}" if isinstance(error, OptionError) else key

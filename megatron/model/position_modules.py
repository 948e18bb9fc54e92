"""From the configuration of positions to its modules, without the rest of the model (or megatron-core).

`canonical_position_options` says what a configuration computes, whatever way it is written. Torch comes with the
classes of methods and is imported only where one is asked for: whoever plans a run needs `build_attention_dims` alone.
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
    """The sizes that encodings and processors are built for."""
    return AttentionDims(**get_attention_sizes(model))


def list_layer_positions(position: PositionOptions, num_layers: int) -> list[PositionOptions]:
    """What each layer has of the keys that differ from layer to layer: of several encodings and processors each takes
    the options that it has. Layers that are alike have the same object, and without patterns all have `position`.

    Raises UserError: the file of a method cannot be read, or no method has an option.
    """
    patterns = position.list_patterns()
    if not patterns:
        return [position] * num_layers
    kinds: dict[tuple[Any, ...], PositionOptions] = {}
    positions = []
    for layer in range(num_layers):
        key = tuple(values[layer % len(values)] for values in patterns.values())
        if key not in kinds:
            kinds[key] = _select_options(position.for_layer(layer))
        positions.append(kinds[key])
    for name in ("pos_emb_options", "score_processor_options", "attention_temperature_options"):
        for option in getattr(position, name):
            if not any(option in getattr(own, name) for own in kinds.values()):
                raise UserError(f"{name}.{option}: no layer's method has such an option", f"{name}.{option}")
    return positions


def find_layer_kinds(position: PositionOptions, num_layers: int) -> list[PositionOptions]:
    """The different ones of `list_layer_positions`, in the order of their first layers."""
    return list({id(own): own for own in list_layer_positions(position, num_layers)}.values())


def _select_options(own: PositionOptions) -> PositionOptions:
    """Without options of other layers' methods; of a name that is none, what is refused elsewhere, all."""
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


def canonical_options(method: type[PositionModule], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options that a trained model depends on, defaults filled in; those that only say where it starts are out."""
    defaults = {name: parameter.default for name, parameter in method.options().items()}
    initialization = method.initialization_options()
    return {name: value for name, value in {**defaults, **options}.items() if name not in initialization}


def canonical_position_options(position: PositionOptions) -> dict[str, Any]:
    """The options of an encoding, a processor and a temperature, so that equal models compare equal."""
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
                options[key] |= canonical_options(load_class(name), given)
    return options


def build_encoding_from_options(options: PositionOptions, dims: AttentionDims) -> Encoding:
    """A fresh encoding. Raises UserError that names the key."""
    from megatron.position.registry import build_encoding

    try:
        return build_encoding(options.encoding, dims, options.pos_emb_options)
    except ValueError as error:
        raise UserError(f"pos_emb: {error}", _find_key("pos_emb", error)) from error


def build_processor_from_options(options: PositionOptions, dims: AttentionDims, encoding: Encoding) -> Processor | None:
    """A fresh processor for an encoding, or None where there is none. Raises UserError that names the key."""
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
    """A fresh temperature, or None where there is none. Raises UserError that names the key."""
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
    """The key of the configuration that an error is about: an option's, or the one that names the method."""
    return f"{key}_options.{error.option}" if isinstance(error, OptionError) else key

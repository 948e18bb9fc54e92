"""From the configuration of positions to its modules, without the rest of the model (or megatron-core).

`canonical_position_options` says what a configuration computes, whatever way it is written. Torch comes with the
classes of methods and is imported only where one is asked for: whoever plans a run needs `build_attention_dims` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.options.model import ModelOptions, PositionOptions, get_attention_sizes
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


def canonical_options(method: type[PositionModule], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options that a trained model depends on, defaults filled in; those that only say where it starts are out."""
    defaults = {name: parameter.default for name, parameter in method.options().items()}
    initialization = method.initialization_options()
    return {name: value for name, value in {**defaults, **options}.items() if name not in initialization}


def canonical_position_options(position: PositionOptions) -> dict[str, Any]:
    """The options of an encoding, a processor and a temperature, so that equal models compare equal."""
    from megatron.position.registry import load_encoding_class, load_processor_class, load_temperature_class

    processor, temperature = position.score_processor, position.attention_temperature
    return {
        "pos_emb_options": canonical_options(load_encoding_class(position.pos_emb), position.pos_emb_options),
        "score_processor_options": {}
        if processor == "none"
        else canonical_options(load_processor_class(processor), position.score_processor_options),
        "attention_temperature_options": {}
        if temperature == "none"
        else canonical_options(load_temperature_class(temperature), position.attention_temperature_options),
    }


def build_encoding_from_options(options: PositionOptions, dims: AttentionDims) -> Encoding:
    """A fresh encoding. Raises UserError that names the key."""
    from megatron.position.registry import build_encoding

    try:
        return build_encoding(options.pos_emb, dims, options.pos_emb_options)
    except ValueError as error:
        raise UserError(f"pos_emb: {error}", _find_key("pos_emb", error)) from error


def build_processor_from_options(options: PositionOptions, dims: AttentionDims, encoding: Encoding) -> Processor | None:
    """A fresh processor for an encoding, or None where there is none. Raises UserError that names the key."""
    from megatron.position.registry import build_processor

    if options.score_processor == "none":
        if options.score_processor_options:
            raise UserError(
                "score_processor_options are given, but score_processor is none",
                f"score_processor_options.{next(iter(options.score_processor_options))}",
            )
        return None
    try:
        return build_processor(
            options.score_processor, dims, options.score_processor_options, has_bias=encoding.adds_bias
        )
    except ValueError as error:
        raise UserError(f"score_processor: {error}", _find_key("score_processor", error)) from error


def build_temperature_from_options(options: PositionOptions, dims: AttentionDims) -> Temperature | None:
    """A fresh temperature, or None where there is none. Raises UserError that names the key."""
    from megatron.position.registry import build_temperature

    if options.attention_temperature == "none":
        if options.attention_temperature_options:
            raise UserError(
                "attention_temperature_options are given, but attention_temperature is none",
                f"attention_temperature_options.{next(iter(options.attention_temperature_options))}",
            )
        return None
    try:
        return build_temperature(options.attention_temperature, dims, options.attention_temperature_options)
    except ValueError as error:
        raise UserError(f"attention_temperature: {error}", _find_key("attention_temperature", error)) from error


def _find_key(key: str, error: ValueError) -> str:
    """The key of the configuration that an error is about: an option's, or the one that names the method."""
    return f"{key}_options.{error.option}" if isinstance(error, OptionError) else key

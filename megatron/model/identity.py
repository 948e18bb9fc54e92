"""What a position configuration computes, whatever way it is written."""

from collections.abc import Mapping
from typing import Any

from megatron.options.model import PositionOptions
from megatron.position.method import PositionModule
from megatron.position.registry import load_encoding_class, load_processor_class


def canonical_options(method: type[PositionModule], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options that a trained model depends on, defaults filled in; those that only say where it starts are out."""
    defaults = {name: parameter.default for name, parameter in method.options().items()}
    initialization = method.initialization_options()
    return {name: value for name, value in {**defaults, **options}.items() if name not in initialization}


def canonical_position_options(position: PositionOptions) -> dict[str, Any]:
    """`pos_emb_options` and `score_processor_options`, so that equal models compare equal."""
    none = position.score_processor == "none"
    return {
        "pos_emb_options": canonical_options(load_encoding_class(position.pos_emb), position.pos_emb_options),
        "score_processor_options": {}
        if none
        else canonical_options(load_processor_class(position.score_processor), position.score_processor_options),
    }

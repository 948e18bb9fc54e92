"""What a position configuration computes, whatever way it is written."""

from collections.abc import Mapping
from typing import Any

from megatron.options.model import PositionOptions
from megatron.position.method import Method
from megatron.position.registry import encoding_class, processor_class


def settled_options(method: type[Method], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options that a trained model depends on, defaults filled in; those that only say where it starts are out."""
    known = {name: parameter.default for name, parameter in method.options().items()}
    starts = method.start_options()
    return {name: value for name, value in {**known, **given}.items() if name not in starts}


def settled(position: PositionOptions) -> dict[str, Any]:
    """`pos_emb_options` and `score_processor_options`, so that equal models compare equal."""
    none = position.score_processor == "none"
    return {
        "pos_emb_options": settled_options(encoding_class(position.pos_emb), position.pos_emb_options),
        "score_processor_options": {}
        if none
        else settled_options(processor_class(position.score_processor), position.score_processor_options),
    }

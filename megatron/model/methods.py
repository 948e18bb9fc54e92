"""The encoding and the processor that a configuration names, without the rest of the model (or megatron-core)."""

from typing import Any

from megatron.errors import UserError
from megatron.options.model import ModelOptions, PositionOptions
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.registry import build_encoding, build_processor
from megatron.position.shape import AttentionDims


def build_attention_dims(model: ModelOptions) -> AttentionDims:
    """What encodings and processors are told about the model."""
    return AttentionDims(
        num_heads=model.num_attention_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        hidden_size=model.hidden_size,
        train_length=model.seq_length,
        max_length=model.max_position_embeddings or model.seq_length,
    )


def build_encoding_from_options(options: PositionOptions, dims: AttentionDims) -> Encoding:
    """A fresh encoding. Raises UserError that names the key."""
    try:
        return build_encoding(options.pos_emb, dims, options.pos_emb_options)
    except ValueError as error:
        raise UserError(f"pos_emb: {error}", _find_option_key("pos_emb", options.pos_emb_options, error)) from error


def build_processor_from_options(options: PositionOptions, dims: AttentionDims, encoding: Encoding) -> Processor | None:
    """A fresh processor for an encoding, or None where there is none. Raises UserError that names the key."""
    if options.score_processor == "none":
        if options.score_processor_options:
            raise UserError(
                "score_processor_options are given, but score_processor is none",
                f"score_processor_options.{next(iter(options.score_processor_options))}",
            )
        return None
    try:
        return build_processor(
            options.score_processor, dims, options.score_processor_options, has_bias=encoding.has_bias()
        )
    except ValueError as error:
        blamed = _find_option_key("score_processor", options.score_processor_options, error)
        raise UserError(f"score_processor: {error}", blamed) from error


def _find_option_key(chooser: str, options: dict[str, Any], error: ValueError) -> str:
    """The key that a method complains of: one of its options, else the choice of the method."""
    named = (name for name in options if f"option {name} " in str(error))
    return next((f"{chooser}_options.{name}" for name in named), chooser)

"""From options to a model: the one place where encodings, processors, backends and megatron-core meet."""

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.errors import UserError
from megatron.model import runtime
from megatron.model.attention import LayerPosition, PositionedAttention
from megatron.model.backends.choose import choose_backend
from megatron.model.gpt import GPT
from megatron.model.layer import Layer
from megatron.model.options import ModelOptions, PositionOptions
from megatron.model.transformer_config import transformer_config
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.registry import build_encoding, build_processor
from megatron.position.shape import Shape


def padded_vocabulary(vocab_size: int, multiple: int) -> int:
    """The vocabulary size rounded up to a multiple."""
    return -(-vocab_size // multiple) * multiple


def position_shape(model: ModelOptions) -> Shape:
    """What encodings and processors are told about the model."""
    return Shape(
        num_heads=model.num_attention_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        hidden_size=model.hidden_size,
        train_length=model.seq_length,
        max_length=model.max_position_embeddings or model.seq_length,
    )


def _encoding(options: PositionOptions, shape: Shape) -> Encoding:
    try:
        return build_encoding(options.pos_emb, shape, options.pos_emb_options)
    except ValueError as error:
        raise UserError(f"pos_emb: {error}") from error


def _processor(options: PositionOptions, shape: Shape, encoding: Encoding) -> Processor | None:
    if options.score_processor == "none":
        if options.score_processor_options:
            raise UserError("score_processor_options are given, but score_processor is none")
        return None
    try:
        return build_processor(
            options.score_processor, shape, options.score_processor_options, has_bias=encoding.has_bias()
        )
    except ValueError as error:
        raise UserError(f"score_processor: {error}") from error


def _layer_spec(model: ModelOptions, position: LayerPosition) -> ModuleSpec:
    """megatron-core's GPT layer with our layer class and our attention in it."""
    spec = get_gpt_layer_local_spec(normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm])
    spec.module = Layer
    spec.params = {"parallel": model.gpt_j_residual, "tied_norm": model.gpt_j_tied}
    if model.gpt_j_residual and model.gpt_j_tied:
        spec.submodules.pre_mlp_layernorm = IdentityOp

    def core_attention(*, config: Any, **_: object) -> PositionedAttention:
        return PositionedAttention(config, position)

    spec.submodules.self_attention.submodules.core_attention = core_attention
    return spec


def build_model(
    model: ModelOptions,
    position: PositionOptions,
    vocab_size: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    backend: str | None = None,
) -> GPT:
    """Build the GPT with fresh weights.

    Args:
        model, position: the configuration's sections.
        vocab_size: the tokenizer's vocabulary; it is padded to a multiple of make_vocab_size_divisible_by.
        device: where the model goes; `meta` builds shapes without memory.
        dtype: type of the weights.
        seed: seeds initialisation (and torch); None leaves the random state alone.
        backend: overrides attention_backend.

    Raises:
        UserError: a name, option or combination that cannot be built, naming the key and the choices.
    """
    if model.hidden_size % model.num_attention_heads:
        raise UserError(
            f"num_attention_heads {model.num_attention_heads} does not divide hidden_size {model.hidden_size}"
        )
    runtime.initialize(torch.initial_seed() if seed is None else seed)
    with torch.device("meta" if str(device) == "meta" else "cpu"):
        gpt = _build(model, position, vocab_size, dtype, backend or model.attention_backend)
    return gpt.to(device=device, dtype=dtype)


def _build(model: ModelOptions, position: PositionOptions, vocab_size: int, dtype: torch.dtype, backend: str) -> GPT:
    shape = position_shape(model)
    shared = None if position.pos_emb_per_layer else _encoding(position, shape)
    layers = []
    for _ in range(model.num_layers):
        encoding = shared if shared is not None else _encoding(position, shape)
        if shared is None and type(encoding).overrides("embed"):
            raise UserError(
                f"pos_emb_per_layer: true, but {position.pos_emb} adds to the token embeddings, which are not per layer"
            )
        processor = _processor(position, shape, encoding)
        chosen = choose_backend(backend, model.attention_chunk_rows, encoding, processor)
        layers.append(_layer_spec(model, LayerPosition(encoding, shared is not None, processor, chosen)))
    norm = LocalSpecProvider().layer_norm(rms_norm=model.norm == "rmsnorm", for_qk=False)
    return GPT(
        config=transformer_config(model, dtype),
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),
        vocab_size=padded_vocabulary(vocab_size, model.make_vocab_size_divisible_by),
        max_sequence_length=shape.max_length,
        position_embedding_type="none",
        share_embeddings_and_output_weights=not model.no_weight_tying,
        position=shared,
        checkpoint_layers=model.checkpoint_num_layers if model.checkpoint_activations else 0,
    )

"""From options to a model: the one place where encodings, processors, backends and megatron-core meet."""

from itertools import chain
from typing import Any

import torch

from megatron.attention.backends.registry import row_blocks_reason, select_backend
from megatron.distributed.collectives import register_grad_all_reduce
from megatron.distributed.mesh import pipeline_layer_range
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.attention import LayerPositionConfig, PositionedAttention
from megatron.model.attention_dims import build_attention_dims
from megatron.model.gpt import GPT
from megatron.model.layer import BiasedSelfAttention, GPTLayer, OffStageLayer
from megatron.model.megatron_core import (
    IdentityOp,
    LocalSpecProvider,
    ModuleSpec,
    TransformerBlockSubmodules,
    get_gpt_layer_local_spec,
)
from megatron.model.position_modules import build_encoding_from_options, build_processor_from_options
from megatron.model.transformer_config import transformer_config
from megatron.options.model import (
    ModelOptions,
    PositionOptions,
    find_indivisible_sizes,
    find_model_conflicts,
    has_qkv_bias,
    padded_vocab_size,
)
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims
from megatron.position.processor import Processor
from megatron.utils.errors import UserError


def check_position_options(model: ModelOptions, position: PositionOptions) -> None:
    """Build what one layer needs of positions, without memory, and throw it away: refuses what `build_model` would.

    Raises:
        UserError: a name, option or combination that cannot be built, naming the key and the choices.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        dims = build_attention_dims(model)
        shared = None if position.pos_emb_per_layer else build_encoding_from_options(position, dims)
        encoding, processor = _build_position_modules(model, position, dims, shared)
        select_backend(model.attention_backend, model.attention_chunk_rows, encoding, processor)


def _build_position_modules(
    model: ModelOptions, position: PositionOptions, dims: AttentionDims, shared: Encoding | None
) -> tuple[Encoding, Processor | None]:
    """The encoding and the processor of one layer."""
    encoding = shared if shared is not None else build_encoding_from_options(position, dims)
    _check_randomized(position, encoding)
    if shared is None and type(encoding).overrides_hook("embed"):
        raise UserError(
            f"pos_emb_per_layer: true, but {position.pos_emb} adds to the token embeddings, which are not per layer",
            "pos_emb_per_layer",
        )
    return encoding, build_processor_from_options(position, dims, encoding)


def _check_randomized(position: PositionOptions, encoding: Encoding) -> None:
    limit = position.randomized_positions
    if limit is None:
        return
    if not encoding.takes_positions:
        raise UserError(
            f"randomized_positions: {limit}, but pos_emb {position.pos_emb} takes no positions", "randomized_positions"
        )
    if encoding.max_length is not None and limit > encoding.max_length:
        raise UserError(
            f"randomized_positions: {limit}, but {position.pos_emb} positions end at {encoding.max_length} "
            "(max_position_embeddings)",
            "randomized_positions",
        )


def _register_gradient_sums(encoding: Encoding | None, processor: Processor | None, groups: ProcessGroups) -> None:
    """Parameters used for this rank's heads only get their whole gradient; those added to the embeddings have it."""
    if encoding is not None and not type(encoding).overrides_hook("embed"):
        register_grad_all_reduce(encoding, groups)
    if processor is not None:
        register_grad_all_reduce(processor, groups)


def _layer_spec(
    model: ModelOptions, position: LayerPositionConfig, layer_index: int, groups: ProcessGroups
) -> ModuleSpec:
    """megatron-core's GPT layer with our layer class and our attention in it."""
    spec = get_gpt_layer_local_spec(normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm])
    spec.module = (
        GPTLayer if layer_index in pipeline_layer_range(model.num_layers, groups.mesh.pipeline) else OffStageLayer
    )
    spec.params = {"parallel": model.gpt_j_residual, "tied_norm": model.gpt_j_tied}
    if model.gpt_j_residual and model.gpt_j_tied:
        spec.submodules.pre_mlp_layernorm = IdentityOp

    def core_attention(*, config: Any, **_: object) -> PositionedAttention:
        return PositionedAttention(config, position, layer_index, groups)

    attention = spec.submodules.self_attention
    biases = {"bias": model.use_bias_in_attn_linear, "qkv_bias": has_qkv_bias(model)}
    attention.module, attention.params = BiasedSelfAttention, {**attention.params, **biases}
    attention.submodules.core_attention = core_attention
    return spec


def build_model(
    model: ModelOptions,
    position: PositionOptions,
    vocab_size: int,
    *,
    groups: ProcessGroups,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    backend: str | None = None,
) -> GPT:
    """Build the GPT with fresh weights. Nothing outside it changes, but for torch's random state.

    Args:
        model, position: the configuration's sections.
        vocab_size: the tokenizer's vocabulary; it is padded to a multiple of make_vocab_size_divisible_by.
        groups: those that share the model; `alone()` if this one holds it whole.
        device: where the model goes; `meta` builds shapes without memory.
        dtype: type of the weights.
        seed: seeds initialisation (and torch); None leaves the random state alone.
        backend: overrides attention_backend.

    Raises:
        UserError: a name, option or combination that cannot be built, naming the key and the choices.
    """
    sizes = groups.mesh.sizes
    divided = find_indivisible_sizes(model, tensor=sizes.tensor, context=sizes.context, pipeline=sizes.pipeline)
    for _, problem in chain(find_model_conflicts(model, position), divided):
        raise UserError(problem)
    if seed is not None:
        torch.manual_seed(seed)
    with torch.device("meta" if str(device) == "meta" else "cpu"):
        gpt = _build_gpt(model, position, vocab_size, groups, dtype, backend or model.attention_backend)
    return gpt.to(device=device, dtype=dtype)


def _build_gpt(
    model: ModelOptions,
    position: PositionOptions,
    vocab_size: int,
    groups: ProcessGroups,
    dtype: torch.dtype,
    backend: str,
) -> GPT:
    dims = build_attention_dims(model)
    shared = None if position.pos_emb_per_layer else build_encoding_from_options(position, dims)
    methods = [_build_position_modules(model, position, dims, shared) for _ in range(model.num_layers)]
    selected = select_backend(backend, model.attention_chunk_rows, *methods[0])
    layers = []
    for layer, (encoding, processor) in enumerate(methods):
        layer_position = LayerPositionConfig(
            encoding, shared is not None, processor, position.attention_window, selected
        )
        layers.append(_layer_spec(model, layer_position, layer, groups))
        _register_gradient_sums(encoding if shared is None else None, processor, groups)
    _register_gradient_sums(shared, None, groups)
    norm = LocalSpecProvider().layer_norm(rms_norm=model.norm == "rmsnorm", for_qk=False)
    return GPT(
        config=transformer_config(model, dtype, groups.mesh.sizes),
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),
        vocab_size=padded_vocab_size(model, vocab_size),
        max_sequence_length=dims.max_length,
        position_embedding_type="none",
        share_embeddings_and_output_weights=not model.no_weight_tying,
        groups=groups,
        position=shared,
        randomized=position.randomized_positions,
        row_blocks_reason=row_blocks_reason(backend, *methods[0]),
        checkpoint_layers=model.checkpoint_num_layers if model.checkpoint_activations else 0,
    )

"""From options to a model: the one place where encodings, processors, backends and megatron-core meet."""

from itertools import chain
from typing import Any

import torch

from megatron.distributed.collectives import sum_gradients
from megatron.distributed.layers import layers_of
from megatron.distributed.processes import Processes
from megatron.errors import UserError
from megatron.model.attention import LayerPosition, PositionedAttention
from megatron.model.backends.choose import choose_backend, why_row_blocks
from megatron.model.gpt import GPT
from megatron.model.layer import Attention, Layer
from megatron.model.megatron_core import (
    IdentityOp,
    LocalSpecProvider,
    ModuleSpec,
    TransformerBlockSubmodules,
    get_gpt_layer_local_spec,
)
from megatron.model.methods import encoding_of, position_shape, processor_of
from megatron.model.stages import Foreign
from megatron.model.transformer_config import transformer_config
from megatron.options.model import (
    ModelOptions,
    PositionOptions,
    conflicts,
    has_qkv_bias,
    indivisible,
    padded_vocabulary,
)
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.shape import Shape


def check_position(model: ModelOptions, position: PositionOptions) -> None:
    """Build what one layer needs of positions, without memory, and throw it away: refuses what `build_model` would.

    Raises:
        UserError: a name, option or combination that cannot be built, naming the key and the choices.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        shape = position_shape(model)
        shared = None if position.pos_emb_per_layer else encoding_of(position, shape)
        encoding, processor = _methods(model, position, shape, shared)
        choose_backend(model.attention_backend, model.attention_chunk_rows, encoding, processor)


def _methods(
    model: ModelOptions, position: PositionOptions, shape: Shape, shared: Encoding | None
) -> tuple[Encoding, Processor | None]:
    """The encoding and the processor of one layer."""
    encoding = shared if shared is not None else encoding_of(position, shape)
    _check_randomized(position, encoding)
    if shared is None and type(encoding).overrides("embed"):
        raise UserError(
            f"pos_emb_per_layer: true, but {position.pos_emb} adds to the token embeddings, which are not per layer",
            "pos_emb_per_layer",
        )
    return encoding, processor_of(position, shape, encoding)


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


def _share_gradients(encoding: Encoding | None, processor: Processor | None, processes: Processes) -> None:
    """Parameters used for this rank's heads only get their whole gradient; those added to the embeddings have it."""
    if encoding is not None and not type(encoding).overrides("embed"):
        sum_gradients(encoding, processes)
    if processor is not None:
        sum_gradients(processor, processes)


def _layer_spec(model: ModelOptions, position: LayerPosition, layer: int, processes: Processes) -> ModuleSpec:
    """megatron-core's GPT layer with our layer class and our attention in it."""
    spec = get_gpt_layer_local_spec(normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm])
    spec.module = Layer if layer in layers_of(model.num_layers, processes.mesh.pipeline) else Foreign
    spec.params = {"parallel": model.gpt_j_residual, "tied_norm": model.gpt_j_tied}
    if model.gpt_j_residual and model.gpt_j_tied:
        spec.submodules.pre_mlp_layernorm = IdentityOp

    def core_attention(*, config: Any, **_: object) -> PositionedAttention:
        return PositionedAttention(config, position, layer, processes)

    attention = spec.submodules.self_attention
    biases = {"bias": model.use_bias_in_attn_linear, "qkv_bias": has_qkv_bias(model)}
    attention.module, attention.params = Attention, {**attention.params, **biases}
    attention.submodules.core_attention = core_attention
    return spec


def build_model(
    model: ModelOptions,
    position: PositionOptions,
    vocab_size: int,
    *,
    processes: Processes,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    backend: str | None = None,
) -> GPT:
    """Build the GPT with fresh weights. Nothing outside it changes, but for torch's random state.

    Args:
        model, position: the configuration's sections.
        vocab_size: the tokenizer's vocabulary; it is padded to a multiple of make_vocab_size_divisible_by.
        processes: those that share the model; `alone()` if this one holds it whole.
        device: where the model goes; `meta` builds shapes without memory.
        dtype: type of the weights.
        seed: seeds initialisation (and torch); None leaves the random state alone.
        backend: overrides attention_backend.

    Raises:
        UserError: a name, option or combination that cannot be built, naming the key and the choices.
    """
    sizes = processes.mesh.sizes
    divided = indivisible(model, tensor=sizes.tensor, context=sizes.context, pipeline=sizes.pipeline)
    for _, problem in chain(conflicts(model, position), divided):
        raise UserError(problem)
    if seed is not None:
        torch.manual_seed(seed)
    with torch.device("meta" if str(device) == "meta" else "cpu"):
        gpt = _build(model, position, vocab_size, processes, dtype, backend or model.attention_backend)
    return gpt.to(device=device, dtype=dtype)


def _build(
    model: ModelOptions,
    position: PositionOptions,
    vocab_size: int,
    processes: Processes,
    dtype: torch.dtype,
    backend: str,
) -> GPT:
    shape = position_shape(model)
    shared = None if position.pos_emb_per_layer else encoding_of(position, shape)
    methods = [_methods(model, position, shape, shared) for _ in range(model.num_layers)]
    chosen = choose_backend(backend, model.attention_chunk_rows, *methods[0])
    layers = []
    for layer, (encoding, processor) in enumerate(methods):
        parts = LayerPosition(encoding, shared is not None, processor, position.attention_window, chosen)
        layers.append(_layer_spec(model, parts, layer, processes))
        _share_gradients(encoding if shared is None else None, processor, processes)
    _share_gradients(shared, None, processes)
    norm = LocalSpecProvider().layer_norm(rms_norm=model.norm == "rmsnorm", for_qk=False)
    return GPT(
        config=transformer_config(model, dtype, processes.mesh.sizes),
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),
        vocab_size=padded_vocabulary(model, vocab_size),
        max_sequence_length=shape.max_length,
        position_embedding_type="none",
        share_embeddings_and_output_weights=not model.no_weight_tying,
        processes=processes,
        position=shared,
        randomized=position.randomized_positions,
        why_row_blocks=why_row_blocks(backend, *methods[0]),
        checkpoint_layers=model.checkpoint_num_layers if model.checkpoint_activations else 0,
    )

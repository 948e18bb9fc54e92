"""Construction of models from options. Only this module combines encodings, processors, backends and megatron-core."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron.attention.backends.backend import AttentionBackend, AttentionFormula, can_mask_documents
from megatron.attention.backends.registry import select_backend
from megatron.attention.softmax import build_softmax_sink
from megatron.distributed.mesh import get_pipeline_layer_range
from megatron.distributed.process_groups import ProcessGroups, provide_default_group
from megatron.distributed.sharding import register_grad_all_reduce
from megatron.model.attention import LayerAttention, PositionedAttention
from megatron.model.backend_choice import AttentionTarget, BackendChoice, LayerType, choose_backends
from megatron.model.core_modules import (
    IdentityOp,
    LocalSpecProvider,
    ModuleSpec,
    TransformerBlockSubmodules,
    get_gpt_layer_local_spec,
)
from megatron.model.gpt import GPT
from megatron.model.layer import (
    BiasedSelfAttention,
    ColumnLinear,
    FeedForward,
    GPTLayer,
    OffStageLayer,
    RowLinear,
)
from megatron.model.layer_config import build_transformer_config
from megatron.model.mup import MupScaling, get_multipliers
from megatron.model.norms import LayerNormWithoutBias, build_norm, build_qk_norm
from megatron.model.parameter_groups import list_roles
from megatron.model.position_modules import (
    build_attention_dims,
    build_encoding_from_options,
    build_processor_from_options,
    build_temperature_from_options,
    list_layer_positions,
    list_layer_types,
)
from megatron.options.model import (
    ModelOptions,
    get_head_dim,
    get_norm_epsilon,
    get_output_gate_size,
    get_padded_vocab_size,
    get_qk_norm,
    has_qkv_bias,
)
from megatron.options.position import PositionOptions, find_indivisible_sizes, find_model_conflicts
from megatron.position.base import PositionModule
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims
from megatron.position.processor import Processor
from megatron.utils.errors import UserError


def check_position_options(model: ModelOptions, position: PositionOptions) -> None:
    """Check that position options can be built, by building one layer's modules on the meta device.

    Raises:
        UserError: for a name, option or combination that `build_model` would reject, with the key and the valid
            choices.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        # One layer per layer type.
        layer_types, dims = list_layer_types(position, model.num_layers), build_attention_dims(model)
        _, formulas = _build_formulas(model, position, layer_types, dims)
        for own in layer_types:
            build_temperature_from_options(own, dims)
        for formula in formulas:
            select_backend(model.attention_backend, model.attention_chunk_rows, formula)


def has_initial_effect(model: ModelOptions, position: PositionOptions) -> bool:
    """Return True if a newly initialized score processor of a configuration changes the model's output."""
    with torch.random.fork_rng(devices=[]):
        layer_types, dims = list_layer_types(position, model.num_layers), build_attention_dims(model)
        _, formulas = _build_formulas(model, position, layer_types, dims)
    processors = [formula.processor for formula in formulas]
    return any(processor is not None and processor.has_effect() for processor in processors)


def _build_formulas(
    model: ModelOptions, position: PositionOptions, layers: Sequence[PositionOptions], dims: AttentionDims
) -> tuple[dict[str, Encoding], list[AttentionFormula]]:
    """Build the encodings that layers share, by name, and the attention formula of each layer.

    The first result is empty if each layer has its own encoding.
    """
    shared: dict[str, Encoding] = {}
    if not position.pos_emb_per_layer:
        for own in layers:
            if own.encoding not in shared:
                shared[own.encoding] = build_encoding_from_options(own, dims)
    for name, encoding in shared.items():
        if len(shared) > 1 and type(encoding).overrides_hook("embed"):
            raise UserError(
                f"pos_emb: {name} adds to the token embeddings and cannot be used in single layers", "pos_emb"
            )
    formulas = [
        _build_formula(model, own, replace(dims, layer=layer), shared.get(own.encoding))
        for layer, own in enumerate(layers)
    ]
    encodings = [formula.encoding for formula in formulas]
    _check_randomized(position, encodings)
    if any(encoding.depends_on_length for encoding in encodings):
        for key, value in {"randomized_positions": None, "attention_mask": "causal"}.items():
            if (given := getattr(position, key)) != value:
                cause = f" (scaling {scaling})" if (scaling := position.pos_emb_options.get("scaling")) else ""
                raise UserError(
                    f"{key}: {given}, but the encoding{cause} depends on the length of a sequence that starts at "
                    "position 0",
                    key,
                )
    return shared, formulas


def _build_formula(
    model: ModelOptions, position: PositionOptions, dims: AttentionDims, shared: Encoding | None
) -> AttentionFormula:
    encoding = shared if shared is not None else build_encoding_from_options(position, dims)
    _check_multipliers(model, position, encoding)
    if shared is None and type(encoding).overrides_hook("embed"):
        raise UserError(
            f"pos_emb_per_layer: true, but {position.encoding} adds to the token embeddings, which are not per layer",
            "pos_emb_per_layer",
        )
    processor = build_processor_from_options(position, dims, encoding)
    return AttentionFormula(encoding, processor, model.attn_logit_softcapping, position.softmax)


def _check_randomized(position: PositionOptions, encodings: Sequence[Encoding]) -> None:
    limit = position.randomized_positions
    if limit is None:
        return
    if not any(encoding.takes_positions for encoding in encodings):
        raise UserError(
            f"randomized_positions: {limit}, but pos_emb {', '.join(position.encodings)} does not use positions",
            "randomized_positions",
        )
    for own in encodings:
        _check_limit(position, own, limit)
        if position.continuous_positions and not own.takes_real_positions:
            raise UserError(
                f"continuous_positions: true, but pos_emb {', '.join(position.encodings)} supports only integers",
                "continuous_positions",
            )


def _check_limit(position: PositionOptions, encoding: Encoding, limit: int) -> None:
    if reason := encoding.describe_unsupported_length(limit):
        raise UserError(f"randomized_positions: {limit}: {reason}", "randomized_positions")
    if encoding.max_length is not None and limit > encoding.max_length:
        raise UserError(
            f"randomized_positions: {limit}, but {', '.join(position.encodings)} positions end at "
            f"{encoding.max_length} (max_position_embeddings)",
            "randomized_positions",
        )


def _check_multipliers(model: ModelOptions, position: PositionOptions, encoding: Encoding) -> None:
    if model.query_pre_attn_scalar is not None and type(encoding).overrides_hook("contextual"):
        raise UserError(
            f"query_pre_attn_scalar: {model.query_pre_attn_scalar:g}, but pos_emb {position.encoding} computes its own "
            "products with queries and keys, which have no scaling rule for it",
            "query_pre_attn_scalar",
        )
    mup = MupScaling.from_options(model)
    if mup is None:
        return
    if model.mup_rp_embedding_mult != 1.0 and not type(encoding).overrides_hook("embed"):
        raise UserError(
            f"mup_rp_embedding_mult: {model.mup_rp_embedding_mult:g}, but pos_emb {position.encoding} adds nothing to "
            "the token embeddings",
            "mup_rp_embedding_mult",
        )
    if mup.width != mup.heads and type(encoding).overrides_hook("contextual"):
        raise UserError(
            f"pos_emb {position.encoding}: its products with queries and keys have no muP rule for a head size other "
            "than the base model's; keep that head size and scale num_attention_heads with hidden_size",
            "mup_base_num_attention_heads",
        )


def _scale_initial_weights(gpt: GPT, model: ModelOptions) -> None:
    """Rescale the initial weights from the base model's standard deviations to muP's."""
    if gpt.mup is None:
        return
    methods = [module for module in gpt.modules() if isinstance(module, PositionModule)]
    own = {id(p) for module in methods if isinstance(module, Encoding | Processor) for p in module.parameters()}
    unscaled = {id(p) for module in methods for p in module.list_weights_initialized_by_fan_in()}
    with torch.no_grad():
        for parameter, role in list_roles(gpt):
            factor = 1.0 if id(parameter) in unscaled else gpt.mup.get_init_scale(role)
            if id(parameter) not in own and role in ("embedding", "hidden"):
                factor *= model.mup_init_scale
            if factor != 1.0:
                parameter.mul_(factor)


def _register_gradient_sums(
    encoding: Encoding | None, others: Sequence[nn.Module | None], groups: ProcessGroups
) -> None:
    """Sum the gradients of parameters that each rank uses for its heads only.

    Parameters added to the embeddings already have full gradients.
    """
    if encoding is not None and not type(encoding).overrides_hook("embed"):
        register_grad_all_reduce(encoding, groups)
    for module in others:
        if module is not None:
            register_grad_all_reduce(module, groups)


def _select_norm(model: ModelOptions) -> type:
    """Return the class with which megatron-core builds norms of the residual stream."""
    if model.norm == "layernorm" and not model.layernorm_bias:
        return LayerNormWithoutBias
    norm: type = LocalSpecProvider().layer_norm(rms_norm=model.norm == "rmsnorm", for_qk=False)
    return norm


def _build_layer_spec(
    model: ModelOptions, layer_attention: LayerAttention, multiplier: float, layer_index: int, groups: ProcessGroups
) -> ModuleSpec:
    """Build the spec of megatron-core's GPT layer with our layer class and our attention.

    multiplier: multiplier of each branch's output.
    """
    spec = get_gpt_layer_local_spec(normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm])
    spec.module = (
        GPTLayer if layer_index in get_pipeline_layer_range(model.num_layers, groups.mesh.pipeline) else OffStageLayer
    )
    spec.params = {
        "parallel": model.gpt_j_residual,
        "tied_norm": model.gpt_j_tied,
        "multiplier": multiplier,
    }
    if model.norm_placement != "pre":
        epsilon = get_norm_epsilon(model, model.norm)
        build_post_norm = partial(build_norm, model.norm, model.hidden_size, epsilon, bias=model.layernorm_bias)
        spec.params["build_post_norm"] = build_post_norm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _select_norm(model)
    if model.norm_placement == "post":
        spec.submodules.input_layernorm = IdentityOp
    if model.norm_placement == "post" or (model.gpt_j_residual and model.gpt_j_tied):
        spec.submodules.pre_mlp_layernorm = IdentityOp

    def core_attention(*, config: Any, **_: object) -> PositionedAttention:
        return PositionedAttention(config, layer_attention, layer_index, groups)

    attention = spec.submodules.self_attention
    biases = {"bias": model.use_bias_in_attn_linear, "qkv_bias": has_qkv_bias(model)}
    attention.module, attention.params = BiasedSelfAttention, {**attention.params, **biases}
    attention.params["output_gates"] = get_output_gate_size(model)
    attention.params["recomputes"] = model.checkpoint_activations == "selective"
    if (layer_type := get_qk_norm(model)) is not None:

        def build_norm_of_heads(num_heads: int) -> nn.Module:
            epsilon, over_heads = get_norm_epsilon(model, layer_type), model.qk_layernorm_over_heads
            return build_qk_norm(
                layer_type,
                num_heads,
                get_head_dim(model),
                epsilon,
                groups,
                bias=model.layernorm_bias,
                over_heads=over_heads,
            )

        attention.params["build_qk_norm"] = build_norm_of_heads
    attention.submodules.core_attention = core_attention
    attention.submodules.linear_qkv, attention.submodules.linear_proj = ColumnLinear, RowLinear
    mlp = spec.submodules.mlp.submodules
    mlp.linear_fc1, mlp.linear_fc2 = ColumnLinear, RowLinear
    # A SimpleNamespace instead of a ModuleSpec: megatron-core passes `tp_group` only to its own MLP and warns
    # otherwise.
    spec.submodules.mlp = SimpleNamespace(
        module=FeedForward, submodules=mlp, params={"tp_group": groups.group("tensor")}
    )
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
    target: AttentionTarget | None = None,
) -> GPT:
    """Build the GPT with fresh weights.

    Side effects are limited to torch's random state and, if backends are checked, the user's cache.

    Args:
        model, position: sections of the configuration.
        vocab_size: vocabulary of the tokenizer; it is padded to a multiple of make_vocab_size_divisible_by.
        groups: process groups that share the model; `build_single_process_groups()` if this process holds all of it.
        device: device of the model; `meta` builds shapes without memory.
        dtype: data type of the weights.
        seed: seed of the initialization (and of torch); None leaves the random state unchanged.
        backend: backend that overrides attention_backend.
        target: device, data type and shapes of the computation, for the self-check of `attention_backend: auto` on a
            GPU; all processes must then call this. None skips the check.

    Raises:
        UserError: if a name, option or combination cannot be built; the message names the key and the valid choices.
        RunError: if a backend made a GPU unusable.
    """
    sizes = groups.mesh.sizes
    divided = find_indivisible_sizes(model, tensor=sizes.tensor, context=sizes.context, pipeline=sizes.pipeline)
    for _, problem in chain(find_model_conflicts(model, position), divided):
        raise UserError(problem)
    if seed is not None:
        torch.manual_seed(seed)
    dims, place = build_attention_dims(model), torch.device("meta" if str(device) == "meta" else "cpu")
    layers = list_layer_positions(position, model.num_layers)
    with place:
        shared, formulas = _build_formulas(model, position, layers, dims)
    layer_types: dict[int, LayerType] = {}
    for own, formula in zip(layers, formulas, strict=True):
        layer_types.setdefault(id(own), LayerType(own, formula))
    choice = choose_backends(backend or model.attention_backend, model, list(layer_types.values()), groups, target)
    backends = dict(zip(layer_types, choice.backends, strict=True))
    with place, provide_default_group():
        parts = [(own, formula, backends[id(own)]) for own, formula in zip(layers, formulas, strict=True)]
        gpt = _build_gpt(model, position, vocab_size, groups, dtype, shared, parts, choice)
    return gpt.to(device=device, dtype=dtype)


def _build_gpt(
    model: ModelOptions,
    position: PositionOptions,
    vocab_size: int,
    groups: ProcessGroups,
    dtype: torch.dtype,
    shared: dict[str, Encoding],
    parts: list[tuple[PositionOptions, AttentionFormula, AttentionBackend]],
    choice: BackendChoice,
) -> GPT:
    layers = []
    mup, multipliers = MupScaling.from_options(model), get_multipliers(model)
    for layer, (own, formula, backend) in enumerate(parts):
        layer_attention = LayerAttention(
            formula,
            bool(shared),
            own.window,
            backend,
            multipliers.query,
            build_temperature_from_options(own, build_attention_dims(model)),
            build_softmax_sink(formula.softmax_type, model.num_attention_heads),
        )
        layers.append(_build_layer_spec(model, layer_attention, multipliers.residual, layer, groups))
        own_encoding = None if shared else formula.encoding
        _register_gradient_sums(
            own_encoding, (formula.processor, layer_attention.temperature, layer_attention.sink), groups
        )
    for encoding in shared.values():
        _register_gradient_sums(encoding, (), groups)
    gpt = GPT(
        config=build_transformer_config(model, mup, dtype, groups.mesh.sizes),
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=_select_norm(model)),
        vocab_size=get_padded_vocab_size(model, vocab_size),
        max_sequence_length=build_attention_dims(model).max_length,
        position_embedding_type="none",
        share_embeddings_and_output_weights=not model.no_weight_tying,
        groups=groups,
        encoding_names=position.encodings,
        positions=shared,
        randomized=position.randomized_positions,
        continuous=position.continuous_positions,
        masks_documents=all(
            can_mask_documents(
                formula.encoding, backend, formula.processor, randomized=position.randomized_positions is not None
            )
            for _, formula, backend in parts
        ),
        backend_choice=choice,
        mup=mup,
        multipliers=multipliers,
        checkpoint_layers=model.checkpoint_num_layers if model.checkpoint_activations is True else 0,
        logit_softcap=model.final_logit_softcapping,
    )
    _scale_initial_weights(gpt, model)
    return gpt

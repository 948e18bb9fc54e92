"""Llama family in transformers' format: Llama 2 and 3, SmolLM2, and Qwen2.

Qwen2 has biases only for queries, keys and values. Families with other norms reuse most of this module.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.hf_config import (
    ROPE_DIFFERENCE,
    HFConfigReader,
    build_rope_keys,
    check_rope_scaling,
    read_activation,
    read_rope_options,
)
from megatron.conversion.model_family import (
    EMBEDDING_WEIGHT,
    IDENTITY,
    OUTPUT_WEIGHT,
    Concat,
    ModelFamily,
    SeparateQKV,
    Transform,
    WeightMapping,
    check_equal_biases,
    map_layers,
)
from megatron.options.model import compute_intermediate_size, ffn_hidden_size, has_qkv_bias, head_dim, num_kv_heads

ACTIVATION_TO_HF = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
"""Activation of the gate in transformers, by our gated activation."""
GATE_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
"""Gated activation, by the activation of its gate."""
WINDOWED = "sliding_attention"
LAYER_TYPES = (WINDOWED, "full_attention")
"""Attention types of layers in `layer_types`."""
LLAMA_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
"""Names of a layer's norms, ours and theirs."""


def read_llama_keys(
    hf_config: HFConfigReader,
    *,
    head_dim: int | None = None,
    activation_key: str = "hidden_act",
    default_activation: str = "silu",
    is_tied: bool = False,
    default_base: float = 10000.0,
) -> dict[str, Any]:
    """Return our keys for configuration keys that Llama-like families share.

    Args:
        hf_config: reader of config.json.
        head_dim: default head dimension; hidden_size / num_attention_heads if None.
        activation_key, default_activation: key of the gate's activation, and its default.
        is_tied: default of tie_word_embeddings.
        default_base: default base of the rotary angles.
    """
    hidden_size, num_heads = (
        hf_config.get_positive_int("hidden_size", 4096),
        hf_config.get_positive_int("num_attention_heads", 32),
    )
    gate_activation = read_activation(hf_config, activation_key, default_activation)
    if gate_activation not in GATE_ACTIVATIONS:
        raise hf_config.value_error(activation_key, f"expected {', '.join(GATE_ACTIVATIONS)}")
    activation = GATE_ACTIVATIONS[gate_activation]
    head_dim = hf_config.get_positive_int("head_dim", head_dim or max(hidden_size // num_heads, 1))
    num_kv_heads = hf_config.get_positive_int("num_key_value_heads", num_heads)
    return {
        "num_layers": hf_config.get_positive_int("num_hidden_layers", 32),
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        **({} if num_kv_heads == num_heads else {"num_kv_heads": num_kv_heads}),
        **({} if head_dim * num_heads == hidden_size else {"head_dim": head_dim}),
        "intermediate_size": compute_intermediate_size(hf_config.get_positive_int("intermediate_size"), activation),
        "seq_length": hf_config.get_positive_int("max_position_embeddings", 2048),
        "norm": "rmsnorm",
        "rms_norm_epsilon": hf_config.get_positive_float("rms_norm_eps", 1e-6),
        "activation": activation,
        "no_weight_tying": not hf_config.get_bool("tie_word_embeddings", is_tied),
        "pos_emb": "rotary",
        "pos_emb_options": read_rope_options(
            hf_config, base_key="rope_theta", fraction_key=None, default_fraction=1.0, default_base=default_base
        ),
    }


def _llama_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    hf_config.get("pretraining_tp")  # affects how a product is split, not its result
    hf_config.require_one_of("rope_interleaved", (None, False), "rotary pairs must be in two halves")
    return {
        **read_llama_keys(hf_config),
        "use_bias_in_attn_linear": hf_config.get_bool("attention_bias", False),
        "use_bias_in_mlp": hf_config.get_bool("mlp_bias", False),
    }


def read_layer_windows(
    hf_config: HFConfigReader, default_types: Sequence[str], window: Any, num_layers: int
) -> dict[str, Any]:
    """Return `attention_window` for a mix of windowed and full-attention layers, or no key if no layer has a window.

    Args:
        hf_config: reader of config.json.
        default_types: layer types without layer_types.
        window: window size in tokens; None if windows are disabled.
        num_layers: number of layers.
    """
    types = hf_config.get("layer_types") or list(default_types)
    if not isinstance(types, list) or len(types) != num_layers or set(types) - set(LAYER_TYPES):
        raise hf_config.value_error("layer_types", f"expected one of {', '.join(LAYER_TYPES)} for each layer")
    if window is None or WINDOWED not in types:
        return {}
    if type(window) is not int or window < 1:
        raise hf_config.value_error("sliding_window", "must be an integer, at least 1")
    return {"attention_window": [window if each == WINDOWED else None for each in types]}


def write_layer_types(config: Config) -> tuple[list[str], int | None]:
    """Return `layer_types`, and the window of the layers that have one, as `read_layer_windows` reads them."""
    windows = [config.position.for_layer(layer).window for layer in range(config.model.num_layers)]
    types = ["full_attention" if window is None else WINDOWED for window in windows]
    return types, next((window for window in windows if window is not None), None)


def find_window_conflict(config: Config) -> str | None:
    """Return the conflict of a family that supports only one window size, or None."""
    given = config.position.attention_window
    sizes = sorted({window for window in (given if isinstance(given, list) else [given]) if window is not None})
    return (
        f"attention_window is {', '.join(map(str, sizes))}; this family supports one size" if len(sizes) > 1 else None
    )


def check_full_attention(hf_config: HFConfigReader) -> None:
    """Reject Qwen's sliding windows. Raises UserError."""
    hf_config.require_one_of("use_sliding_window", (None, False), "sliding windows are not supported")
    for name in ("sliding_window", "max_window_layers"):
        hf_config.get(name)  # ignored if windows are disabled
    layer_types = hf_config.get("layer_types", [])
    if any(layer_type != "full_attention" for layer_type in layer_types):
        raise hf_config.value_error("layer_types", "only full_attention is supported")


def _qwen2_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    check_full_attention(hf_config)
    return {
        **read_llama_keys(hf_config),
        "use_bias_in_attn_linear": False,
        "use_bias_in_qkv": True,
        "use_bias_in_mlp": False,
    }


def list_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    """Return the values that Llama supports, for some of our keys."""
    return {
        "pos_emb": ("rotary",),
        "norm": ("rmsnorm",),
        "activation": tuple(ACTIVATION_TO_HF),
        "gpt_j_residual": (False,),
        "head_dim": (config.model.head_dim,),
    }


def check_full_rotation(config: Config) -> str | None:
    """Return the conflict of a family that rotates whole heads with frequencies known to transformers, or None."""
    if reason := check_rope_scaling(config.position.pos_emb_options):
        return reason
    fraction = config.position.pos_emb_options.get("fraction", 1.0)
    return None if fraction == 1 else f"pos_emb_options.fraction is {fraction}; this family rotates whole heads"


def _find_llama_conflict(config: Config) -> str | None:
    return check_full_rotation(config) or check_equal_biases(config)


def _find_qwen2_conflict(config: Config) -> str | None:
    model = config.model
    if not has_qkv_bias(model) or model.use_bias_in_attn_linear or model.use_bias_in_mlp:
        return "Qwen2ForCausalLM has biases only in queries, keys and values"
    return check_full_rotation(config)


def write_llama_keys(config: Config) -> dict[str, Any]:
    """Return the keys that `read_llama_keys` reads."""
    model, options = config.model, config.position.pos_emb_options
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": num_kv_heads(model),
        "head_dim": head_dim(model),
        "intermediate_size": ffn_hidden_size(model),
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.rms_norm_epsilon,
        "hidden_act": ACTIVATION_TO_HF[model.activation],
        "rope_theta": options.get("base", 10000.0),
        **build_rope_keys(options, supports_fraction=False),
    }


def _llama_to_hf_keys(config: Config) -> dict[str, Any]:
    biases = {"attention_bias": config.model.use_bias_in_attn_linear, "mlp_bias": config.model.use_bias_in_mlp}
    return {**write_llama_keys(config), **biases}


def map_llama_weights(
    config: Config,
    norms: Mapping[str, str],
    norm_transform: Transform = IDENTITY,
    *,
    rotates_adjacent_pairs: bool = False,
) -> Iterator[WeightMapping]:
    """Yield the mappings of all weights of a Llama-like family.

    Args:
        config: our configuration.
        norms: names of a layer's norms, ours and theirs; norms of queries and keys are added if the configuration has
            them.
        norm_transform: transform of all norms.
        rotates_adjacent_pairs: True if adjacent elements of a head are rotated together rather than its halves.
    """
    model = config.model
    qkv_transform = SeparateQKV(model.num_attention_heads, num_kv_heads(model), rotates_adjacent_pairs)

    def layer_table(layer_idx: str) -> Iterator[tuple[str, Any, Transform]]:
        hf_prefix = f"model.layers.{layer_idx}"
        for megatron_name, hf_name in norms.items():
            yield f"{megatron_name}.weight", f"{hf_prefix}.{hf_name}.weight", norm_transform
        for which in "qk" if model.use_qk_layernorm else "":
            hf_name = f"{hf_prefix}.self_attn.{which}_norm.weight"
            yield f"self_attention.{which}_layernorm.weight", hf_name, norm_transform
        for part, has_qkv, has_attention_output, has_mlp in (
            ("weight", True, True, True),
            ("bias", has_qkv_bias(model), model.use_bias_in_attn_linear, model.use_bias_in_mlp),
        ):
            if has_qkv:
                hf_names = [f"{hf_prefix}.self_attn.{projection}_proj.{part}" for projection in "qkv"]
                yield f"self_attention.linear_qkv.{part}", hf_names, qkv_transform
            if has_attention_output:
                yield f"self_attention.linear_proj.{part}", f"{hf_prefix}.self_attn.o_proj.{part}", IDENTITY
            if has_mlp:
                hf_names = [f"{hf_prefix}.mlp.{projection}_proj.{part}" for projection in ("gate", "up")]
                yield f"mlp.linear_fc1.{part}", hf_names, Concat(2)
                yield f"mlp.linear_fc2.{part}", f"{hf_prefix}.mlp.down_proj.{part}", IDENTITY

    yield WeightMapping(EMBEDDING_WEIGHT, ("model.embed_tokens.weight",))
    yield from map_layers(config, layer_table)
    yield WeightMapping("decoder.final_layernorm.weight", ("model.norm.weight",), norm_transform)
    if model.no_weight_tying:
        yield WeightMapping(OUTPUT_WEIGHT, ("lm_head.weight",))


LLAMA = ModelFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_llama_from_hf_config,
    supported_values=list_supported_values,
    to_hf_keys=_llama_to_hf_keys,
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=lambda config: map_llama_weights(config, LLAMA_NORMS),
    ignored_pattern=r".*\brotary_emb\.inv_freq",
    find_other_conflict=_find_llama_conflict,
)
QWEN2 = ModelFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_qwen2_from_hf_config,
    supported_values=list_supported_values,
    to_hf_keys=lambda config: {**write_llama_keys(config), "use_sliding_window": False},
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=lambda config: map_llama_weights(config, LLAMA_NORMS),
    find_other_conflict=_find_qwen2_conflict,
)

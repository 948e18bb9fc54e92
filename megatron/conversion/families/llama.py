"""The Llama family as transformers has it: Llama 2 and 3, SmolLM2, and Qwen2, whose queries, keys and values alone have
biases."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.hf_config import (
    ROPE_DIFFERENCE,
    HFConfigReader,
    build_rope_keys,
    read_activation,
    read_rope_options,
)
from megatron.conversion.model_family import (
    EMBEDDING_WEIGHT,
    OUTPUT_WEIGHT,
    Concat,
    Identity,
    ModelFamily,
    SeparateQKV,
    Transform,
    WeightMapping,
    check_equal_biases,
    map_layers,
)
from megatron.options.model import ffn_hidden_size, has_qkv_bias, intermediate_size_of, num_kv_heads

ACTIVATION_TO_HF = {"swiglu": "silu", "geglu": "gelu"}
"""Of our gated activations, and theirs of the gate."""


def _read_common_keys(hf_config: HFConfigReader) -> dict[str, Any]:
    hidden_size, num_heads = (
        hf_config.get_positive_int("hidden_size", 4096),
        hf_config.get_positive_int("num_attention_heads", 32),
    )
    gate_activation = read_activation(hf_config, "hidden_act", "silu")
    activations_by_gate = {"silu": "swiglu", "gelu": "geglu"}
    if gate_activation not in activations_by_gate:
        raise hf_config.value_error("hidden_act", "gates are silu or gelu")
    if hf_config.get_positive_int("head_dim", hidden_size // num_heads) * num_heads != hidden_size:
        raise hf_config.value_error(
            "head_dim", f"heads have hidden_size / num_attention_heads = {hidden_size // num_heads} dimensions"
        )
    num_kv_heads = hf_config.get_positive_int("num_key_value_heads", num_heads)
    return {
        "num_layers": hf_config.get_positive_int("num_hidden_layers", 32),
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        **({} if num_kv_heads == num_heads else {"num_kv_heads": num_kv_heads}),
        "intermediate_size": intermediate_size_of(
            hf_config.get_positive_int("intermediate_size"), activations_by_gate[gate_activation]
        ),
        "seq_length": hf_config.get_positive_int("max_position_embeddings", 2048),
        "norm": "rmsnorm",
        "rms_norm_epsilon": hf_config.get_positive_float("rms_norm_eps", 1e-6),
        "activation": activations_by_gate[gate_activation],
        "no_weight_tying": not hf_config.get_bool("tie_word_embeddings", False),
        "pos_emb": "rotary",
        "pos_emb_options": read_rope_options(hf_config, base_key="rope_theta", fraction_key=None, default_fraction=1.0),
    }


def _llama_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    hf_config.get("pretraining_tp")  # how a product is split up, not what it is
    hf_config.require_one_of("rope_interleaved", (None, False), "pairs lie in two halves")
    return {
        **_read_common_keys(hf_config),
        "use_bias_in_attn_linear": hf_config.get_bool("attention_bias", False),
        "use_bias_in_mlp": hf_config.get_bool("mlp_bias", False),
    }


def _qwen2_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    hf_config.require_one_of("use_sliding_window", (None, False), "every layer attends to all earlier tokens")
    for name in ("sliding_window", "max_window_layers"):
        hf_config.get(name)  # of what is off
    layer_types = hf_config.get("layer_types", [])
    if any(layer_type != "full_attention" for layer_type in layer_types):
        raise hf_config.value_error("layer_types", "every layer attends to all earlier tokens")
    return {
        **_read_common_keys(hf_config),
        "use_bias_in_attn_linear": False,
        "use_bias_in_qkv": True,
        "use_bias_in_mlp": False,
    }


def _supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        "pos_emb": ("rotary",),
        "norm": ("rmsnorm",),
        "activation": tuple(ACTIVATION_TO_HF),
        "gpt_j_residual": (False,),
    }


def _check_full_rotation(config: Config) -> str | None:
    fraction = config.position.pos_emb_options.get("fraction", 1.0)
    return None if fraction == 1 else f"pos_emb_options.fraction is {fraction}; this family turns whole heads"


def _find_llama_conflict(config: Config) -> str | None:
    return _check_full_rotation(config) or check_equal_biases(config)


def _find_qwen2_conflict(config: Config) -> str | None:
    model = config.model
    if not has_qkv_bias(model) or model.use_bias_in_attn_linear or model.use_bias_in_mlp:
        return "Qwen2ForCausalLM has biases in queries, keys and values, and nowhere else"
    return _check_full_rotation(config)


def _to_hf_keys(config: Config) -> dict[str, Any]:
    model, options = config.model, config.position.pos_emb_options
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": num_kv_heads(model),
        "head_dim": model.hidden_size // model.num_attention_heads,
        "intermediate_size": ffn_hidden_size(model),
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.rms_norm_epsilon,
        "hidden_act": ACTIVATION_TO_HF[model.activation],
        "rope_theta": options.get("base", 10000.0),
        **build_rope_keys(options, supports_fraction=False),
    }


def _llama_to_hf_keys(config: Config) -> dict[str, Any]:
    biases = {"attention_bias": config.model.use_bias_in_attn_linear, "mlp_bias": config.model.use_bias_in_mlp}
    return {**_to_hf_keys(config), **biases}


def _weight_mappings(config: Config) -> Iterator[WeightMapping]:
    model = config.model
    qkv_transform = SeparateQKV(model.num_attention_heads, num_kv_heads(model))

    def layer_table(layer_idx: str) -> Iterator[tuple[str, Any, Transform]]:
        hf_prefix = f"model.layers.{layer_idx}"
        yield "input_layernorm.weight", f"{hf_prefix}.input_layernorm.weight", Identity()
        yield "pre_mlp_layernorm.weight", f"{hf_prefix}.post_attention_layernorm.weight", Identity()
        for part, has_qkv, has_attention_output, has_mlp in (
            ("weight", True, True, True),
            ("bias", has_qkv_bias(model), model.use_bias_in_attn_linear, model.use_bias_in_mlp),
        ):
            if has_qkv:
                hf_names = [f"{hf_prefix}.self_attn.{projection}_proj.{part}" for projection in "qkv"]
                yield f"self_attention.linear_qkv.{part}", hf_names, qkv_transform
            if has_attention_output:
                yield f"self_attention.linear_proj.{part}", f"{hf_prefix}.self_attn.o_proj.{part}", Identity()
            if has_mlp:
                hf_names = [f"{hf_prefix}.mlp.{projection}_proj.{part}" for projection in ("gate", "up")]
                yield f"mlp.linear_fc1.{part}", hf_names, Concat(2)
                yield f"mlp.linear_fc2.{part}", f"{hf_prefix}.mlp.down_proj.{part}", Identity()

    yield WeightMapping(EMBEDDING_WEIGHT, ("model.embed_tokens.weight",))
    yield from map_layers(config, layer_table)
    yield WeightMapping("decoder.final_layernorm.weight", ("model.norm.weight",))
    if model.no_weight_tying:
        yield WeightMapping(OUTPUT_WEIGHT, ("lm_head.weight",))


LLAMA = ModelFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_llama_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=_llama_to_hf_keys,
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=_weight_mappings,
    ignored_pattern=r".*\brotary_emb\.inv_freq",
    find_other_conflict=_find_llama_conflict,
)
QWEN2 = ModelFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_qwen2_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=lambda config: {**_to_hf_keys(config), "use_sliding_window": False},
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=_weight_mappings,
    find_other_conflict=_find_qwen2_conflict,
)

"""Gemma and Gemma 2 in transformers' format.

They differ from Llama by embeddings multiplied by the square root of the width, and norms that multiply by 1 + weight.
Gemma 2 also has norms on both sides of a branch and soft caps. In Gemma 2, every other layer uses a sliding window,
starting with the first.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    LAYER_TYPES,
    LLAMA_NORMS,
    check_full_rotation,
    find_window_conflict,
    list_supported_values,
    map_llama_weights,
    read_layer_windows,
    read_llama_keys,
    write_layer_types,
    write_llama_keys,
)
from megatron.conversion.hf_config import ROPE_DIFFERENCE, HFConfigReader
from megatron.conversion.model_family import AddOne, ModelFamily, check_equal_biases
from megatron.options.model import head_dim

DEFAULT_HEAD_DIM, DEFAULT_SCALAR, DEFAULT_WINDOW, DEFAULT_LENGTH = 256, 256, 4096, 8192
ACTIVATION = "gelu_pytorch_tanh"
GEMMA2_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Names of a layer's norms, ours and theirs."""
KNOWN_DIFFERENCE = f"{ROPE_DIFFERENCE}; norm weights are stored minus 1, which may round their last digit"


def _read_common_keys(hf_config: HFConfigReader, activation_key: str) -> dict[str, Any]:
    hf_config.require_one_of("use_bidirectional_attention", (None, False), "only causal attention is supported")
    keys = read_llama_keys(
        hf_config, head_dim=DEFAULT_HEAD_DIM, activation_key=activation_key, default_activation=ACTIVATION, is_tied=True
    )
    return {
        **keys,
        "seq_length": hf_config.get_positive_int("max_position_embeddings", DEFAULT_LENGTH),
        "embedding_multiplier": keys["hidden_size"] ** 0.5,
        "use_bias_in_attn_linear": hf_config.get_bool("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def _gemma_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    # Early files say gelu but mean its approximation.
    hf_config.require_one_of("hidden_act", (None, "gelu", ACTIVATION), f"expected {ACTIVATION}")
    hf_config.require_one_of("hidden_activation", (None, ACTIVATION), f"expected {ACTIVATION}")
    return {**_read_common_keys(hf_config, "hidden_act"), "activation": "geglu_tanh"}


def _gemma2_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    keys = _read_common_keys(hf_config, "hidden_activation")
    hf_config.get("hidden_act")  # key of the first Gemma
    window = hf_config.get_positive_int("sliding_window", DEFAULT_WINDOW)
    types = [LAYER_TYPES[layer % 2] for layer in range(keys["num_layers"])]  # default without layer_types
    size = keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"]
    scalar = hf_config.get_positive_float("query_pre_attn_scalar", DEFAULT_SCALAR)
    return {
        **keys,
        "norm_placement": "sandwich",
        "attn_logit_softcapping": _read_cap(hf_config, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _read_cap(hf_config, "final_logit_softcapping", 30.0),
        **({} if scalar == size else {"query_pre_attn_scalar": scalar}),
        **read_layer_windows(hf_config, types, window, keys["num_layers"]),
    }


def _read_cap(hf_config: HFConfigReader, name: str, default: float) -> float | None:
    """Return a soft cap. Null disables it, unlike a missing key."""
    return None if hf_config.is_null(name) else hf_config.get_positive_float(name, default)


def _supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {**list_supported_values(config), "activation": ("geglu_tanh",), "use_bias_in_mlp": (False,)}


def _gemma2_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    model = config.model
    return {
        **_supported_values(config),
        "norm_placement": ("sandwich",),
        "attn_logit_softcapping": (model.attn_logit_softcapping,),
        "final_logit_softcapping": (model.final_logit_softcapping,),
        "attention_window": (config.position.attention_window,),
    }


def _find_conflict(config: Config) -> str | None:
    model = config.model
    if model.embedding_multiplier != model.hidden_size**0.5:
        return f"embedding_multiplier is {model.embedding_multiplier:g}; Gemma uses the square root of hidden_size"
    if model.query_pre_attn_scalar is not None and not model.query_pre_attn_scalar.is_integer():
        return f"query_pre_attn_scalar is {model.query_pre_attn_scalar:g}; Gemma uses an integer"
    return check_full_rotation(config) or check_equal_biases(config)


def _to_hf_keys(config: Config) -> dict[str, Any]:
    keys = write_llama_keys(config)
    return {**keys, "hidden_activation": keys["hidden_act"], "attention_bias": config.model.use_bias_in_attn_linear}


def _gemma2_to_hf_keys(config: Config) -> dict[str, Any]:
    model, (types, window) = config.model, write_layer_types(config)
    return {
        **_to_hf_keys(config),
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "query_pre_attn_scalar": int(model.query_pre_attn_scalar or head_dim(model)),
        "sliding_window": window or DEFAULT_WINDOW,
        "layer_types": types,
    }


GEMMA = ModelFamily(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_gemma_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=_to_hf_keys,
    known_difference=KNOWN_DIFFERENCE,
    weight_mappings=lambda config: map_llama_weights(config, LLAMA_NORMS, AddOne()),
    find_other_conflict=_find_conflict,
    multipliers=("embedding",),
)
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    from_hf_config=_gemma2_from_hf_config,
    supported_values=_gemma2_supported_values,
    to_hf_keys=_gemma2_to_hf_keys,
    weight_mappings=lambda config: map_llama_weights(config, GEMMA2_NORMS, AddOne()),
    find_other_conflict=lambda config: _find_conflict(config) or find_window_conflict(config),
    multipliers=("embedding", "query"),
)

"""Gemma, Gemma 2 and the text models of Gemma 3 in transformers' format.

They differ from Llama by embeddings multiplied by the square root of the width, and norms that multiply by 1 + weight.
Gemma 2 also has norms on both sides of a branch and soft caps, and every other layer uses a sliding window, starting
with the first. Gemma 3 normalizes queries and keys instead of capping scores, and five of six layers have a window and
another rotation.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    LLAMA_NORMS,
    find_llama_conflict,
    list_supported_values,
    map_llama_weights,
    read_llama_keys,
    write_llama_keys,
)
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.hf_layers import (
    LAYER_TYPES,
    ROPE_DIFFERENCE,
    combine_rotations,
    find_rotation_conflict,
    find_window_conflict,
    list_supported_encodings,
    read_interval_windows,
    read_layer_rope_options,
    write_layer_rope_parameters,
    write_layer_types,
)
from megatron.conversion.model_family import AddOne, ModelFamily
from megatron.options.model import get_head_dim

ACTIVATION = "gelu_pytorch_tanh"
GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "activation": ACTIVATION,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA2_DEFAULTS = {
    **GEMMA_DEFAULTS, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
GEMMA3_DEFAULTS = {**GEMMA2_DEFAULTS, "max_position_embeddings": 131_072}
DEFAULT_SCALAR, DEFAULT_WINDOW = 256, 4096
GEMMA2_PATTERN, GEMMA3_PATTERN = 2, 6
"""Default intervals of layers without a window."""
LOCAL_BASE, FULL_BASE = 10_000.0, 1_000_000.0
"""Default bases of the angles in Gemma 3's layers with and without a window."""
GEMMA2_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Names of a layer's norms: ours, and the family's."""
KNOWN_DIFFERENCE = f"{ROPE_DIFFERENCE}; norm weights are stored minus 1, which may round their last digit"


def _read_common_keys(
    config_reader: HFConfigReader,
    defaults: Mapping[str, Any],
    activation_key: str,
    rope_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    config_reader.get("hidden_act")  # key of the first Gemma, which later ones have too
    config_reader.require_one_of("use_bidirectional_attention", (None, False), "only causal attention is supported")
    keys = read_llama_keys(config_reader, defaults, activation_key=activation_key, rope_options=rope_options)
    return {
        **keys,
        "embedding_multiplier": keys["hidden_size"] ** 0.5,
        "use_bias_in_attn_linear": config_reader.get_bool("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def _gemma_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    # Early files say gelu but mean its approximation.
    config_reader.require_one_of("hidden_act", (None, "gelu", ACTIVATION), f"it must be {ACTIVATION}")
    config_reader.require_one_of("hidden_activation", (None, ACTIVATION), f"it must be {ACTIVATION}")
    return {**_read_common_keys(config_reader, GEMMA_DEFAULTS, "hidden_act"), "activation": "geglu_tanh"}


def _gemma2_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    keys = _read_common_keys(config_reader, GEMMA2_DEFAULTS, "hidden_activation")
    _, windows = read_interval_windows(config_reader, keys["num_layers"], GEMMA2_PATTERN, DEFAULT_WINDOW)
    return {
        **keys,
        "norm_placement": "sandwich",
        "attn_logit_softcapping": _read_cap(config_reader, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _read_cap(config_reader, "final_logit_softcapping", 30.0),
        **_read_scalar(config_reader, keys),
        **windows,
    }


def _gemma3_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    config_reader.require_one_of(
        "attn_logit_softcapping", (None,), "transformers does not apply it; set it to null if the model was trained so"
    )
    local, full = read_layer_rope_options(
        config_reader, LAYER_TYPES, (LOCAL_BASE, FULL_BASE), ("rope_local_base_freq", "rope_theta")
    )
    keys = _read_common_keys(config_reader, GEMMA3_DEFAULTS, "hidden_activation", full)
    pattern = config_reader.get_positive_int("sliding_window_pattern", GEMMA3_PATTERN)
    types, windows = read_interval_windows(config_reader, keys["num_layers"], pattern, DEFAULT_WINDOW)
    cap = config_reader.get("final_logit_softcapping")
    return {
        **keys,
        "norm_placement": "sandwich",
        "use_qk_layernorm": True,
        "final_logit_softcapping": None if cap is None else _read_cap(config_reader, "final_logit_softcapping", 1.0),
        **_read_scalar(config_reader, keys),
        **combine_rotations(config_reader, types, local, full),
        **windows,
    }


def _read_scalar(config_reader: HFConfigReader, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return `query_pre_attn_scalar` unless it is the head dimension."""
    size = keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"]
    scalar = config_reader.get_positive_float("query_pre_attn_scalar", DEFAULT_SCALAR)
    return {} if scalar == size else {"query_pre_attn_scalar": scalar}


def _read_cap(config_reader: HFConfigReader, name: str, default: float) -> float | None:
    """Return a soft cap. Null disables it, unlike a missing key."""
    return None if config_reader.is_null(name) else config_reader.get_positive_float(name, default)


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


def _gemma3_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        **_gemma2_supported_values(config),
        "pos_emb": list_supported_encodings(config, "rotary", "rotary_local"),
        "use_qk_layernorm": (True,),
        "qk_norm": (None, "rmsnorm"),
        "qk_layernorm_over_heads": (False,),
        "attn_logit_softcapping": (None,),
    }


def _find_conflict(config: Config) -> str | None:
    model = config.model
    if model.embedding_multiplier != model.hidden_size**0.5:
        return f"embedding_multiplier is {model.embedding_multiplier:g}; Gemma uses the square root of hidden_size"
    if model.query_pre_attn_scalar is not None and not model.query_pre_attn_scalar.is_integer():
        return f"query_pre_attn_scalar is {model.query_pre_attn_scalar:g}; Gemma uses an integer"
    return find_llama_conflict(config)


def _to_hf_keys(config: Config) -> dict[str, Any]:
    keys = write_llama_keys(config)
    return {**keys, "hidden_activation": keys["hidden_act"], "attention_bias": config.model.use_bias_in_attn_linear}


def _gemma2_to_hf_keys(config: Config) -> dict[str, Any]:
    model, (types, window) = config.model, write_layer_types(config)
    return {
        **_to_hf_keys(config),
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "query_pre_attn_scalar": int(model.query_pre_attn_scalar or get_head_dim(model)),
        "sliding_window": window or DEFAULT_WINDOW,
        "layer_types": types,
    }


def _gemma3_to_hf_keys(config: Config) -> dict[str, Any]:
    parameters = write_layer_rope_parameters(config)
    local_base = parameters[LAYER_TYPES[0]]["rope_theta"]
    return {**_gemma2_to_hf_keys(config), "rope_parameters": parameters, "rope_local_base_freq": local_base}


def _find_gemma2_conflict(config: Config) -> str | None:
    return _find_conflict(config) or find_window_conflict(config)


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
    known_difference=f"{KNOWN_DIFFERENCE}; transformers 4 caps scores only with attn_implementation='eager'",
    weight_mappings=lambda config: map_llama_weights(config, GEMMA2_NORMS, AddOne()),
    find_other_conflict=_find_gemma2_conflict,
    multipliers=("embedding", "query"),
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    from_hf_config=_gemma3_from_hf_config,
    supported_values=_gemma3_supported_values,
    to_hf_keys=_gemma3_to_hf_keys,
    known_difference=KNOWN_DIFFERENCE,
    find_other_conflict=lambda config: _find_gemma2_conflict(config) or find_rotation_conflict(config),
)

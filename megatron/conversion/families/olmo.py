"""OLMo 2 and OLMo 3 in transformers' format.

Norms follow the branches, and queries and keys are normalized over all heads. In OLMo 3 three of every four layers have
a window, and only the others scale their rotation.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    LLAMA,
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

NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Names of a layer's norms, ours and theirs."""
DEFAULTS = {"rms_norm_eps": 1e-5}
DEFAULT_WINDOW, DEFAULT_BASE, PATTERN = 4096, 500_000.0, 4


def _read_common_keys(hf_config: HFConfigReader, rope_options: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        **read_llama_keys(hf_config, DEFAULTS, rope_options=rope_options),
        "norm_placement": "post",
        "use_qk_layernorm": True,
        "qk_layernorm_over_heads": True,
        "use_bias_in_attn_linear": hf_config.get_bool("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def _olmo3_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    if not hf_config.get("rope_parameters"):
        # Versions of transformers differ in the base of layers with a window if this key has another value.
        hf_config.require_one_of("rope_theta", (None, DEFAULT_BASE), "give rope_parameters of both types of layers")
    local, full = read_layer_rope_options(
        hf_config, LAYER_TYPES, (DEFAULT_BASE, DEFAULT_BASE), ("rope_theta", "rope_theta")
    )
    keys = _read_common_keys(hf_config, full)
    types, windows = read_interval_windows(hf_config, keys["num_layers"], PATTERN, DEFAULT_WINDOW)
    return {
        **keys,
        **combine_rotations(hf_config, types, local, full),
        **windows,
    }


def _supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        **list_supported_values(config),
        "norm_placement": ("post",),
        "use_qk_layernorm": (True,),
        "qk_norm": (None, "rmsnorm"),
        "qk_layernorm_over_heads": (True,),
        "use_bias_in_mlp": (False,),
    }


def _olmo3_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        **_supported_values(config),
        "pos_emb": list_supported_encodings(config, "rotary", "rotary_local"),
        "attention_window": (config.position.attention_window,),
        "head_dim": (None,),
    }


def _to_hf_keys(config: Config) -> dict[str, Any]:
    return {**write_llama_keys(config), "attention_bias": config.model.use_bias_in_attn_linear}


def _olmo3_to_hf_keys(config: Config) -> dict[str, Any]:
    types, window = write_layer_types(config)
    return {
        **_to_hf_keys(config),
        "rope_parameters": write_layer_rope_parameters(config),
        "sliding_window": window or DEFAULT_WINDOW,
        "layer_types": types,
    }


def _find_olmo3_conflict(config: Config) -> str | None:
    return find_llama_conflict(config) or find_window_conflict(config) or find_rotation_conflict(config)


OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    from_hf_config=_read_common_keys,
    supported_values=_supported_values,
    to_hf_keys=_to_hf_keys,
    weight_mappings=lambda config: map_llama_weights(config, NORMS),
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    from_hf_config=_olmo3_from_hf_config,
    supported_values=_olmo3_supported_values,
    to_hf_keys=_olmo3_to_hf_keys,
    known_difference=f"{ROPE_DIFFERENCE}; transformers 4 rotates layers with a window by the base of the others",
    find_other_conflict=_find_olmo3_conflict,
)

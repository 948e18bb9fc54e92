"""Qwen3 in transformers' format: Llama with queries and keys normalized per head."""

from collections.abc import Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    LLAMA_NORMS,
    check_full_attention,
    check_full_rotation,
    list_supported_values,
    map_llama_weights,
    read_llama_keys,
    write_llama_keys,
)
from megatron.conversion.hf_config import ROPE_DIFFERENCE, HFConfigReader
from megatron.conversion.model_family import ModelFamily, check_equal_biases

DEFAULT_HEAD_DIM = 128
"""Default head dimension, independent of the width and the number of heads."""


def _from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    check_full_attention(hf_config)
    return {
        **read_llama_keys(hf_config, head_dim=DEFAULT_HEAD_DIM),
        "use_qk_layernorm": True,
        "use_bias_in_attn_linear": hf_config.get_bool("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def _supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        **list_supported_values(config),
        "use_qk_layernorm": (True,),
        "qk_norm": (None, "rmsnorm"),
        "qk_layernorm_over_heads": (False,),
        "use_bias_in_mlp": (False,),
    }


def _to_hf_keys(config: Config) -> dict[str, Any]:
    biases = {"attention_bias": config.model.use_bias_in_attn_linear}
    return {**write_llama_keys(config), **biases, "use_sliding_window": False}


QWEN3 = ModelFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=_to_hf_keys,
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=lambda config: map_llama_weights(config, LLAMA_NORMS),
    find_other_conflict=lambda config: check_full_rotation(config) or check_equal_biases(config),
)

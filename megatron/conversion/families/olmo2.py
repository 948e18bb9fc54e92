"""OLMo 2 in transformers' format: Llama with norms after the branches, and query and key norms over all heads."""

from collections.abc import Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    check_full_rotation,
    list_supported_values,
    map_llama_weights,
    read_llama_keys,
    write_llama_keys,
)
from megatron.conversion.hf_config import ROPE_DIFFERENCE, HFConfigReader
from megatron.conversion.model_family import ModelFamily, check_equal_biases

NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Names of a layer's norms, ours and theirs."""
DEFAULT_EPSILON = 1e-5


def _from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    return {
        **read_llama_keys(hf_config),
        "rms_norm_epsilon": hf_config.get_positive_float("rms_norm_eps", DEFAULT_EPSILON),
        "norm_placement": "post",
        "use_qk_layernorm": True,
        "qk_layernorm_over_heads": True,
        "use_bias_in_attn_linear": hf_config.get_bool("attention_bias", False),
        "use_bias_in_mlp": False,
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


OLMO2 = ModelFamily(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=lambda config: {**write_llama_keys(config), "attention_bias": config.model.use_bias_in_attn_linear},
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=lambda config: map_llama_weights(config, NORMS),
    find_other_conflict=lambda config: check_full_rotation(config) or check_equal_biases(config),
)

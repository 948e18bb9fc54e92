"""Variants of Llama in transformers' format: OLMo 2, Qwen3 and SmolLM3.

OLMo 2 has its norms after the branches, and query and key norms over all heads. Qwen3 normalizes queries and keys per
head. Some layers of SmolLM3 have no rotation and possibly a sliding window: they are given by a list or an interval,
and windows are disabled in the published models.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    LLAMA,
    LLAMA_NORMS,
    check_full_attention,
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
from megatron.conversion.model_family import ModelFamily, check_equal_biases

DEFAULT_INTERVAL, DEFAULT_BASE = 4, 2_000_000.0


def _smollm3_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    keys = read_llama_keys(hf_config, is_tied=True, default_base=DEFAULT_BASE)
    num_layers = keys["num_layers"]
    interval = hf_config.get_positive_int("no_rope_layer_interval", DEFAULT_INTERVAL)
    turned = hf_config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(turned, list) or len(turned) < num_layers or any(each not in (0, 1) for each in turned):
        raise hf_config.value_error("no_rope_layers", "expected 1 for each layer with rotation, else 0")
    encodings = ["rotary" if each else "none" for each in turned[:num_layers]]
    has_windows = hf_config.get_bool("use_sliding_window", False)
    # By default, layers without rotation have the window.
    types = ["full_attention" if each == "rotary" else "sliding_attention" for each in encodings]
    window = None if hf_config.is_null("sliding_window") else hf_config.get("sliding_window")
    hf_config.get("max_window_layers")  # copied from Qwen's configuration; has no effect
    windows = read_layer_windows(hf_config, types, window if has_windows else None, num_layers)
    return {
        **keys,
        "pos_emb": encodings,
        **({} if "rotary" in encodings else {"pos_emb_options": {}}),
        **windows,
        "use_bias_in_attn_linear": hf_config.get_bool("attention_bias", False),
        "use_bias_in_mlp": hf_config.get_bool("mlp_bias", False),
    }


def _smollm3_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    position = config.position
    is_ours = set(position.encodings) <= {"rotary", "none"}
    return {
        **list_supported_values(config),
        "pos_emb": (position.pos_emb if is_ours else "rotary", "none"),
        "attention_window": (position.attention_window,),
    }


def _smollm3_to_hf_keys(config: Config) -> dict[str, Any]:
    model, position = config.model, config.position
    layers = [position.for_layer(layer) for layer in range(model.num_layers)]
    types, window = write_layer_types(config)
    return {
        **write_llama_keys(config),
        "no_rope_layers": [int(own.encoding == "rotary") for own in layers],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types,
        "attention_bias": model.use_bias_in_attn_linear,
        "mlp_bias": model.use_bias_in_mlp,
        "pad_token_id": None,  # transformers' default exceeds most vocabularies
    }


def _smollm3_find_conflict(config: Config) -> str | None:
    return check_full_rotation(config) or check_equal_biases(config) or find_window_conflict(config)


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    from_hf_config=_smollm3_from_hf_config,
    supported_values=_smollm3_supported_values,
    to_hf_keys=_smollm3_to_hf_keys,
    find_other_conflict=_smollm3_find_conflict,
)


DEFAULT_HEAD_DIM = 128
"""Default head dimension, independent of the width and the number of heads."""


def _qwen3_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    check_full_attention(hf_config)
    return {
        **read_llama_keys(hf_config, head_dim=DEFAULT_HEAD_DIM),
        "use_qk_layernorm": True,
        "use_bias_in_attn_linear": hf_config.get_bool("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def _qwen3_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        **list_supported_values(config),
        "use_qk_layernorm": (True,),
        "qk_norm": (None, "rmsnorm"),
        "qk_layernorm_over_heads": (False,),
        "use_bias_in_mlp": (False,),
    }


def _qwen3_to_hf_keys(config: Config) -> dict[str, Any]:
    biases = {"attention_bias": config.model.use_bias_in_attn_linear}
    return {**write_llama_keys(config), **biases, "use_sliding_window": False}


QWEN3 = ModelFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_qwen3_from_hf_config,
    supported_values=_qwen3_supported_values,
    to_hf_keys=_qwen3_to_hf_keys,
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=lambda config: map_llama_weights(config, LLAMA_NORMS),
    find_other_conflict=lambda config: check_full_rotation(config) or check_equal_biases(config),
)


NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Names of a layer's norms, ours and theirs."""
DEFAULT_EPSILON = 1e-5


def _olmo2_from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
    return {
        **read_llama_keys(hf_config),
        "rms_norm_epsilon": hf_config.get_positive_float("rms_norm_eps", DEFAULT_EPSILON),
        "norm_placement": "post",
        "use_qk_layernorm": True,
        "qk_layernorm_over_heads": True,
        "use_bias_in_attn_linear": hf_config.get_bool("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def _olmo2_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
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
    from_hf_config=_olmo2_from_hf_config,
    supported_values=_olmo2_supported_values,
    to_hf_keys=lambda config: {**write_llama_keys(config), "attention_bias": config.model.use_bias_in_attn_linear},
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=lambda config: map_llama_weights(config, NORMS),
    find_other_conflict=lambda config: check_full_rotation(config) or check_equal_biases(config),
)

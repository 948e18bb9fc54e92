"""Qwen2, Qwen2.5 and Qwen3 (dense models) in transformers' format.

Qwen2 has biases only for queries, keys and values. Qwen3 normalizes queries and keys per head. With
`use_sliding_window` layers from `max_window_layers` on have a window, unless `layer_types` says otherwise.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    LLAMA,
    check_full_rotation,
    find_llama_conflict,
    list_supported_values,
    read_llama_keys,
    write_llama_keys,
)
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.hf_layers import (
    FULL,
    WINDOWED,
    build_layer_windows,
    find_window_conflict,
    read_layer_types,
    read_required_window,
    write_layer_types,
)
from megatron.options.model import has_qkv_bias

QWEN2_DEFAULTS = {"intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}
QWEN3_DEFAULTS = {**QWEN2_DEFAULTS, "head_dim": 128}
DEFAULT_WINDOW, DEFAULT_FULL_LAYERS = 4096, 28


def _read_windows(config_reader: HFConfigReader, num_layers: int) -> dict[str, Any]:
    has_windows = config_reader.get_bool("use_sliding_window", False)
    num_full = config_reader.get("max_window_layers", DEFAULT_FULL_LAYERS)
    if type(num_full) is not int or num_full < 0:
        raise config_reader.value_error("max_window_layers", "it must be an integer of at least 0")
    if config_reader.is_null("sliding_window") or not has_windows:
        config_reader.get("sliding_window")
        num_full = num_layers
    types = [WINDOWED if layer >= num_full else FULL for layer in range(num_layers)]
    types = read_layer_types(config_reader, types, num_layers)
    if not has_windows and WINDOWED in types:
        raise config_reader.value_error("layer_types", f"{WINDOWED} needs use_sliding_window: true")
    window = read_required_window(config_reader, types, DEFAULT_WINDOW) if has_windows else None
    return build_layer_windows(config_reader, types, window)


def _write_windows(config: Config) -> dict[str, Any]:
    types, window = write_layer_types(config)
    if window is None:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": config.model.num_layers,
        "layer_types": types,
    }


def _qwen2_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    keys = read_llama_keys(config_reader, QWEN2_DEFAULTS)
    return {
        **keys,
        **_read_windows(config_reader, keys["num_layers"]),
        "use_bias_in_attn_linear": False,
        "use_bias_in_qkv": True,
        "use_bias_in_mlp": False,
    }


def _qwen2_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {**list_supported_values(config), "attention_window": (config.position.attention_window,)}


def _find_qwen2_conflict(config: Config) -> str | None:
    model = config.model
    if not has_qkv_bias(model) or model.use_bias_in_attn_linear or model.use_bias_in_mlp:
        return "Qwen2ForCausalLM has biases only in queries, keys and values"
    return check_full_rotation(config) or find_window_conflict(config)


def _qwen3_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    keys = read_llama_keys(config_reader, QWEN3_DEFAULTS)
    return {
        **keys,
        **_read_windows(config_reader, keys["num_layers"]),
        "use_qk_layernorm": True,
        "use_bias_in_attn_linear": config_reader.get_bool("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def _qwen3_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        **_qwen2_supported_values(config),
        "use_qk_layernorm": (True,),
        "qk_norm": (None, "rmsnorm"),
        "qk_layernorm_over_heads": (False,),
        "use_bias_in_mlp": (False,),
    }


def _find_qwen3_conflict(config: Config) -> str | None:
    return find_llama_conflict(config) or find_window_conflict(config)


def _qwen3_to_hf_keys(config: Config) -> dict[str, Any]:
    biases = {"attention_bias": config.model.use_bias_in_attn_linear}
    return {**write_llama_keys(config), **biases, **_write_windows(config)}


QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    from_hf_config=_qwen2_from_hf_config,
    supported_values=_qwen2_supported_values,
    to_hf_keys=lambda config: {**write_llama_keys(config), **_write_windows(config)},
    find_other_conflict=_find_qwen2_conflict,
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    from_hf_config=_qwen3_from_hf_config,
    supported_values=_qwen3_supported_values,
    to_hf_keys=_qwen3_to_hf_keys,
    find_other_conflict=_find_qwen3_conflict,
)

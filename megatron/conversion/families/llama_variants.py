"""Variants of Llama in transformers' format: Mistral, Granite and SmolLM3.

All layers of Mistral may have a window. Granite multiplies embeddings, scores, residual branches and logits by
constants. Some layers of SmolLM3 have no rotation and possibly a sliding window: they are given by a list or an
interval, and windows are disabled in the published models.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    LLAMA,
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
    find_window_pattern,
    list_supported_encodings,
    read_layer_types,
    write_layer_types,
)
from megatron.model.mup import get_multipliers
from megatron.options.model import get_head_dim

MISTRAL_DEFAULTS = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
SMOLLM3_DEFAULTS = {
    "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2_000_000.0,
}  # fmt: skip
DEFAULT_WINDOW, DEFAULT_INTERVAL = 4096, 4


def _mistral_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    keys = read_llama_keys(config_reader, MISTRAL_DEFAULTS)
    config_reader.require_one_of("layer_types", (None, []), "Mistral has the same window in all layers")
    window = (
        None
        if config_reader.is_null("sliding_window")
        else config_reader.get_positive_int("sliding_window", DEFAULT_WINDOW)
    )
    windows = {} if window is None else {"attention_window": window}
    return {**keys, **windows, "use_bias_in_attn_linear": False, "use_bias_in_mlp": False}


def _mistral_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        **list_supported_values(config),
        "attention_window": (config.position.attention_window,),
        "use_bias_in_attn_linear": (False,),
        "use_bias_in_mlp": (False,),
    }


def _mistral_find_conflict(config: Config) -> str | None:
    return find_window_pattern(config, "Mistral") or find_llama_conflict(config)


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    from_hf_config=_mistral_from_hf_config,
    supported_values=_mistral_supported_values,
    to_hf_keys=lambda config: {**write_llama_keys(config), "sliding_window": config.position.attention_window},
    find_other_conflict=_mistral_find_conflict,
)


def _granite_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    keys = read_llama_keys(config_reader)
    factor = config_reader.get_positive_float("attention_multiplier", 1.0)
    scalar = factor**-2
    size = keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"]
    return {
        **keys,
        "embedding_multiplier": config_reader.get_positive_float("embedding_multiplier", 1.0),
        "residual_multiplier": config_reader.get_positive_float("residual_multiplier", 1.0),
        "logit_scale": 1 / config_reader.get_positive_float("logits_scaling", 1.0),
        **({} if scalar == size else {"query_pre_attn_scalar": scalar}),
        "use_bias_in_attn_linear": config_reader.get_bool("attention_bias", False),
        "use_bias_in_mlp": config_reader.get_bool("mlp_bias", False),
    }


def _granite_to_hf_keys(config: Config) -> dict[str, Any]:
    model, multipliers = config.model, get_multipliers(config.model)
    scale = (model.query_pre_attn_scalar or get_head_dim(model)) ** -0.5
    return {
        **write_llama_keys(config),
        "embedding_multiplier": multipliers.embedding,
        "attention_multiplier": multipliers.query * get_head_dim(model) ** -0.5 if model.use_mup else scale,
        "residual_multiplier": multipliers.residual,
        "logits_scaling": 1 / multipliers.logits,
        "attention_bias": model.use_bias_in_attn_linear,
        "mlp_bias": model.use_bias_in_mlp,
    }


GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    from_hf_config=_granite_from_hf_config,
    to_hf_keys=_granite_to_hf_keys,
    multipliers=("embedding", "query", "residual", "logits"),
)


def _smollm3_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    keys = read_llama_keys(config_reader, SMOLLM3_DEFAULTS)
    num_layers = keys["num_layers"]
    interval = config_reader.get_positive_int("no_rope_layer_interval", DEFAULT_INTERVAL)
    turned = config_reader.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(turned, list) or len(turned) < num_layers or any(each not in (0, 1) for each in turned):
        raise config_reader.value_error("no_rope_layers", "it must be 1 for each layer with rotation, else 0")
    encodings = ["rotary" if each else "none" for each in turned[:num_layers]]
    has_windows = config_reader.get_bool("use_sliding_window", False)
    # By default, layers without rotation have the window.
    types = [FULL if each == "rotary" else WINDOWED for each in encodings]
    window = None if config_reader.is_null("sliding_window") else config_reader.get("sliding_window")
    config_reader.get("max_window_layers")  # copied from Qwen's configuration; has no effect
    types = read_layer_types(config_reader, types, num_layers)
    windows = build_layer_windows(config_reader, types, window if has_windows else None)
    return {
        **keys,
        "pos_emb": encodings,
        **({} if "rotary" in encodings else {"pos_emb_options": {}}),
        **windows,
        "use_bias_in_attn_linear": config_reader.get_bool("attention_bias", False),
        "use_bias_in_mlp": config_reader.get_bool("mlp_bias", False),
    }


def _smollm3_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        **list_supported_values(config),
        "pos_emb": list_supported_encodings(config, "rotary", "none"),
        "attention_window": (config.position.attention_window,),
    }


def _smollm3_to_hf_keys(config: Config) -> dict[str, Any]:
    model, position = config.model, config.position
    layers = [position.get_layer_options(layer) for layer in range(model.num_layers)]
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
    return find_llama_conflict(config) or find_window_conflict(config)


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    from_hf_config=_smollm3_from_hf_config,
    supported_values=_smollm3_supported_values,
    to_hf_keys=_smollm3_to_hf_keys,
    find_other_conflict=_smollm3_find_conflict,
)

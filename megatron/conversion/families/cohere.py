"""Command R and Command R7B (Cohere, Cohere 2) in transformers' format.

Both branches read the output of one norm without bias, adjacent elements of a head are rotated together, and logits are
multiplied by a constant. In Cohere 2, layers with rotation use a sliding window; the others have no rotation and attend
to all earlier tokens. This project rotates the two halves of a head together, so rows of queries and keys are
reordered.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    ACTIVATION_TO_HF,
    find_llama_conflict,
    map_llama_weights,
    read_llama_keys,
    write_llama_keys,
)
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.hf_layers import (
    ROPE_DIFFERENCE,
    WINDOWED,
    find_pattern_conflict,
    find_window_conflict,
    read_interval_windows,
    write_layer_types,
)
from megatron.conversion.model_family import ModelFamily, WeightMapping

DEFAULTS: dict[str, Any] = {
    "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
DEFAULT_SCALE, DEFAULT_BASE, DEFAULT_PATTERN, DEFAULT_WINDOW = 0.0625, 500_000.0, 4, 4096


def _read_common_keys(config_reader: HFConfigReader, default_base: float) -> dict[str, Any]:
    keys = read_llama_keys(config_reader, {**DEFAULTS, "rope_theta": default_base})
    del keys["rms_norm_epsilon"]
    if "head_dim" in keys:
        raise config_reader.value_error("head_dim", "must be hidden_size / num_attention_heads")
    return {
        **keys,
        "norm": "layernorm",
        "layernorm_epsilon": config_reader.get_positive_float("layer_norm_eps", 1e-5),
        "layernorm_bias": False,
        "gpt_j_residual": True,
        "gpt_j_tied": True,
        "logit_scale": config_reader.get_positive_float("logit_scale", DEFAULT_SCALE),
        "use_bias_in_attn_linear": config_reader.get_bool("attention_bias", False),
        "use_bias_in_mlp": False,
    }


def _cohere_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    config_reader.require_one_of(
        "use_qk_norm", (None, False), "norms of queries and keys with separate weights per head are not supported"
    )
    return _read_common_keys(config_reader, DEFAULT_BASE)


def _cohere2_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    keys = _read_common_keys(config_reader, default_base=10_000.0)
    pattern = config_reader.get_positive_int("sliding_window_pattern", DEFAULT_PATTERN)
    types, windows = read_interval_windows(config_reader, keys["num_layers"], pattern, DEFAULT_WINDOW)
    encodings = ["rotary" if each == WINDOWED else "none" for each in types]
    return {
        **keys,
        "pos_emb": encodings,
        **({} if "rotary" in encodings else {"pos_emb_options": {}}),
        **windows,
    }


def _cohere_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        "pos_emb": ("rotary",),
        "norm": ("layernorm",),
        "layernorm_bias": (False,),
        "activation": tuple(ACTIVATION_TO_HF),
        "gpt_j_residual": (True,),
        "gpt_j_tied": (True,),
        "use_bias_in_mlp": (False,),
    }


def _cohere2_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    position = config.position
    return {
        **_cohere_supported_values(config),
        "pos_emb": (position.pos_emb,),
        "attention_window": (position.attention_window,),
    }


def _find_cohere2_conflict(config: Config) -> str | None:
    conflict = find_pattern_conflict(config, "rotary", "none")
    return conflict or find_llama_conflict(config) or find_window_conflict(config)


def _cohere_to_hf_keys(config: Config) -> dict[str, Any]:
    model, keys = config.model, write_llama_keys(config)
    del keys["rms_norm_eps"]
    return {
        **keys,
        "layer_norm_eps": model.layernorm_epsilon,
        "logit_scale": model.logit_scale,
        "attention_bias": model.use_bias_in_attn_linear,
    }


def _cohere2_to_hf_keys(config: Config) -> dict[str, Any]:
    types, window = write_layer_types(config)
    return {**_cohere_to_hf_keys(config), "layer_types": types, "sliding_window": window or DEFAULT_WINDOW}


def _weight_mappings(config: Config) -> Iterator[WeightMapping]:
    return map_llama_weights(config, {"input_layernorm": "input_layernorm"}, rotates_adjacent_pairs=True)


COHERE = ModelFamily(
    model_type="cohere",
    architecture="CohereForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_cohere_from_hf_config,
    supported_values=_cohere_supported_values,
    to_hf_keys=_cohere_to_hf_keys,
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=_weight_mappings,
    ignored_pattern=r".*\brotary_emb\.inv_freq",
    find_other_conflict=find_llama_conflict,
    multipliers=("logits",),
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    from_hf_config=_cohere2_from_hf_config,
    supported_values=_cohere2_supported_values,
    to_hf_keys=_cohere2_to_hf_keys,
    find_other_conflict=_find_cohere2_conflict,
)

"""Phi-3, Phi-3.5 and Phi-4 in transformers' format.

A layer has one tensor for queries, keys and values, and one for gate and up projection. All layers may have a window, a
fraction of each head may be rotated, and models for long texts have longrope.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    LLAMA,
    LLAMA_NORMS,
    list_supported_values,
    map_llama_weights,
    read_llama_keys,
    write_llama_keys,
)
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.hf_layers import (
    LONGROPE_TYPES,
    build_rope_parameters,
    check_rope_scaling,
    compute_length_ratio,
    find_window_pattern,
    read_rope_options,
)
from megatron.conversion.model_family import check_equal_biases

DEFAULT_LENGTH = 4096
DEFAULTS = {
    "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": DEFAULT_LENGTH, "rms_norm_eps": 1e-5
}  # fmt: skip


def _from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    options = read_rope_options(
        config_reader,
        base_key="rope_theta",
        fraction_key="partial_rotary_factor",
        default_fraction=1.0,
        rope_types=LONGROPE_TYPES,
        original_length=config_reader.get_positive_int("original_max_position_embeddings", DEFAULT_LENGTH),
    )
    window = config_reader.get("sliding_window")
    windows = {} if window is None else {"attention_window": config_reader.get_positive_int("sliding_window")}
    return {
        **read_llama_keys(config_reader, DEFAULTS, rope_options=options),
        **windows,
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    }


def _supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    return {
        **list_supported_values(config),
        "head_dim": (None,),
        "attention_window": (config.position.attention_window,),
        "use_bias_in_attn_linear": (False,),
        "use_bias_in_mlp": (False,),
    }


def _find_conflict(config: Config) -> str | None:
    options = config.position.pos_emb_options
    if (conflict := find_window_pattern(config, "Phi-3")) is not None:
        return conflict
    if options.get("scaling") == "longrope":
        ratio = compute_length_ratio(config.model.seq_length, options["original_length"])
        factor, attention_factor = options.get("factor"), options.get("attention_factor")
        if (factor, attention_factor) != ((ratio, None) if ratio > 1 else (None, 1.0)):
            return (
                f"pos_emb_options.factor is {factor} and attention_factor {attention_factor}; Phi-3 derives them from "
                f"the ratio of seq_length and original_length, {ratio:g}"
            )
    return check_rope_scaling(options, LONGROPE_TYPES) or check_equal_biases(config)


def _to_hf_keys(config: Config) -> dict[str, Any]:
    options = config.position.pos_emb_options
    parameters = build_rope_parameters(options)
    is_scaled = parameters["rope_type"] == "longrope"
    keys = {name: value for name, value in write_llama_keys(config).items() if name != "rope_parameters"}
    return {
        **keys,
        # transformers 4 accepts these three keys only.
        "rope_scaling": {
            "type": "longrope", "short_factor": parameters["short_factor"], "long_factor": parameters["long_factor"]
        } if is_scaled else None,
        "partial_rotary_factor": options.get("fraction", 1.0),
        "original_max_position_embeddings": options.get("original_length", config.model.seq_length),
        "sliding_window": config.position.attention_window,
        "pad_token_id": None,  # transformers' default exceeds most vocabularies
    }  # fmt: skip


PHI3 = replace(
    LLAMA,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    from_hf_config=_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=_to_hf_keys,
    weight_mappings=lambda config: map_llama_weights(config, LLAMA_NORMS, is_fused=True),
    find_other_conflict=_find_conflict,
)

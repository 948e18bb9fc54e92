"""SmolLM3 in transformers' format: Llama in which some layers have no rotation and possibly a sliding window.

These layers are given by a list or an interval; windows are disabled in the published models.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.llama import (
    LLAMA,
    check_full_rotation,
    find_window_conflict,
    list_supported_values,
    read_layer_windows,
    read_llama_keys,
    write_layer_types,
    write_llama_keys,
)
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.model_family import check_equal_biases

DEFAULT_INTERVAL, DEFAULT_BASE = 4, 2_000_000.0


def _from_hf_config(hf_config: HFConfigReader) -> dict[str, Any]:
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


def _supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    position = config.position
    is_ours = set(position.encodings) <= {"rotary", "none"}
    return {
        **list_supported_values(config),
        "pos_emb": (position.pos_emb if is_ours else "rotary", "none"),
        "attention_window": (position.attention_window,),
    }


def _to_hf_keys(config: Config) -> dict[str, Any]:
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


def _find_conflict(config: Config) -> str | None:
    return check_full_rotation(config) or check_equal_biases(config) or find_window_conflict(config)


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    from_hf_config=_from_hf_config,
    supported_values=_supported_values,
    to_hf_keys=_to_hf_keys,
    find_other_conflict=_find_conflict,
)

"""Layers with and without a sliding window: `layer_types` in config.json, and a pattern of layers here.

Gemma 3 and OLMo 3 rotate by other angles in layers with a window, which have the encoding `rotary_local` here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.hf_rope import build_rope_parameters

WINDOWED, FULL = LAYER_TYPES = ("sliding_attention", "full_attention")
"""Attention types of layers in `layer_types`."""


def read_layer_windows(
    hf_config: HFConfigReader, default_types: Sequence[str], window: Any, num_layers: int
) -> dict[str, Any]:
    """Return `attention_window` for a mix of windowed and full-attention layers, or no key if no layer has a window.

    Args:
        hf_config: reader of config.json.
        default_types: layer types without layer_types.
        window: window size in tokens; None if windows are disabled.
        num_layers: number of layers.
    """
    types = read_layer_types(hf_config, default_types, num_layers)
    if window is None or WINDOWED not in types:
        return {}
    if type(window) is not int or window < 1:
        raise hf_config.value_error("sliding_window", "must be an integer, at least 1")
    return {"attention_window": [window if each == WINDOWED else None for each in types]}


def read_layer_types(hf_config: HFConfigReader, default_types: Sequence[str], num_layers: int) -> list[str]:
    """Return the type of each layer. Raises UserError for an unknown type or a wrong number of layers."""
    types = hf_config.get("layer_types") or list(default_types)
    if not isinstance(types, list) or len(types) != num_layers or set(types) - set(LAYER_TYPES):
        raise hf_config.value_error("layer_types", f"expected one of {', '.join(LAYER_TYPES)} for each layer")
    return types


def read_required_window(hf_config: HFConfigReader, types: Sequence[str], default: int) -> int | None:
    """Return the size of the window; null means none. Raises UserError for null if a layer of these types needs it."""
    if not hf_config.is_null("sliding_window"):
        return hf_config.get_positive_int("sliding_window", default)
    if WINDOWED in types:
        raise hf_config.value_error("sliding_window", f"layer_types has {WINDOWED}, which needs a window")
    return None


def combine_rotations(
    hf_config: HFConfigReader, types: Sequence[str], local: Mapping[str, Any], full: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `pos_emb` and `pos_emb_options` for layers of two types with their own rotary options.

    Args:
        hf_config: reader of config.json.
        types: types of the layers.
        local, full: rotary options of layers with and without a window.

    Raises:
        UserError: layers with a window have a scaling of their own.
    """
    if local == full or len(set(types)) == 1:
        return {"pos_emb": "rotary", "pos_emb_options": dict(full if FULL in types else local)}
    if "scaling" in local:
        raise hf_config.value_error(
            "rope_parameters",
            f"scaling {local['scaling']} in layers of type {WINDOWED} is not supported beside others without a window",
        )
    options = {**full, **({"local_base": local["base"]} if "base" in local else {})}
    return {"pos_emb": ["rotary_local" if each == WINDOWED else "rotary" for each in types], "pos_emb_options": options}


def write_layer_types(config: Config) -> tuple[list[str], int | None]:
    """Return `layer_types`, and the window of the layers that have one, as `read_layer_windows` reads them."""
    windows = [config.position.for_layer(layer).window for layer in range(config.model.num_layers)]
    types = [FULL if window is None else WINDOWED for window in windows]
    return types, next((window for window in windows if window is not None), None)


def write_layer_rope_parameters(config: Config) -> dict[str, dict[str, Any]]:
    """Return `rope_parameters` of both types of layers, as `combine_rotations` reads them."""
    options = config.position.pos_emb_options
    local = {"base": options.get("local_base", 10000.0)} if "rotary_local" in config.position.encodings else options
    return {WINDOWED: build_rope_parameters(local), FULL: build_rope_parameters(options)}


def find_window_conflict(config: Config) -> str | None:
    """Return the conflict of a family that supports only one window size, or None."""
    given = config.position.attention_window
    sizes = sorted({window for window in (given if isinstance(given, list) else [given]) if window is not None})
    return (
        f"attention_window is {', '.join(map(str, sizes))}; this family supports one size" if len(sizes) > 1 else None
    )


def find_rotation_conflict(config: Config) -> str | None:
    """Return the conflict of a family that rotates layers with a window by other angles, or None."""
    if "rotary_local" not in config.position.encodings:
        return None
    layers = [config.position.for_layer(layer) for layer in range(config.model.num_layers)]
    if any((own.encoding == "rotary_local") != (own.window is not None) for own in layers):
        return "layers must have pos_emb rotary_local with a window, or pos_emb rotary without one"
    return None

"""Conversion between config.json and a model's layers: rotary options, and layers with a sliding window.

Rotary options are `rope_parameters` in transformers 5, and `rope_theta` and `rope_scaling` in 4. Layers with and
without a window are `layer_types` in config.json, and a pattern of layers here. Gemma 3 and OLMo 3 rotate by other
angles in layers with a window, which have the encoding `rotary_local` here: they have one set of parameters for each of
the two types of layers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.hf_config import HFConfigReader

WINDOWED, FULL = LAYER_TYPES = ("sliding_attention", "full_attention")
"""Attention types of layers in `layer_types`."""

ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
"""Our `scaling`, by `rope_type` in transformers."""
LONGROPE_TYPES = {"default": "none", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""The same for Phi-3, whose early files call longrope by other names."""
ROPE_PARAMETERS = {
    "factor": "factor", "original_max_position_embeddings": "original_length", "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "attention_factor": "attention_factor", "short_factor": "short_factor", "long_factor": "long_factor",
}  # fmt: skip
"""Our option names, by parameter names in transformers."""
ROPE_DIFFERENCE = (
    "transformers computes rotary angles in float32 and rounds their sines in bfloat16, so logits match this "
    "project at the training length and drift at longer lengths"
)
PARAMETERS_BY_SCALING = {
    "none": (), "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "longrope": (
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"
    ),
}  # fmt: skip
_PARAMETER_TYPES = {"rope_type": str, "type": str, "truncate": bool, "short_factor": list, "long_factor": list}


def read_rope_options(
    config_reader: HFConfigReader,
    *,
    base_key: str,
    fraction_key: str | None,
    default_fraction: float,
    default_base: float = 10000.0,
    rope_types: Mapping[str, str] = ROPE_TYPES,
    original_length: int | None = None,
) -> dict[str, Any]:
    """Return `pos_emb_options` for rotary.

    Args:
        config_reader: reader of config.json.
        base_key: transformers 4 key for the base of the angles.
        fraction_key: key for the fraction of a head that is rotated; None if the family rotates all of it.
        default_fraction: default of that fraction.
        default_base: default base of the angles.
        rope_types: our scalings, by the names that the family supports.
        original_length: length before scaling, for families with a key for it outside the parameters.

    Raises:
        UserError: a scaling type or one of its parameters is not supported.
    """
    section_key = "rope_scaling" if config_reader.get("rope_scaling") else "rope_parameters"  # as in transformers
    config_reader.get("rope_parameters")
    parameters = _check_parameters(config_reader, section_key, config_reader.get(section_key, {}))
    parameters.setdefault("rope_theta", config_reader.get_positive_float(base_key, default_base))
    fraction = config_reader.get_positive_float(fraction_key, default_fraction) if fraction_key else default_fraction
    parameters.setdefault("partial_rotary_factor", fraction)
    if original_length is not None:
        parameters["original_max_position_embeddings"] = original_length
    return _convert_parameters(
        config_reader, section_key, parameters, rope_types, has_fraction=fraction_key is not None
    )


def read_layer_rope_options(
    config_reader: HFConfigReader, layer_types: tuple[str, str], bases: tuple[float, float], base_keys: tuple[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `pos_emb_options` of rotary for layers with and without a window.

    In transformers 4 only the layers without a window have a scaling.

    Args:
        config_reader: reader of config.json.
        layer_types: names of the two types in `rope_parameters`: with a window and without.
        bases: default bases of the angles.
        base_keys: transformers 4 keys for the bases.

    Raises:
        UserError: a scaling type or one of its parameters is not supported.
    """
    section_key = "rope_parameters"
    sections = config_reader.get(section_key, {})
    if not isinstance(sections, Mapping) or not set(sections) <= set(layer_types):
        raise config_reader.value_error(section_key, f"it must have parameters for {' and '.join(layer_types)}")
    scaling = config_reader.get("rope_scaling", {})
    options = []
    for layer_type, base, base_key in zip(layer_types, bases, base_keys, strict=True):
        parameters = _check_parameters(config_reader, section_key, sections.get(layer_type) or {})
        if layer_type == layer_types[1]:
            parameters |= _check_parameters(config_reader, "rope_scaling", scaling)
        parameters.setdefault("rope_theta", config_reader.get_positive_float(base_key, base))
        options.append(_convert_parameters(config_reader, section_key, parameters, ROPE_TYPES, has_fraction=False))
    return options[0], options[1]


def _check_parameters(config_reader: HFConfigReader, section_key: str, section: Any) -> dict[str, Any]:
    """Return the parameters of a section that are not null. Raises UserError for a value of a wrong type."""
    if not isinstance(section, Mapping):
        raise config_reader.value_error(section_key, "it must be a mapping")
    parameters: dict[str, Any] = {name: value for name, value in section.items() if value is not None}
    for name, value in parameters.items():
        expected_type = _PARAMETER_TYPES.get(name)
        is_valid = (
            isinstance(value, expected_type)
            if expected_type
            else isinstance(value, int | float) and not isinstance(value, bool)
        )
        if (
            not is_valid
            or (name == "rope_theta" and not value > 1)
            or (name == "partial_rotary_factor" and not value > 0)
        ):
            raise config_reader.value_error(section_key, f"{name} cannot be {value!r}")
    return parameters


def _convert_parameters(
    config_reader: HFConfigReader,
    section_key: str,
    parameters: dict[str, Any],
    rope_types: Mapping[str, str],
    *,
    has_fraction: bool,
) -> dict[str, Any]:
    """Convert checked parameters, with base, to our options. Raises UserError for a scaling that is not supported."""
    base, fraction = parameters.pop("rope_theta"), parameters.pop("partial_rotary_factor", 1.0)
    names = {str(parameters.pop(name)) for name in ("rope_type", "type") if name in parameters} or {"default"}
    if len(names) > 1 or not names <= rope_types.keys():
        raise config_reader.value_error(
            section_key,
            f"rotary scaling {' or '.join(sorted(names))} is not supported; choose from {', '.join(rope_types)}",
        )
    scaling = rope_types[names.pop()]
    if not has_fraction and fraction != 1:
        raise config_reader.value_error(section_key, "this family rotates whole heads")
    options: dict[str, Any] = {}
    if fraction != 1:
        options["fraction"] = float(fraction)
    if base != 10000:
        options["base"] = float(base)
    if scaling != "none":
        options["scaling"] = scaling
        if scaling == "yarn":
            _resolve_yarn(config_reader, section_key, parameters)
        if scaling in ("llama3", "yarn", "longrope"):
            length = config_reader.get_positive_int("max_position_embeddings", 2048)
            parameters.setdefault("original_max_position_embeddings", length)
        if scaling == "longrope":
            _resolve_longrope(config_reader, section_key, parameters)
    else:
        parameters.pop("original_max_position_embeddings", None)
    for name in PARAMETERS_BY_SCALING[scaling]:
        if name in parameters:
            options[ROPE_PARAMETERS[name]] = parameters.pop(name)
    if parameters:
        raise config_reader.value_error(section_key, f"unknown parameter {next(iter(parameters))}")
    return options


def _resolve_yarn(config_reader: HFConfigReader, section_key: str, parameters: dict[str, Any]) -> None:
    """Convert DeepSeek's parameters for the factor of cosines and sines.

    Check `truncate`, which is always true here.
    """
    if parameters.pop("truncate", True) is not True:
        raise config_reader.value_error(section_key, "truncate must be true")
    mscale, mscale_all_dim = parameters.pop("mscale", None), parameters.pop("mscale_all_dim", None)
    if mscale and mscale_all_dim and "attention_factor" not in parameters:
        scales = [0.1 * scale * math.log(parameters.get("factor", 1.0)) + 1.0 for scale in (mscale, mscale_all_dim)]
        parameters["attention_factor"] = scales[0] / scales[1]


def _resolve_longrope(config_reader: HFConfigReader, section_key: str, parameters: dict[str, Any]) -> None:
    """Set the factor, which determines that of cosines and sines, to the ratio of the lengths unless it is given."""
    for name in ("short_factor", "long_factor"):
        if name not in parameters:
            raise config_reader.value_error(section_key, f"{name} is missing")
        parameters[name] = [
            float(number) if isinstance(number, int | float) and not isinstance(number, bool) else number
            for number in parameters[name]
        ]
    factor = parameters.pop("factor", None)
    if factor is None:
        factor = compute_length_ratio(
            config_reader.get_positive_int("max_position_embeddings", 4096),
            parameters["original_max_position_embeddings"],
        )
    if "attention_factor" not in parameters:
        parameters |= {"factor": factor} if factor > 1 else {"attention_factor": 1.0}


def compute_length_ratio(length: int, original_length: int) -> float:
    """Return the factor that transformers uses for longrope unless one is given."""
    return length / original_length


def check_rope_scaling(options: Mapping[str, Any], rope_types: Mapping[str, str] = ROPE_TYPES) -> str | None:
    """Return why the classes in transformers do not support these rotary options, or None if they do."""
    scaling = options.get("scaling", "none")
    known = list(dict.fromkeys(rope_types.values()))
    if scaling not in known:
        return f"pos_emb_options.scaling is {scaling}; the family supports {' or '.join(known)}"
    return "pos_emb_options.xpos is true, which the family does not support" if options.get("xpos") else None


def build_rope_keys(options: Mapping[str, Any], *, supports_fraction: bool) -> dict[str, Any]:
    """Build the config.json keys for our rotary options, in the notation of both transformers 4 and 5.

    Args:
        options: `pos_emb_options` of rotary.
        supports_fraction: True if the family can rotate a fraction of each head.
    """
    parameters = build_rope_parameters(options)
    keys: dict[str, Any] = {"rope_scaling": None}
    if parameters["rope_type"] != "default":
        scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
        keys["rope_scaling"] = {**scaling, "type": parameters["rope_type"]}  # older versions use the key `type`
    fraction_keys = {"partial_rotary_factor": options.get("fraction", 1.0)} if supports_fraction else {}
    return {**keys, "rope_parameters": {**parameters, **fraction_keys}}


def build_rope_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Build transformers' parameters of a rotation, without the fraction of a head that is rotated."""
    scaling = options.get("scaling", "none")
    hf_names = {megatron_name: name for name, megatron_name in ROPE_PARAMETERS.items()}
    rope_types = {**LONGROPE_TYPES, **ROPE_TYPES}
    return {
        "rope_type": next(name for name, megatron_name in rope_types.items() if megatron_name == scaling),
        **({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}),
        **{hf_names[name]: value for name, value in options.items() if name in hf_names and value is not None},
        "rope_theta": options.get("base", 10000.0),
    }


def read_interval_windows(
    config_reader: HFConfigReader, num_layers: int, interval: int, default_window: int
) -> tuple[list[str], dict[str, Any]]:
    """Return the type of each layer, and `attention_window`, of a family whose layers have a window at intervals.

    Args:
        config_reader: reader of config.json.
        num_layers: number of layers.
        interval: without layer_types, every layer of this number has no window, and the others have one.
        default_window: window size in tokens without sliding_window.
    """
    default_types = [LAYER_TYPES[(layer + 1) % interval == 0] for layer in range(num_layers)]
    types = read_layer_types(config_reader, default_types, num_layers)
    return types, build_layer_windows(config_reader, types, read_required_window(config_reader, types, default_window))


def build_layer_windows(config_reader: HFConfigReader, types: Sequence[str], window: Any) -> dict[str, Any]:
    """Return `attention_window` of layers of these types, or no key if no layer has a window.

    Args:
        config_reader: reader of config.json.
        types: types of the layers.
        window: window size in tokens; None if windows are disabled.
    """
    if window is None or WINDOWED not in types:
        return {}
    if type(window) is not int or window < 1:
        raise config_reader.value_error("sliding_window", "it must be an integer of at least 1")
    return {"attention_window": [window if each == WINDOWED else None for each in types]}


def read_layer_types(config_reader: HFConfigReader, default_types: Sequence[str], num_layers: int) -> list[str]:
    """Return the type of each layer. Raises UserError for an unknown type or a wrong number of layers."""
    types = config_reader.get("layer_types") or list(default_types)
    if not isinstance(types, list) or len(types) != num_layers or set(types) - set(LAYER_TYPES):
        raise config_reader.value_error("layer_types", f"it must be one of {', '.join(LAYER_TYPES)} for each layer")
    return types


def read_required_window(config_reader: HFConfigReader, types: Sequence[str], default: int) -> int | None:
    """Return the size of the window; null means none. Raises UserError for null if a layer of these types needs it."""
    if not config_reader.is_null("sliding_window"):
        return config_reader.get_positive_int("sliding_window", default)
    if WINDOWED in types:
        raise config_reader.value_error("sliding_window", f"layer_types has {WINDOWED}, which needs a window")
    return None


def combine_rotations(
    config_reader: HFConfigReader, types: Sequence[str], local: Mapping[str, Any], full: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `pos_emb` and `pos_emb_options` for layers of two types with their own rotary options.

    Args:
        config_reader: reader of config.json.
        types: types of the layers.
        local, full: rotary options of layers with and without a window.

    Raises:
        UserError: layers with a window have a scaling of their own.
    """
    if local == full or len(set(types)) == 1:
        return {"pos_emb": "rotary", "pos_emb_options": dict(full if FULL in types else local)}
    if "scaling" in local:
        raise config_reader.value_error(
            "rope_parameters",
            f"scaling {local['scaling']} in layers of type {WINDOWED} is not supported beside others without a window",
        )
    options = {**full, **({"local_base": local["base"]} if "base" in local else {})}
    return {"pos_emb": ["rotary_local" if each == WINDOWED else "rotary" for each in types], "pos_emb_options": options}


def write_layer_types(config: Config) -> tuple[list[str], int | None]:
    """Return `layer_types`, and the window of the layers that have one, as `build_layer_windows` reads them."""
    windows = [config.position.get_layer_options(layer).window for layer in range(config.model.num_layers)]
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
    return find_pattern_conflict(config, "rotary_local") if "rotary_local" in config.position.encodings else None


def find_pattern_conflict(config: Config, windowed: str, full: str = "rotary") -> str | None:
    """Return the conflict of a family whose layers with and without a window have these encodings, or None."""
    layers = [config.position.get_layer_options(layer) for layer in range(config.model.num_layers)]
    if any((own.encoding, own.window is None) not in ((windowed, False), (full, True)) for own in layers):
        return f"layers must have pos_emb {windowed} with a window, or pos_emb {full} without one"
    return None


def find_window_pattern(config: Config, family: str) -> str | None:
    """Return the conflict of a family that has the same window in all layers, or None."""
    if isinstance(config.position.attention_window, list):
        return f"attention_window is a pattern of layers; {family} has the same window in all layers"
    return None


def list_supported_encodings(config: Config, *encodings: str) -> tuple[Any, ...]:
    """Return the values of `pos_emb` that a family supports whose layers may have any of these encodings."""
    pos_emb = config.position.pos_emb
    return (pos_emb, *encodings) if set(config.position.encodings) <= set(encodings) else encodings

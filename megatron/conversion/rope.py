"""Rotary positions in a config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""

import math
from collections.abc import Mapping
from typing import Any

from megatron.conversion.hf_config_reader import HFConfigReader

ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
"""Their `rope_type`, and our `scaling`."""
ROPE_PARAMETERS = {
    "factor": "factor", "original_max_position_embeddings": "original_length", "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}  # fmt: skip
"""Their parameters, and our options."""
ROPE_DIFFERENCE = (
    "transformers computes rotary angles in float32, and in bfloat16 rounds their sines: the logits are those of this "
    "project at the training length, and drift away beyond it"
)
PARAMETERS_BY_SCALING = {
    "none": (), "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}  # fmt: skip


def read_rope_options(
    hf_config: HFConfigReader, *, base_key: str, fraction_key: str | None, default_fraction: float
) -> dict[str, Any]:
    """`pos_emb_options` of rotary.

    Args:
        hf_config: of config.json.
        base_key: the key of transformers 4 that holds the base of the angles.
        fraction_key: the one that holds the share of a head that is turned; None if the family turns all of it.
        default_fraction: that share where nothing says it.

    Raises:
        UserError: a scaling that is not offered, or a parameter of it.
    """
    section_key = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"  # the order of transformers
    hf_config.get("rope_parameters")
    section = hf_config.get(section_key, {})
    if not isinstance(section, Mapping):
        raise hf_config.value_error(section_key, "it must be a mapping")
    parameters: dict[str, Any] = {name: value for name, value in section.items() if value is not None}
    for name, value in parameters.items():
        expected_type = {"rope_type": str, "type": str, "truncate": bool}.get(name)
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
            raise hf_config.value_error(section_key, f"its {name} cannot be {value!r}")
    base, fraction = (
        hf_config.get_positive_float(base_key, 10000.0),
        hf_config.get_positive_float(fraction_key, default_fraction) if fraction_key else default_fraction,
    )
    base, fraction = parameters.pop("rope_theta", base), parameters.pop("partial_rotary_factor", fraction)
    rope_types = {str(parameters.pop(name)) for name in ("rope_type", "type") if name in parameters} or {"default"}
    if len(rope_types) > 1 or not rope_types <= ROPE_TYPES.keys():
        raise hf_config.value_error(
            section_key, f"rotary scaling {' or '.join(sorted(rope_types))} is not offered; {', '.join(ROPE_TYPES)} are"
        )
    scaling = ROPE_TYPES[rope_types.pop()]
    if fraction_key is None and fraction != 1:
        raise hf_config.value_error(section_key, "this family turns whole heads")
    options: dict[str, Any] = {}
    if fraction != 1:
        options["fraction"] = float(fraction)
    if base != 10000:
        options["base"] = float(base)
    if scaling == "none":
        return options if not parameters else _raise_unknown_parameter(hf_config, section_key, parameters)
    options["scaling"] = scaling
    if scaling == "yarn":
        _resolve_yarn(hf_config, section_key, parameters)
    if scaling in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", hf_config.get_positive_int("max_position_embeddings"))
    for name in PARAMETERS_BY_SCALING[scaling]:
        if name in parameters:
            options[ROPE_PARAMETERS[name]] = parameters.pop(name)
    return options if not parameters else _raise_unknown_parameter(hf_config, section_key, parameters)


def _raise_unknown_parameter(
    hf_config: HFConfigReader, section_key: str, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    raise hf_config.value_error(section_key, f"its {next(iter(parameters))} means nothing here")


def _resolve_yarn(hf_config: HFConfigReader, section_key: str, parameters: dict[str, Any]) -> None:
    """DeepSeek's way to say the factor of cosines and sines, and the rounding, which is always done here."""
    if parameters.pop("truncate", True) is not True:
        raise hf_config.value_error(section_key, "its truncate must be true")
    mscale, mscale_all_dim = parameters.pop("mscale", None), parameters.pop("mscale_all_dim", None)
    if mscale and mscale_all_dim and "attention_factor" not in parameters:
        scales = [0.1 * scale * math.log(parameters.get("factor", 1.0)) + 1.0 for scale in (mscale, mscale_all_dim)]
        parameters["attention_factor"] = scales[0] / scales[1]


def build_rope_keys(options: Mapping[str, Any], *, supports_fraction: bool) -> dict[str, Any]:
    """The keys of config.json, in the words of transformers 4 and 5 both, of our options.

    Args:
        options: `pos_emb_options` of rotary.
        supports_fraction: whether the family can turn a part of each head.
    """
    scaling = options.get("scaling", "none")
    hf_names = {megatron_name: name for name, megatron_name in ROPE_PARAMETERS.items()}
    parameters: dict[str, Any] = {
        "rope_type": next(name for name, megatron_name in ROPE_TYPES.items() if megatron_name == scaling),
        **{hf_names[name]: value for name, value in options.items() if name in hf_names and value is not None},
    }
    keys: dict[str, Any] = {"rope_scaling": parameters if scaling != "none" else None}
    if scaling != "none":
        # Older versions call the kind `type`.
        keys["rope_scaling"] = {**parameters, "type": parameters["rope_type"]}
        if scaling == "llama3":
            defaults = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            keys["rope_scaling"] = {**defaults, **keys["rope_scaling"]}
            parameters = {**defaults, **parameters}
    fraction_keys = {"partial_rotary_factor": options.get("fraction", 1.0)} if supports_fraction else {}
    keys["rope_parameters"] = {**parameters, "rope_theta": options.get("base", 10000.0), **fraction_keys}
    return keys

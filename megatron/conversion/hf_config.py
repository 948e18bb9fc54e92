"""Reader for config.json files of other families, which tracks unread keys, and conversion of rotary options.

Rotary options are `rope_parameters` in transformers 5, and `rope_theta` and `rope_scaling` in 4.
"""

import math
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from megatron.utils.errors import UserError

_REQUIRED = object()

IGNORED_KEYS = frozenset(
    {
        "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "dtype",
        "eos_token_id", "id2label", "initializer_range", "is_decoder", "is_llama_config", "keys_to_ignore_at_inference",
        "label2id", "model_type", "n_ctx", "output_attentions", "output_hidden_states", "output_past", "pad_token_id",
        "prefix", "return_dict", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
        "summary_type", "summary_use_proj", "task_specific_params", "tokenizer_class", "torch_dtype",
        "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
    }
)  # fmt: skip
"""Keys that do not affect the model's computation."""

HF_TRAINING_KEYS = (
    "attention_dropout",
    "hidden_dropout",
    "dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "layerdrop",
)
"""Keys of a completed training; this project has its own."""

COMMON_RESTRICTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "auto_map": ((None, {}), "the model needs custom code, which is not run"),
    "quantization_config": ((None, {}), "quantized weights are not supported"),
    "add_cross_attention": ((None, False), "cross-attention is not supported"),
    "is_encoder_decoder": ((None, False), "encoders are not supported"),
    "pruned_heads": ((None, {}, []), "different numbers of heads per layer are not supported"),
}
"""Restrictions of all families: accepted values, and the reason why others are rejected."""


_DIGEST = re.compile(r"_[0-9a-f]{8}(?=\.)")
"""Pattern of the suffix in module names of an export."""


def find_code_suffix(class_name: str) -> str:
    """Return the suffix of a class's module name (`modeling_code.add_content_digest`), or an empty string."""
    match = _DIGEST.search(class_name)
    return match[0] if match else ""


def _strip_digests(classes: Any) -> Any:
    """Return an `auto_map` with plain module names."""
    if not isinstance(classes, dict):
        return classes
    return {
        auto_class: _DIGEST.sub("", name) if isinstance(name, str) else name for auto_class, name in classes.items()
    }


class HFConfigReader:
    """Reader of the keys of a config.json.

    Args:
        values: content of the file.
        source: path of the file, for messages.
        auto_map: the family's own `auto_map`.
    """

    def __init__(self, values: Mapping[str, Any], source: str, auto_map: Mapping[str, str] | None = None) -> None:
        self._values, self.source = values, source
        self._read_keys = {*IGNORED_KEYS, *HF_TRAINING_KEYS}
        for name, (allowed, reason) in COMMON_RESTRICTIONS.items():
            own_auto_map = (
                (values[name],)
                if name == "auto_map" and auto_map and _strip_digests(values.get(name)) == auto_map
                else ()
            )
            self.require_one_of(name, (*allowed, *own_auto_map), reason)

    def value_error(self, name: str, reason: str) -> UserError:
        """Return an error that names a key and its value."""
        return UserError(f"{self.source}: {name} is {self._values.get(name)!r}: {reason}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value of any type; null counts as missing."""
        self._read_keys.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def is_null(self, name: str) -> bool:
        """Return True if a key is present and null, for keys whose absence has another meaning."""
        return name in self._values and self._values[name] is None

    def get_positive_int(self, name: str, default: Any = _REQUIRED) -> int:
        """Return an integer above 0."""
        value = self.get(name, default)
        if value is _REQUIRED:
            raise UserError(f"{self.source}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.value_error(name, "must be an integer, at least 1")
        return value

    def get_positive_float(self, name: str, default: float) -> float:
        """Return a finite number above 0."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and isfinite(value)):
            raise self.value_error(name, "must be a positive number")
        return float(value)

    def get_bool(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.value_error(name, "must be true or false")
        return value

    def require_one_of(self, name: str, allowed: tuple[Any, ...], reason: str) -> None:
        """Reject a key whose value is not in `allowed`; a missing key is accepted."""
        self._read_keys.add(name)
        if name in self._values and self._values[name] not in allowed:
            raise self.value_error(name, reason)

    def unread_keys(self) -> list[str]:
        """Return keys with a value that were never read, and that are therefore unknown to this family."""
        return [
            name
            for name, value in self._values.items()
            if name not in self._read_keys and not name.startswith("_") and value not in (None, False, {}, [])
        ]


HF_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
"""Our names of activations, by their names in transformers."""


def read_activation(hf_config: HFConfigReader, name: str, default: str) -> str:
    """Return our name of the activation given by a key."""
    value = hf_config.get(name, default)
    if value not in HF_ACTIVATIONS:
        raise hf_config.value_error(name, f"unknown activation; choose from {', '.join(HF_ACTIVATIONS)}")
    return HF_ACTIVATIONS[value]


ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
"""Our `scaling`, by `rope_type` in transformers."""
ROPE_PARAMETERS = {
    "factor": "factor", "original_max_position_embeddings": "original_length", "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
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
}  # fmt: skip


def read_rope_options(
    hf_config: HFConfigReader,
    *,
    base_key: str,
    fraction_key: str | None,
    default_fraction: float,
    default_base: float = 10000.0,
) -> dict[str, Any]:
    """Return `pos_emb_options` for rotary.

    Args:
        hf_config: reader of config.json.
        base_key: transformers 4 key for the base of the angles.
        fraction_key: key for the fraction of a head that is rotated; None if the family rotates all of it.
        default_fraction: default of that fraction.
        default_base: default base of the angles.

    Raises:
        UserError: a scaling type or one of its parameters is not supported.
    """
    section_key = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"  # as in transformers
    hf_config.get("rope_parameters")
    section = hf_config.get(section_key, {})
    if not isinstance(section, Mapping):
        raise hf_config.value_error(section_key, "must be a mapping")
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
            raise hf_config.value_error(section_key, f"{name} cannot be {value!r}")
    base, fraction = (
        hf_config.get_positive_float(base_key, default_base),
        hf_config.get_positive_float(fraction_key, default_fraction) if fraction_key else default_fraction,
    )
    base, fraction = parameters.pop("rope_theta", base), parameters.pop("partial_rotary_factor", fraction)
    rope_types = {str(parameters.pop(name)) for name in ("rope_type", "type") if name in parameters} or {"default"}
    if len(rope_types) > 1 or not rope_types <= ROPE_TYPES.keys():
        raise hf_config.value_error(
            section_key,
            f"rotary scaling {' or '.join(sorted(rope_types))} is not supported; choose from {', '.join(ROPE_TYPES)}",
        )
    scaling = ROPE_TYPES[rope_types.pop()]
    if fraction_key is None and fraction != 1:
        raise hf_config.value_error(section_key, "this family rotates whole heads")
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


def check_rope_scaling(options: Mapping[str, Any]) -> str | None:
    """Return why the classes in transformers do not support these rotary options, or None if they do."""
    scaling = options.get("scaling", "none")
    known = ROPE_TYPES.values()
    if scaling not in known:
        return f"pos_emb_options.scaling is {scaling}; the family supports {' or '.join(known)}"
    return "pos_emb_options.xpos is true, which the family does not support" if options.get("xpos") else None


def _raise_unknown_parameter(
    hf_config: HFConfigReader, section_key: str, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    raise hf_config.value_error(section_key, f"unknown parameter {next(iter(parameters))}")


def _resolve_yarn(hf_config: HFConfigReader, section_key: str, parameters: dict[str, Any]) -> None:
    """Convert DeepSeek's parameters for the factor of cosines and sines.

    Check `truncate`, which is always true here.
    """
    if parameters.pop("truncate", True) is not True:
        raise hf_config.value_error(section_key, "truncate must be true")
    mscale, mscale_all_dim = parameters.pop("mscale", None), parameters.pop("mscale_all_dim", None)
    if mscale and mscale_all_dim and "attention_factor" not in parameters:
        scales = [0.1 * scale * math.log(parameters.get("factor", 1.0)) + 1.0 for scale in (mscale, mscale_all_dim)]
        parameters["attention_factor"] = scales[0] / scales[1]


def build_rope_keys(options: Mapping[str, Any], *, supports_fraction: bool) -> dict[str, Any]:
    """Build the config.json keys for our rotary options, in the notation of both transformers 4 and 5.

    Args:
        options: `pos_emb_options` of rotary.
        supports_fraction: True if the family can rotate a fraction of each head.
    """
    scaling = options.get("scaling", "none")
    hf_names = {megatron_name: name for name, megatron_name in ROPE_PARAMETERS.items()}
    parameters: dict[str, Any] = {
        "rope_type": next(name for name, megatron_name in ROPE_TYPES.items() if megatron_name == scaling),
        **{hf_names[name]: value for name, value in options.items() if name in hf_names and value is not None},
    }
    keys: dict[str, Any] = {"rope_scaling": parameters if scaling != "none" else None}
    if scaling != "none":
        # Older versions use the key `type`.
        keys["rope_scaling"] = {**parameters, "type": parameters["rope_type"]}
        if scaling == "llama3":
            defaults = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            keys["rope_scaling"] = {**defaults, **keys["rope_scaling"]}
            parameters = {**defaults, **parameters}
    fraction_keys = {"partial_rotary_factor": options.get("fraction", 1.0)} if supports_fraction else {}
    keys["rope_parameters"] = {**parameters, "rope_theta": options.get("base", 10000.0), **fraction_keys}
    return keys

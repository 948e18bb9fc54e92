"""A config.json of another family, read with nothing dropped unseen, and its rotary positions in both directions:
`rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""

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
"""Keys that say nothing of what the weights compute."""

HF_TRAINING_KEYS = (
    "attention_dropout",
    "hidden_dropout",
    "dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "layerdrop",
)
"""What belongs to a training that is over; ours has its own keys for it."""

COMMON_RESTRICTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "auto_map": ((None, {}), "the model is defined by code of its own, which is not run"),
    "quantization_config": ((None, {}), "quantized weights are not read"),
    "add_cross_attention": ((None, False), "there is no encoder to attend to"),
    "is_encoder_decoder": ((None, False), "encoders are not offered"),
    "pruned_heads": ((None, {}, []), "heads of different numbers per layer are not offered"),
}
"""Of every family: the values that ask for nothing, and why others are refused."""


_DIGEST = re.compile(r"_[0-9a-f]{8}(?=\.)")
"""What the names of our modules end in, in an export."""


def find_code_suffix(class_name: str) -> str:
    """Return what the name of a class's module ends in (`modeling_code.add_content_digest`); empty for nothing."""
    match = _DIGEST.search(class_name)
    return match[0] if match else ""


def _strip_digests(classes: Any) -> Any:
    """An `auto_map` with the plain names of modules."""
    if not isinstance(classes, dict):
        return classes
    return {
        auto_class: _DIGEST.sub("", name) if isinstance(name, str) else name for auto_class, name in classes.items()
    }


class HFConfigReader:
    """The keys of a config.json.

    Args:
        values: as read.
        source: the file, for messages.
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
        """The error that names a key and its value."""
        return UserError(f"{self.source}: {name} is {self._values.get(name)!r}: {reason}")

    def get(self, name: str, default: Any = None) -> Any:
        """A value of any kind; null is the default too."""
        self._read_keys.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def is_null(self, name: str) -> bool:
        """Is a key there, and null? For the few whose absence means something else."""
        return name in self._values and self._values[name] is None

    def get_positive_int(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number above 0."""
        value = self.get(name, default)
        if value is _REQUIRED:
            raise UserError(f"{self.source}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.value_error(name, "it must be a whole number, at least 1")
        return value

    def get_positive_float(self, name: str, default: float) -> float:
        """A finite number above 0."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and isfinite(value)):
            raise self.value_error(name, "it must be a positive number")
        return float(value)

    def get_bool(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.value_error(name, "it must be true or false")
        return value

    def require_one_of(self, name: str, allowed: tuple[Any, ...], reason: str) -> None:
        """Refuse a key whose value is none of these; an absent one is fine."""
        self._read_keys.add(name)
        if name in self._values and self._values[name] not in allowed:
            raise self.value_error(name, reason)

    def unread_keys(self) -> list[str]:
        """Keys that nobody asked for and that say something: a family of this name reads no such key."""
        return [
            name
            for name, value in self._values.items()
            if name not in self._read_keys and not name.startswith("_") and value not in (None, False, {}, [])
        ]


HF_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
"""Their names of activations, and ours."""


def read_activation(hf_config: HFConfigReader, name: str, default: str) -> str:
    """Our name of the activation that a key names."""
    value = hf_config.get(name, default)
    if value not in HF_ACTIVATIONS:
        raise hf_config.value_error(name, f"not offered; of their activations there are {', '.join(HF_ACTIVATIONS)}")
    return HF_ACTIVATIONS[value]


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
    hf_config: HFConfigReader,
    *,
    base_key: str,
    fraction_key: str | None,
    default_fraction: float,
    default_base: float = 10000.0,
) -> dict[str, Any]:
    """`pos_emb_options` of rotary.

    Args:
        hf_config: of config.json.
        base_key: the key of transformers 4 that holds the base of the angles.
        fraction_key: the one that holds the share of a head that is turned; None if the family turns all of it.
        default_fraction: that share where nothing says it.
        default_base: of the angles, where nothing says it.

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
        hf_config.get_positive_float(base_key, default_base),
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


def check_rope_scaling(options: Mapping[str, Any]) -> str | None:
    """Why the classes of transformers have no such rotary positions, `pos_emb_options`; None if they do."""
    scaling = options.get("scaling", "none")
    known = ROPE_TYPES.values()
    if scaling not in known:
        return f"pos_emb_options.scaling is {scaling}; the family has {' or '.join(known)}"
    return "pos_emb_options.xpos is true, which the family has not" if options.get("xpos") else None


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

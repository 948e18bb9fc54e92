"""Reader for config.json files of other families, which tracks unread keys."""

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
"""Keys of a completed training, which do not apply to a new one."""

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


def strip_repository_prefix(class_name: str) -> str:
    """Return a class name without the folder or repository that transformers puts before it (`me/model--`)."""
    return class_name.rpartition("--")[2]


def _names_own_classes(classes: Any, own: Mapping[str, str]) -> bool:
    """Return True if an `auto_map` names only classes of a family's own code.

    For a model that was loaded and saved, transformers adds the repository, and may omit classes that were not used.
    """
    if not isinstance(classes, dict) or not classes:
        return False
    names = {
        key: _DIGEST.sub("", strip_repository_prefix(name)) for key, name in classes.items() if isinstance(name, str)
    }
    return len(names) == len(classes) and names.items() <= own.items()


def _names_class(classes: Any, architecture: str | None) -> bool:
    """Return True if an `auto_map` names a model class of transformers: modeling_phi3.Phi3ForCausalLM."""
    name = classes.get("AutoModelForCausalLM") if isinstance(classes, dict) else None
    return architecture is not None and isinstance(name, str) and name.rpartition(".")[2] == architecture


class HFConfigReader:
    """Reader of the keys of a config.json.

    Args:
        values: content of the file.
        source: path of the file, for messages.
        auto_map: the family's own `auto_map`.
        architecture: the family's class in transformers. An `auto_map` that names this class is accepted: models that
            were published before transformers had the class include its code.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        auto_map: Mapping[str, str] | None = None,
        architecture: str | None = None,
    ) -> None:
        self._values, self.source = values, source
        self._read_keys = {*IGNORED_KEYS, *HF_TRAINING_KEYS}
        for name, (allowed, reason) in COMMON_RESTRICTIONS.items():
            is_own = name == "auto_map" and (
                _names_own_classes(values.get(name), auto_map)
                if auto_map
                else _names_class(values.get(name), architecture)
            )
            own_auto_map = (values[name],) if is_own else ()
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
            raise self.value_error(name, "it must be an integer of at least 1")
        return value

    def get_positive_float(self, name: str, default: float) -> float:
        """Return a finite number above 0."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and isfinite(value)):
            raise self.value_error(name, "it must be a positive number")
        return float(value)

    def get_bool(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.value_error(name, "it must be true or false")
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


def read_activation(config_reader: HFConfigReader, name: str, default: str) -> str:
    """Return our name of the activation given by a key."""
    value = config_reader.get(name, default)
    if value not in HF_ACTIVATIONS:
        raise config_reader.value_error(name, f"unknown activation; choose from {', '.join(HF_ACTIVATIONS)}")
    return HF_ACTIVATIONS[value]

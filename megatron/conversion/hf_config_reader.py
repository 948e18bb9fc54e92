"""A config.json of another family, read with nothing dropped unseen."""

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

TRAINING_KEYS = (
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
        self._read_keys = {*IGNORED_KEYS, *TRAINING_KEYS}
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

"""Registry of supported model families."""

from typing import Any

from megatron.config.schema import Config
from megatron.conversion.families.cohere import COHERE, COHERE2
from megatron.conversion.families.farfield import FARFIELD
from megatron.conversion.families.gemma import GEMMA, GEMMA2
from megatron.conversion.families.gpt2 import GPT2
from megatron.conversion.families.gpt_neox import GPT_NEOX
from megatron.conversion.families.llama import LLAMA, QWEN2
from megatron.conversion.families.olmo2 import OLMO2
from megatron.conversion.families.opt import OPT
from megatron.conversion.families.qwen3 import QWEN3
from megatron.conversion.families.smollm3 import SMOLLM3
from megatron.conversion.model_family import ModelFamily
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices

HF_FAMILIES: dict[str, ModelFamily] = {
    family.model_type: family
    for family in (GPT_NEOX, GPT2, LLAMA, QWEN2, QWEN3, OLMO2, GEMMA, GEMMA2, SMOLLM3, COHERE, COHERE2, OPT)
}
"""Published families, by `model_type`. `find_exact_family` returns the first match."""

IMPORTABLE_FAMILIES = {**HF_FAMILIES, FARFIELD.model_type: FARFIELD}
"""All families that can be imported."""


REFUSED_MODEL_TYPES = {
    "gemma3": "it has two types of windows and rotary bases, and image input",
    "gemma3_text": "it has two types of windows and rotary bases",
    "olmo3": "it scales the rotation only in full-attention layers",
    "qwen3_moe": "mixtures of experts are not supported",
    "gpt_oss": "mixtures of experts are not supported; its attention is supported (configs/position/gpt_oss.yml)",
}
"""Related families that cannot be imported, with the reason."""


def get_family(model_type: Any, source: str) -> ModelFamily:
    """Return the family of a model_type. Raises UserError with the supported families."""
    if isinstance(model_type, str) and model_type in REFUSED_MODEL_TYPES:
        raise UserError(f"{source}: model_type {model_type!r} cannot be imported: {REFUSED_MODEL_TYPES[model_type]}")
    if model_type not in IMPORTABLE_FAMILIES:
        raise UserError(
            f"{source}: unknown model_type {model_type!r}; {format_choices(str(model_type), IMPORTABLE_FAMILIES)}"
        )
    return IMPORTABLE_FAMILIES[model_type]


def find_exact_family(config: Config) -> tuple[ModelFamily | None, dict[str, str]]:
    """Return the family that represents a configuration exactly, and the reasons of those that do not."""
    reasons = {name: family.unsupported_reason(config) for name, family in HF_FAMILIES.items()}
    matching_family = next((HF_FAMILIES[name] for name, reason in reasons.items() if reason is None), None)
    return matching_family, {name: reason for name, reason in reasons.items() if reason is not None}

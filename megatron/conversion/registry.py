"""The families that there are."""

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
from megatron.utils.suggestions import format_choices

HF_FAMILIES: dict[str, ModelFamily] = {
    family.model_type: family
    for family in (GPT_NEOX, GPT2, LLAMA, QWEN2, QWEN3, OLMO2, GEMMA, GEMMA2, SMOLLM3, COHERE, COHERE2, OPT)
}
"""The published ones, by `model_type`. Of several that can express a configuration, `find_exact_family` takes the
first."""

IMPORTABLE_FAMILIES = {**HF_FAMILIES, FARFIELD.model_type: FARFIELD}
"""Those that can be read."""


REFUSED_MODEL_TYPES = {
    "gemma3": "its layers have windows and bases of rotation of two kinds, and it reads images",
    "gemma3_text": "its layers have windows and bases of rotation of two kinds",
    "olmo3": "it scales the rotation of those layers alone that attend to all earlier tokens",
    "qwen3_moe": "mixtures of experts are not offered",
    "gpt_oss": "mixtures of experts are not offered; its attention is (configs/position/gpt_oss.yml)",
}
"""Relatives of these families, and what of them our keys cannot say."""


def get_family(model_type: Any, source: str) -> ModelFamily:
    """The family of a config.json's model_type. UserError names it and those that there are."""
    if isinstance(model_type, str) and model_type in REFUSED_MODEL_TYPES:
        raise UserError(f"{source}: model_type {model_type!r} cannot be imported: {REFUSED_MODEL_TYPES[model_type]}")
    if model_type not in IMPORTABLE_FAMILIES:
        raise UserError(
            f"{source}: model_type {model_type!r} is not known; {format_choices(str(model_type), IMPORTABLE_FAMILIES)}"
        )
    return IMPORTABLE_FAMILIES[model_type]


def find_exact_family(config: Config) -> tuple[ModelFamily | None, dict[str, str]]:
    """The family that expresses a configuration of ours exactly, and of each that does not, why."""
    reasons = {name: family.unsupported_reason(config) for name, family in HF_FAMILIES.items()}
    matching_family = next((HF_FAMILIES[name] for name, reason in reasons.items() if reason is None), None)
    return matching_family, {name: reason for name, reason in reasons.items() if reason is not None}

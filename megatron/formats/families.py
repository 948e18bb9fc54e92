"""The families that there are."""

from typing import Any

from megatron.config.schema import Config
from megatron.errors import UserError
from megatron.formats.family import Family
from megatron.formats.farfield import FARFIELD
from megatron.formats.gpt2 import GPT2
from megatron.formats.gpt_neox import GPT_NEOX
from megatron.formats.llama import LLAMA, QWEN2
from megatron.formats.opt import OPT
from megatron.suggest import choose_from

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT_NEOX, GPT2, LLAMA, QWEN2, OPT)}
"""The published ones, by `model_type`. Of several that can express a configuration, `exact_family` takes the first."""

KNOWN = {**FAMILIES, FARFIELD.name: FARFIELD}
"""Those that can be read."""


def family_of(model_type: Any, source: str) -> Family:
    """The family of a config.json's model_type. UserError names it and those that there are."""
    if model_type not in KNOWN:
        raise UserError(f"{source}: model_type {model_type!r} is not known; {choose_from(str(model_type), KNOWN)}")
    return KNOWN[model_type]


def exact_family(config: Config) -> tuple[Family | None, dict[str, str]]:
    """The family that expresses a configuration of ours exactly, and of each that does not, why."""
    reasons = {name: family.why_not(config) for name, family in FAMILIES.items()}
    found = next((FAMILIES[name] for name, reason in reasons.items() if reason is None), None)
    return found, {name: reason for name, reason in reasons.items() if reason is not None}

"""The base of every configuration section.

A section is a frozen pydantic model whose field names are the keys of the YAML files. It lives in the
`options.py` of the part of the code that uses it; `megatron.config.schema` gathers all sections into one `Config`.
Every key has exactly one owner. Modules named `options.py` import pydantic and this file only, so that the command
line can check a configuration without importing torch.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MOST_STEPS = 10**9
"""The upper bound of every count of steps: what is counted fits 64 bits even when multiplied by the largest batch."""


class Section(BaseModel):
    """Typed, frozen, strict: an unknown key, a string where a number belongs, or a float where an integer belongs
    is an error, and so are infinity and NaN."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )


def key(default: Any, doc: str, *, architecture: bool = False, **constraints: Any) -> Any:
    """One configuration key.

    Args:
        default: its default, a function that makes one, or `...` for a key that must be given.
        doc: one sentence of documentation; `docs/configuration.md` shows it.
        architecture: does the key decide which function the trained weights compute? Then nothing may ignore a change
            of it: resuming refuses one (`Config.architecture`).
        constraints: pydantic's (`ge=1` …).
    """
    mark: dict[str, Any] = {"json_schema_extra": {"architecture": True}} if architecture else {}
    if callable(default):
        return Field(default_factory=default, description=doc, **mark, **constraints)
    return Field(default=default, description=doc, **mark, **constraints)

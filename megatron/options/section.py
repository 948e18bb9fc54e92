"""The base of every configuration section.

A section is a frozen pydantic model whose field names are the keys of the YAML files. Every key has exactly one owner;
`megatron.config.schema` gathers all sections into one `Config`.
"""

import ast
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MAX_STEPS = 10**9
"""The upper bound of every count of steps: what is counted fits 64 bits even when multiplied by the largest batch."""


class ConfigSection(BaseModel):
    """Typed, frozen, strict: an unknown key, a string where a number belongs, or a float where an integer belongs
    is an error, and so are infinity and NaN."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse empty texts, which mean nothing: as a path, one is the current folder."""
        field = cls.model_fields[info.field_name or ""]
        kinds = (field.annotation,) if get_origin(field.annotation) is list else get_args(field.annotation)
        is_list = any(get_origin(kind) is list for kind in kinds) and str not in kinds
        if value == "" and isinstance(value, str) and (not is_list or CommaSeparated in field.metadata):
            raise PydanticCustomError("empty_text", "empty", {"optional": field.default is None})
        if isinstance(value, list | tuple):
            for number, item in enumerate(value, start=1):
                if item == "" and isinstance(item, str):
                    raise PydanticCustomError("empty_item", "empty", {"number": number})
        return value

    def replace(self, **keys: Any) -> Self:
        """A copy with some keys changed, validated again. Raises pydantic.ValidationError as the section itself."""
        return type(self).model_validate(self.model_dump(exclude_unset=True) | keys)


ChangePolicy = Literal["architecture", "context", "initialization", "data", "numerics", "schedule", "machine", "output"]
"""What a key decides. Whatever treats some keys differently from others asks for their policy, never for their names.

    architecture     which function the trained weights compute; a run never changes it, finetuning only the encoding
    context          the same, but no weight's shape depends on it; only finetuning may change it
    initialization   the weights at step 0; a run that goes on from a checkpoint does not read it
    data             which tokens are read, in which order, and which of them are scored
    numerics         what one step does to the weights
    schedule         how many steps of how many sequences there are, and their learning rates
    machine          where and how fast it runs: results are the same but for rounding
    output           what is reported, saved and loaded, and where
"""


def read_docstring(thing: Any) -> str:
    """What a class or function says of itself, also where Python leaves docstrings out (`python -OO`): the headings of
    configuration files and the command line's help are made of them."""
    if thing.__doc__ is not None:
        return inspect.cleandoc(thing.__doc__)
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    except (OSError, TypeError):  # there is no source
        return ""
    assert isinstance(definition, ast.ClassDef | ast.FunctionDef)
    return ast.get_docstring(definition) or ""


def _split_list(value: Any) -> Any:
    """A list, given as one, as its only entry, or as the command line has it: 64,256."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return [int(part) if part.isdecimal() else part for part in parts]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


CommaSeparated = BeforeValidator(_split_list)
"""Marks a key whose value is a list that may be written with commas: `Annotated[list[int], CommaSeparated]`."""


def config_field(
    default: Any,
    doc: str,
    *,
    policy: ChangePolicy | None = None,
    flags: Sequence[str] = (),
    metavar: str | None = None,
    **constraints: Any,
) -> Any:
    """One configuration key.

    Args:
        default: its default, a function that makes one, or `...` for a key that must be given.
        doc: one sentence of documentation; `docs/configuration.md` shows it.
        policy: what it decides. None only for a key that opens a section of its own, whose keys have theirs.
        flags: how the command line calls it, if not by its name.
        metavar: how the command line shows its value.
        constraints: pydantic's (`ge=1` …).
    """
    facts = {"policy": policy, "flags": list(flags), "metavar": metavar}
    mark: dict[str, Any] = {"json_schema_extra": {name: fact for name, fact in facts.items() if fact}}
    if callable(default):
        return Field(default_factory=default, description=doc, **mark, **constraints)
    return Field(default=default, description=doc, **mark, **constraints)

"""Base of every configuration section.

A section is a frozen pydantic model whose field names are the keys of the YAML files. Every key belongs to exactly one
section; `megatron.config.schema` combines all sections into one `Config`.
"""

import ast
import inspect
import re
import textwrap
from functools import cache
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

MAX_STEPS = 10**9
"""Upper bound of every step count. Products with the largest batch size still fit into 64 bits."""


class ConfigSection(BaseModel):
    """Frozen, strictly typed section.

    Unknown keys, strings for numbers, floats for integers, infinity and NaN are errors.
    """

    model_config = ConfigDict(
        defer_build=True,  # a command validates few sections, and building a validator takes milliseconds
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        populate_by_name=True,  # and by an older name, which is the alias
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_empty_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject empty strings, which have no meaning: an empty path would be the current folder."""
        if value == "" and isinstance(value, str):
            field = cls.model_fields[info.field_name or ""]
            kinds = (field.annotation,) if get_origin(field.annotation) is list else get_args(field.annotation)
            is_list = any(get_origin(kind) is list for kind in kinds) and str not in kinds
            if not is_list or CommaSeparated in field.metadata:
                raise PydanticCustomError("empty_text", "empty", {"optional": field.default is None})
        if isinstance(value, list | tuple):
            for number, item in enumerate(value, start=1):
                if item == "" and isinstance(item, str):
                    raise PydanticCustomError("empty_item", "empty", {"number": number})
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _reject_equal_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject a value that equals a choice of another type, such as true for 1, which pydantic would accept."""
        choices = _list_choices(cls, info.field_name or "")
        if value in choices and not any(value == choice and type(value) is type(choice) for choice in choices):
            raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, choices))})
        return value

    def replace(self, **keys: Any) -> Self:
        """Return a validated copy with some keys changed. Raises pydantic.ValidationError as the section itself."""
        return type(self).model_validate(self.model_dump(exclude_unset=True) | keys)


@cache
def _list_choices(section: type[ConfigSection], key: str) -> tuple[Any, ...]:
    """Return the choices of a key whose type is Literal, else an empty tuple."""
    annotation = section.model_fields[key].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


@cache
def get_default(section: type[ConfigSection], key: str) -> Any:
    """Return the default of a key. Do not modify it.

    Cached, because pydantic inspects the signature of a default's factory each time.
    """
    return section.model_fields[key].get_default(call_default_factory=True)


def list_accepted_names(section: type[ConfigSection]) -> list[str]:
    """Return the names of a section's keys, then their older names."""
    aliases = [field.alias for field in section.model_fields.values() if field.alias is not None]
    return [*section.model_fields, *aliases]


ChangePolicy = Literal["architecture", "context", "initialization", "data", "numerics", "schedule", "machine", "output"]
"""Policy of a key: what it decides. Code that treats keys differently uses their policies, never their names.

    architecture     which function the trained weights compute; a run never changes it, finetuning only the encoding
    context          the same, but no weight's shape depends on it; only finetuning may change it
    initialization   the weights at step 0; a resumed run does not read it
    data             which tokens are read, in which order, and which of them are scored
    numerics         how one step updates the weights
    schedule         the number of steps, their batch sizes and learning rates
    machine          where and how fast a run computes; results agree up to rounding
    output           what is reported, saved and loaded, and where
"""


def read_docstring(documented: Any) -> str:
    """Return the docstring of a class or function, even if Python drops docstrings (`python -OO`).

    The headings of configuration files and the command line's help are generated from docstrings.
    """
    if documented.__doc__ is not None:
        return inspect.cleandoc(documented.__doc__)
    try:
        source = textwrap.dedent(inspect.getsource(documented))
    except (OSError, TypeError):  # the source is not available
        return ""
    # `ast.parse` drops docstrings, too, from Python 3.14 on.
    module: Any = compile(source, "<docstring>", "exec", ast.PyCF_ONLY_AST, optimize=0)
    (definition,) = module.body
    assert isinstance(definition, ast.ClassDef | ast.FunctionDef)
    return ast.get_docstring(definition) or ""


def _split_list(value: Any) -> Any:
    """Convert a single value, or comma-separated text of the command line (64,256), to a list."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return [int(part) if part.removeprefix("-").isdecimal() else part for part in parts]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


CommaSeparated = BeforeValidator(_split_list)
"""Marker of a key whose list may be written with commas: `Annotated[list[int], CommaSeparated]`."""


def require_pattern(pattern: str, rule: str) -> AfterValidator:
    """Return a marker of strings that match a whole pattern. `rule` ends the error: "it must be a single word"."""

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise PydanticCustomError("pattern", "{rule}", {"rule": rule})
        return value

    return AfterValidator(check)


def require_count(count: int, noun: str) -> AfterValidator:
    """Return a marker of lists (or None) with a fixed number of items; `noun` names them in the plural."""

    def check(values: list[Any] | None) -> list[Any] | None:
        if values is not None and len(values) != count:
            raise PydanticCustomError("count", "{rule}", {"rule": f"it must be a list of {count} {noun}"})
        return values

    return AfterValidator(check)


def config_field(
    default: Any,
    doc: str,
    *,
    policy: ChangePolicy | None = None,
    old_name: str | None = None,
    metavar: str | None = None,
    **constraints: Any,
) -> Any:
    """Define a configuration key.

    Args:
        default: default value, a function that creates it, or `...` for a required key.
        doc: one sentence of documentation; `docs/configuration.md` shows it.
        policy: what the key decides. None only for a key that opens a section, whose keys have their own policies.
        old_name: earlier name of the key, which is still accepted, also as an option. Files that identify results by
            their options contain it (`model_dump(by_alias=True)`).
        metavar: placeholder of the value in the command line's help.
        constraints: pydantic's constraints (`ge=1` …).
    """
    facts = {"policy": policy, "metavar": metavar}
    mark: dict[str, Any] = {"json_schema_extra": {name: fact for name, fact in facts.items() if fact}}
    if old_name is not None:
        mark["alias"] = old_name
    if callable(default):
        return Field(default_factory=default, description=doc, **mark, **constraints)
    return Field(default=default, description=doc, **mark, **constraints)

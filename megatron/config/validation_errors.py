"""Formatting of pydantic's validation errors.

Each is one line with the origin of the key, its name, its value and valid values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from megatron.config.schema import ConfigKey, KeyPath, list_config_keys
from megatron.config.yaml_files import format_value
from megatron.options.section import ConfigSection
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices

SectionT = TypeVar("SectionT", bound=ConfigSection)

EXPECTED_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
BOUND_MESSAGES = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "too_short": ("a list of at least", "min_length"),
    "too_long": ("a list of at most", "max_length"),
}


UNION_MEMBER = re.compile(r"(constrained-)?(int|float|str|bool)|(literal|list|dict)\[.*\]|function-.*")
"""Suffix that pydantic appends to an error's location if a value may have several types."""


def _list_valid_values(error: dict[str, Any], key: ConfigKey | None) -> str:
    error_type, context = error["type"], error.get("ctx", {})
    if error_type in EXPECTED_TYPES:
        text = f"it must be {EXPECTED_TYPES[error_type]}"
        value = error["input"]
        if isinstance(value, float) and value.is_integer() and EXPECTED_TYPES[error_type] == "a whole number":
            text += f", written {int(value)}"
        if error_type == "list_type" and key is not None and isinstance(value, str | int | float):
            text += f", written [{format_value(value)}]"
        return text
    if error_type in BOUND_MESSAGES:
        words, bound_name = BOUND_MESSAGES[error_type]
        return f"it must be {words} {context[bound_name]:.15g}"  # all digits: 4294967295, not 4.29497e+09
    if error_type == "literal_error":
        # pydantic formats them as 'a', 'b' or 'c'
        expected = str(context.get("expected")).replace(" or ", ", ").replace("'", "")
        choices = [format_value(choice) for choice in key.choices] if key else expected.split(", ")
        text = format_choices(format_value(error["input"]), choices) if len(choices) > 1 else f"it must be {choices[0]}"
        return f"{text} ({key.doc})" if key and len(choices) <= 2 else text
    return error["msg"][0].lower() + error["msg"][1:]


def describe_validation_error(
    error: ValidationError, locate: Callable[[KeyPath], str | None], keys: Mapping[KeyPath, ConfigKey] | None = None
) -> Iterator[str]:
    """Yield one line for each problem that pydantic found.

    Args:
        error: pydantic's error.
        locate: function that returns where a key was set, or where a missing one was expected.
        keys: keys with their choices and descriptions; those of a configuration if None.
    """
    keys = list_config_keys() if keys is None else keys
    alternatives: dict[tuple[str, ...], list[str]] = {}
    items = []
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"][1:]]  # without the section, which users never write
        if location and UNION_MEMBER.fullmatch(location[-1]):
            location.pop()
            text = _list_valid_values(dict(item), None).removeprefix("it must be ")
            alternatives.setdefault(tuple(location), []).append(text)
            if len(alternatives[tuple(location)]) > 1:
                continue
        items.append((item, location))
    for item, location in items:
        path = tuple(part for part in location if not part.isdigit())
        index = next((int(part) for part in location if part.isdigit()), None)
        name = ".".join(path)
        source = locate(path)
        prefix = f"{source}: " if source else ""
        if item["type"] == "missing":
            key = keys.get(path)
            yield f"{prefix}{name} is missing ({key.doc if key else 'required'}); set it in a file or as {name}=…"
            continue
        if item["type"] == "empty_item":
            yield f"{prefix}item {item['ctx']['number']} of {name} is empty; leave it out"
            continue
        if item["type"] == "empty_text":
            none = "null for none" if keys else "leave it out"
            yield f"{prefix}{name} is empty; give a value{f', or {none}' if item['ctx']['optional'] else ''}"
            continue
        item_of = f"item {index + 1} of " if index is not None else ""
        if tuple(location) in alternatives:
            choices = " or ".join(dict.fromkeys(alternatives[tuple(location)]))
            yield f"{prefix}{item_of}{name} is {format_value(item['input'])}; it must be {choices}"
            continue
        yield (
            f"{prefix}{item_of}{name} is {format_value(item['input'])}; "
            f"{_list_valid_values(dict(item), keys.get(path))}"
        )


def describe_option_error(error: ValidationError, name: str) -> str:
    """Describe an option value that the command-line library rejected, in our wording."""
    item = error.errors(include_url=False)[0]
    return f"{name} is {format_value(item['input'])}; {_list_valid_values(dict(item), None)}"


def parse_section(section: type[SectionT], values: Mapping[str, Any], source: str | None = "command line") -> SectionT:
    """Build a section from the names and values of its keys.

    Args:
        section: class of the section.
        values: values by key name.
        source: where they were given, for messages.

    Raises:
        UserError: one line per problem.
    """
    prefix = f"{source}: " if source else ""
    if unknown := [name for name in values if name not in section.model_fields]:
        raise UserError(f"{prefix}there is no option {unknown[0]}; {format_choices(unknown[0], section.model_fields)}")
    wrapper = create_model("CommandLine", __base__=ConfigSection, options=(section, ...))
    try:
        return wrapper.model_validate({"options": dict(values)}).options  # type: ignore[attr-defined]
    except ValidationError as error:
        raise UserError("\n".join(describe_validation_error(error, lambda _: source, keys={}))) from error

"""Sentences on values that pydantic rejects, in one form for configuration keys and for fields of files."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

EXPECTED_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "a string without lone surrogates",
    "int_parsing": "an integer",
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
}


def describe_requirement(error: Mapping[str, Any]) -> str:
    """Describe what a value must be: `it must be an integer`, `it must be at least 1`.

    Args:
        error: one of the errors of a pydantic.ValidationError.
    """
    error_type, context = error["type"], error.get("ctx", {})
    if error_type in EXPECTED_TYPES:
        return f"it must be {EXPECTED_TYPES[error_type]}"
    if error_type in BOUND_MESSAGES:
        words, bound_name = BOUND_MESSAGES[error_type]
        bound = context[bound_name]  # with all digits: 4294967295, not 4.29497e+09
        return f"it must be {words} {bound if isinstance(bound, int) else f'{bound:.15g}'}"
    if error_type in ("too_short", "too_long"):
        is_short, is_mapping = error_type == "too_short", isinstance(error["input"], Mapping)
        count = context["min_length" if is_short else "max_length"]
        kind, noun = ("a mapping with", "key") if is_mapping else ("a list of", "value")
        return f"it must be {kind} {'at least' if is_short else 'at most'} {count} {noun}{'' if count == 1 else 's'}"
    text = error["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    text = text.replace("String should", "it must")
    return text[:1].lower() + text[1:]


def name_location(location: Sequence[str | int]) -> str:
    """Format the location of a value: optimizer.params.lr, item 2 of betas, rows.kerple of item 1 of published."""
    name, keys = "", []
    for part in (*location, None):
        if isinstance(part, str):
            keys.append(part)
            continue
        if keys:
            name = ".".join(keys) + (f" of {name}" if name else "")
        keys = []
        if part is not None:
            name = f"item {part + 1} of {name}"
    return name


def describe_field_error(error: ValidationError, file_names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Describe the first problem with the fields of a file in one line: `step is 'many'; it must be an integer`.

    Args:
        error: pydantic's error.
        file_names: names of fields in the file, if they differ.
    """
    first = error.errors(include_url=False)[0]
    name = name_location([file_names.get(str(part), part) for part in first["loc"]])
    if first["type"] == "missing":
        return f"{name} is missing"
    if first["type"] == "extra_forbidden":
        return f"unknown field {name}"
    problem = describe_requirement(first)
    if not name or first["type"] == "value_error":
        return f"{name}: {problem}" if name else problem
    shown = "null" if first["input"] is None else repr(first["input"])
    return f"{name} is {shown if len(shown) <= 60 else shown[:60] + ' …'}; {problem}"

"""pydantic's validation errors as one line each: place, key, value, and what is valid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megatron.config.schema import ConfigKey, Path_, list_config_keys
from megatron.config.settings import format_value
from megatron.utils.suggestions import format_choices

KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "too_short": ("a list of at least", "min_length"),
    "too_long": ("a list of at most", "max_length"),
}


def _list_valid_values(error: dict[str, Any], key: ConfigKey | None) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in KINDS:
        text = f"it must be {KINDS[kind]}"
        value = error["input"]
        if isinstance(value, float) and value.is_integer() and KINDS[kind] == "a whole number":
            text += f", written {int(value)}"
        return text
    if kind in BOUNDS:
        words, name = BOUNDS[kind]
        return f"it must be {words} {context[name]:.15g}"  # whole: 4294967295, not 4.29497e+09
    if kind == "literal_error":
        # pydantic's words are 'a', 'b' or 'c'.
        words = str(context.get("expected")).replace(" or ", ", ").replace("'", "")
        choices = [format_value(choice) for choice in key.choices] if key else words.split(", ")
        text = format_choices(format_value(error["input"]), choices) if len(choices) > 1 else f"it must be {choices[0]}"
        return f"{text} ({key.doc})" if key and len(choices) <= 2 else text
    return error["msg"][0].lower() + error["msg"][1:]


def describe_validation_error(
    error: ValidationError, where: Callable[[Path_], str | None], known: Mapping[Path_, ConfigKey] | None = None
) -> Iterator[str]:
    """One line for each problem that pydantic found.

    Args:
        error: what was found.
        where: tells who set a key, or, of one that is missing, where it was looked for.
        known: the keys, for their choices and meanings; those of a configuration if None.
    """
    known = list_config_keys() if known is None else known
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"][1:]]  # without the section, which users never write
        path = tuple(part for part in location if not part.isdigit())
        index = next((int(part) for part in location if part.isdigit()), None)
        name = ".".join(path)
        place = where(path)
        prefix = f"{place}: " if place else ""
        if item["type"] == "missing":
            key = known.get(path)
            yield f"{prefix}{name} is missing ({key.doc if key else 'required'}); give it in a file or as {name}=…"
            continue
        item_of = f"item {index + 1} of " if index is not None else ""
        yield (
            f"{prefix}{item_of}{name} is {format_value(item['input'])}; "
            f"{_list_valid_values(dict(item), known.get(path))}"
        )

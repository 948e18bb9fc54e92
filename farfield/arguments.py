"""Validation of the package's function arguments. Each mistake is a one-line `UserError`."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.position.catalog import MethodFileError
from megatron.utils.errors import UserError, forbid_exits, shorten_text


@contextmanager
def method_errors() -> Iterator[None]:
    """Convert errors in the user's own methods to `UserError`, including calls of sys.exit()."""
    try:
        with forbid_exits():
            yield
    except MethodFileError as error:
        raise UserError(str(error)) from error


def describe_value(value: Any) -> str:
    """Return a shortened representation of a value for an error message."""
    return shorten_text(repr(value), 80)


def to_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return an integer within bounds, also from a NumPy integer.

    Raises UserError with the name and the value of the argument.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < minimum or (maximum is not None and number > maximum):
        bounds = f"of at least {minimum:,}" if maximum is None else f"from {minimum:,} to {maximum:,}"
        raise UserError(f"{name} is {describe_value(value)}; it must be an integer {bounds}")
    return number


def to_string(name: str, value: Any) -> str:
    """Return a string if it can be encoded. Raises UserError with the name and the value of the argument."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {describe_value(value)}; it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} is {describe_value(value)}; it contains an unpaired surrogate") from None
    return value


def to_paths(name: str, value: Any) -> list[str]:
    """Return one path or several as a list of strings. Raises UserError with the name and the invalid value."""
    paths = [value] if isinstance(value, str | Path) else value
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | Path) for path in paths):
        raise UserError(f"{name} is {describe_value(value)}; it must be a path, or a list of paths")
    return [to_path(name, path) for path in paths]


def to_path(name: str, value: Any) -> str:
    """Return a path as a string. Raises UserError with the name and the invalid value."""
    if not isinstance(value, str | Path):
        raise UserError(f"{name} is {describe_value(value)}; it must be a path")
    if not str(value):
        raise UserError(f"{name} is empty; it must be a path")
    check_characters(name, str(value))
    return str(value)


def check_characters(name: str, text: str) -> None:
    """Raise UserError if a string contains characters that are not allowed in paths and commands."""
    with suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(text):
            return
    raise UserError(f"{name} is {describe_value(text)}; it must not contain NUL or an unpaired surrogate")


def to_optional_path(name: str, value: Any) -> str | None:
    """Return a path as a string, or None. Raises UserError as `to_path` does."""
    return None if value is None else to_path(name, value)

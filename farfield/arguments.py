"""What functions of this package are given, checked where it comes in: a mistake is one line of a `UserError`."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.position.catalog import MethodFileError
from megatron.utils.errors import UserError, refuse_exits, shorten_text


@contextmanager
def method_errors() -> Iterator[None]:
    """Errors of the user's own methods as errors of the user, also if a method calls sys.exit()."""
    try:
        with refuse_exits():
            yield
    except MethodFileError as error:
        raise UserError(str(error)) from error


def describe_value(value: Any) -> str:
    """A value in an error: its representation, shortened."""
    return shorten_text(repr(value), 80)


def to_integer(name: str, value: Any, least: int, largest: int | None = None) -> int:
    """A whole number within bounds, NumPy's included. Raises UserError, naming the argument and the value."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (largest is not None and number > largest):
        bounds = f"at least {least:,}" if largest is None else f"from {least:,} to {largest:,}"
        raise UserError(f"{name} is {describe_value(value)}; it must be a whole number, {bounds}")
    return number


def to_text(name: str, value: Any) -> str:
    """A text. Raises UserError, naming the argument and the value."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {describe_value(value)}; it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} is {describe_value(value)}; half a surrogate pair is no character") from None
    return value


def to_paths(name: str, value: Any) -> list[str]:
    """One path or several as texts. Raises UserError, naming the argument and what is no path."""
    paths = [value] if isinstance(value, str | Path) else value
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | Path) for path in paths):
        raise UserError(f"{name} is {describe_value(value)}; it must be a path, or a list of paths")
    return [to_path(name, path) for path in paths]


def to_path(name: str, value: Any) -> str:
    """A path as a text. Raises UserError, naming the argument and what is no path."""
    if not isinstance(value, str | Path):
        raise UserError(f"{name} is {describe_value(value)}; it must be a path")
    if not str(value):
        raise UserError(f"{name} is empty; it must be a path")
    check_characters(name, str(value))
    return str(value)


def check_characters(name: str, text: str) -> None:
    """Raise UserError if a text holds characters that neither a path nor a command can have."""
    with suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(text):
            return
    raise UserError(f"{name} is {describe_value(text)}; it must not hold NUL or half a surrogate pair")


def to_optional_path(name: str, value: Any) -> str | None:
    """A path as a text, or None. Raises UserError as `to_path`."""
    return None if value is None else to_path(name, value)

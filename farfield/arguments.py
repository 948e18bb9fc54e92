"""What functions of this package are given, checked where it comes in: a mistake is one line of a `UserError`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.position.catalog import MethodFileError
from megatron.utils.errors import UserError, refuse_exits


@contextmanager
def method_errors() -> Iterator[None]:
    """Errors of the user's own methods as errors of the user, also if a method calls sys.exit()."""
    try:
        with refuse_exits():
            yield
    except MethodFileError as error:
        raise UserError(str(error)) from error


def to_integer(name: str, value: Any, least: int, largest: int | None = None) -> int:
    """A whole number within bounds, NumPy's included. Raises UserError, naming the argument and the value."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (largest is not None and number > largest):
        bounds = f"at least {least:,}" if largest is None else f"from {least:,} to {largest:,}"
        raise UserError(f"{name} is {value!r}; it must be a whole number, {bounds}")
    return number


def to_text(name: str, value: Any) -> str:
    """A text. Raises UserError, naming the argument and the value."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r}; it must be a text")
    return value


def to_paths(name: str, value: Any) -> list[str]:
    """One path or several as texts. Raises UserError, naming the argument and what is no path."""
    paths = [value] if isinstance(value, str | Path) else value
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | Path) for path in paths):
        raise UserError(f"{name} is {value!r}; it must be a path, or a list of paths")
    return list(map(str, paths))

"""Validation of the package's function arguments. Each mistake is a one-line `UserError`."""

from __future__ import annotations

import inspect
import operator
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from megatron.position.catalog import MethodFileError
from megatron.utils.errors import FarfieldError, UserError, forbid_exits, shorten_text, to_path_error
from megatron.utils.formatting import format_choices

Function = TypeVar("Function", bound=Callable[..., Any])


def report_argument_errors(function: Function) -> Function:
    """Make a public function raise each mistake as a `UserError` that names the function's argument.

    This covers missing and unknown arguments, messages that name an option or the command line, paths that cannot be
    used, and errors in the user's own methods, including calls of sys.exit().
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            signature.bind(*arguments, **named)
        except TypeError as error:
            raise UserError(_describe_call(function.__name__, signature, named, error)) from None
        try:
            with forbid_exits():
                return function(*arguments, **named)
        except MethodFileError as error:
            raise UserError(str(error)) from error
        except OSError as error:
            if (unusable := to_path_error(error)) is not None:
                raise unusable from error
            raise
        except FarfieldError as error:
            text = "\n".join(_name_arguments(line, repr((arguments, named))) for line in str(error).splitlines())
            if text == str(error):
                raise
            renamed = type(error)(text)
            renamed.__dict__.update(error.__dict__)
            raise renamed from error

    return call  # type: ignore[return-value]


def _describe_call(name: str, signature: inspect.Signature, named: dict[str, Any], error: TypeError) -> str:
    """Describe arguments that do not fit a signature."""
    known = [each for each in signature.parameters if each != "self"]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    unknown = [] if takes_any else [each for each in named if each not in known]
    if unknown:
        return f"{name}: there is no argument {unknown[0]}; {format_choices(unknown[0], known)}"
    return f"{name}: {error}"


def _name_arguments(line: str, given: str) -> str:
    """Replace options of the command line by arguments in a line of a message.

    Commands to run, and values that only look like an option (a file named `--help`), stay.

    given: representation of the call's arguments.
    """
    if "deepy.py" in line:
        return line

    def name(found: re.Match[str]) -> str:
        return found[0] if found[0] in given else found[1].replace("-", "_")

    return re.sub(r"(?<![\w-])--([a-z][a-z-]*)", name, line.removeprefix("command line: "))


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
    if isinstance(value, str | Path):
        return [to_path(name, value)]
    if not isinstance(value, Sequence):
        raise UserError(f"{name} is {describe_value(value)}; it must be a path, or a list of paths")
    return [to_path(f"item {number} of {name}", path) for number, path in enumerate(value, start=1)]


def to_run_paths(value: Any) -> list[str]:
    """Return the paths of at least one run. Raises UserError as `to_paths` does."""
    if not (paths := to_paths("runs", value)):
        raise UserError("runs is empty; give at least one run folder")
    return paths


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

"""Finds encodings and processors: the files of `encodings/` and `processors/`. Adding a file adds a method.

Other projects' names for the same methods are the business of `megatron.config`, not of this registry.
"""

import difflib
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

from megatron.position.base import AttentionDims, OptionError, PositionModule
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor

MAX_OPTION = {int: 10**6, float: 1e9}
"""Of the options' sizes, and of their bases and start values: infinity and NaN fail, and what no memory holds."""

ModuleT = TypeVar("ModuleT", bound=PositionModule)


def _list_names(folder: str) -> list[str]:
    return sorted(path.stem for path in (Path(__file__).parent / folder).glob("*.py") if path.stem != "__init__")


def list_encodings() -> list[str]:
    """Names of all position encodings, in alphabetical order."""
    return _list_names("encodings")


def list_processors() -> list[str]:
    """Names of all score processors, in alphabetical order; `none` is no processor and not listed."""
    return _list_names("processors")


@cache
def _load_class(folder: str, name: str, base: type[ModuleT]) -> type[ModuleT]:
    names = _list_names(folder)
    if name not in names:
        matches = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {matches[0]}? " if matches else ""
        raise ValueError(f"unknown {base.__name__.lower()} {name!r}; {hint}choose from {', '.join(names)}")
    module = importlib.import_module(f"{__package__}.{folder}.{name}")
    classes = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, base) and thing.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise ValueError(f"{module.__name__} must define one {base.__name__}, it defines {len(classes)}")
    return classes[0]


def load_encoding_class(name: str) -> type[Encoding]:
    """The class of a named encoding. Raises ValueError with the nearest name for an unknown one."""
    return _load_class("encodings", name, Encoding)


def load_processor_class(name: str) -> type[Processor]:
    """The class of a named processor. Raises ValueError with the nearest name for an unknown one."""
    return _load_class("processors", name, Processor)


def _check_options(method: type[PositionModule], name: str, options: Mapping[str, Any]) -> None:
    parameters = method.options()
    for option, value in options.items():
        if option not in parameters:
            choices = ", ".join(parameters) if parameters else "it has none"
            matches = difflib.get_close_matches(option, parameters, 1)
            hint = f"did you mean {matches[0]}? " if matches else ""
            raise ValueError(f"unknown option {option!r} of {name}; {hint}options: {choices}")
        types = get_args(parameters[option].annotation) or (parameters[option].annotation,)
        if value is None and NoneType in types:
            continue
        expected = next(kind for kind in types if kind is not NoneType)
        valid = isinstance(value, expected) or (expected is float and isinstance(value, int))
        if not valid or (isinstance(value, bool) and expected is not bool):
            raise OptionError(option, f"is {value!r}; it must be of type {expected.__name__}")
        if expected in MAX_OPTION and not abs(value) <= MAX_OPTION[expected]:
            raise OptionError(option, f"is {value}; it must be at most {MAX_OPTION[expected]:,}")


def build_encoding(name: str, dims: AttentionDims, options: Mapping[str, Any] | None = None) -> Encoding:
    """Build a position encoding.

    Raises:
        ValueError: an unknown name or option.
        OptionError: a value of an option that it cannot take.
    """
    return _build(load_encoding_class(name), name, dims, options or {})


def build_processor(
    name: str, dims: AttentionDims, options: Mapping[str, Any] | None = None, *, has_bias: bool
) -> Processor:
    """Build a score processor for an encoding with or without a bias. Raises as `build_encoding` does."""
    return _build(load_processor_class(name), name, dims, options or {}, has_bias=has_bias)


def _build(method: type[ModuleT], name: str, dims: AttentionDims, options: Mapping[str, Any], **facts: bool) -> ModuleT:
    try:
        _check_options(method, name, options)
        return method(dims, **facts, **options)
    except OptionError as error:
        error.method = name
        raise


def describe_methods() -> list[dict[str, Any]]:
    """One record per method: kind, name, formula, parameters, options with defaults, traits, source, advice."""
    records = []
    kinds: list[tuple[str, dict[str, type[PositionModule]]]] = [
        ("encoding", {name: load_encoding_class(name) for name in list_encodings()}),
        ("processor", {name: load_processor_class(name) for name in list_processors()}),
    ]
    for kind, methods in kinds:
        for name, method in methods.items():
            records.append(
                {
                    "kind": kind,
                    "name": name,
                    "formula": method.formula,
                    "parameters": method.parameters_summary,
                    "options": {option: p.default for option, p in method.options().items()},
                    "traits": list(method.traits()),
                    "source": method.source,
                    "advice": method.advice,
                }
            )
    return records

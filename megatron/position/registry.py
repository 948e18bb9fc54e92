"""Finds encodings and processors: the files of `encodings/` and `processors/`. Adding a file adds a method.

Other projects' names for the same methods are the business of `megatron.config`, not of this registry.
"""

import difflib
import importlib
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

from .encoding import Encoding
from .method import Method
from .processor import Processor
from .shape import Shape

LARGEST = {int: 10**6, float: 1e9}
"""Of the options' sizes, and of their bases and start values: infinity and NaN fail, and what no memory holds."""

Found = TypeVar("Found", bound=Method)


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (Path(__file__).parent / folder).glob("*.py") if path.stem != "__init__")


def encodings() -> list[str]:
    """Names of all position encodings, in alphabetical order."""
    return _names("encodings")


def processors() -> list[str]:
    """Names of all score processors, in alphabetical order; `none` is no processor and not listed."""
    return _names("processors")


@cache
def _find(folder: str, name: str, base: type[Found]) -> type[Found]:
    names = _names(folder)
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown {base.__name__.lower()} {name!r}; {hint}choose from {', '.join(names)}")
    module = importlib.import_module(f"{__package__}.{folder}.{name}")
    found = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, base) and thing.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ValueError(f"{module.__name__} must define one {base.__name__}, it defines {len(found)}")
    return found[0]


def encoding_class(name: str) -> type[Encoding]:
    """The class of a named encoding. Raises ValueError with the nearest name for an unknown one."""
    return _find("encodings", name, Encoding)


def processor_class(name: str) -> type[Processor]:
    """The class of a named processor. Raises ValueError with the nearest name for an unknown one."""
    return _find("processors", name, Processor)


def _check_options(method: type[Method], name: str, options: dict[str, Any]) -> None:
    known = method.options()
    for option, value in options.items():
        if option not in known:
            choices = ", ".join(known) if known else "it has none"
            near = difflib.get_close_matches(option, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"unknown option {option!r} of {name}; {hint}options: {choices}")
        kinds = get_args(known[option].annotation) or (known[option].annotation,)
        if value is None and NoneType in kinds:
            continue
        wanted = next(kind for kind in kinds if kind is not NoneType)
        right = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        if not right or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"option {option} of {name} is {value!r}; it must be of type {wanted.__name__}")
        if wanted in LARGEST and not abs(value) <= LARGEST[wanted]:
            raise ValueError(f"option {option} of {name} is {value}; it must be at most {LARGEST[wanted]:,}")


def build_encoding(name: str, shape: Shape, options: dict[str, Any] | None = None) -> Encoding:
    """Build a position encoding. Raises ValueError for an unknown name or option, or a value it refuses."""
    method = encoding_class(name)
    _check_options(method, name, options or {})
    return method(shape, **(options or {}))


def build_processor(name: str, shape: Shape, options: dict[str, Any] | None = None, *, has_bias: bool) -> Processor:
    """Build a score processor for an encoding with or without a bias. Raises ValueError as `build_encoding` does."""
    method = processor_class(name)
    _check_options(method, name, options or {})
    return method(shape, has_bias=has_bias, **(options or {}))


def describe() -> list[dict[str, Any]]:
    """One record per method: kind, name, formula, parameters, options with defaults, traits, source, advice."""
    records = []
    kinds: list[tuple[str, dict[str, type[Method]]]] = [
        ("encoding", {name: encoding_class(name) for name in encodings()}),
        ("processor", {name: processor_class(name) for name in processors()}),
    ]
    for kind, methods in kinds:
        for name, method in methods.items():
            records.append(
                {
                    "kind": kind,
                    "name": name,
                    "formula": method.formula,
                    "parameters": method.parameters_text,
                    "options": {option: p.default for option, p in method.options().items()},
                    "traits": list(method.traits()),
                    "source": method.source,
                    "advice": method.advice,
                }
            )
    return records

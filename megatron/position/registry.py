"""Registry of encodings, processors and temperatures by name. A new file adds a method.

The hooks of an encoding are checked when it is built. A mistake in a file is reported in one line instead of crashing a
training step. Names from other projects are translated by `megatron.config`, not by this registry.

H heads, N distances, T tokens, d head dimension, D hidden size.
"""

import difflib
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from megatron.position.base import PositionModule
from megatron.position.catalog import (
    FOLDER,
    METHODS_VARIABLE,
    MethodFileError,
    check_hook_names,
    find_method_file,
    format_path,
    get_change_time,
    list_encodings,
    list_processors,
    list_temperatures,
)
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import HOOKS, AttentionDims, OptionError
from megatron.position.processor import Processor
from megatron.position.temperature import Temperature
from megatron.position.token_range import ALL_HEADS, TokenRange

MAX_OPTION = {int: 10**6, float: 1e9}
"""Upper limits of integer and float options. They reject infinity, NaN, and sizes that exceed any memory."""

ModuleT = TypeVar("ModuleT", bound=PositionModule)


def _load_class(folder: str, name: str, base: type[ModuleT]) -> type[ModuleT]:
    names = {Encoding: list_encodings, Processor: list_processors, Temperature: list_temperatures}[base]()
    if name not in names:
        matches = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {matches[0]}? " if matches else ""
        raise ValueError(
            f"unknown {base.__name__.lower()} {name!r}; {hint}choose from {', '.join(names)}; "
            f"{METHODS_VARIABLE} adds folders of your own"
        )
    path = find_method_file(folder, name)
    return _load_class_of_file(folder, name, base, path, get_change_time(path))  # type: ignore[arg-type]


@cache
def _load_class_of_file(folder: str, name: str, base: type[ModuleT], path: Path, changed: int) -> type[ModuleT]:
    """Load the class from a file, cached by modification time, because users may edit a file while a notebook runs."""
    try:
        module = _import_file(folder, name, path)
    except (Exception, SystemExit) as error:
        _pass_on_signal(error)
        raise MethodFileError(_describe_error_in_file(path, error)) from error
    classes = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, base) and thing.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise MethodFileError(f"{format_path(path)} must define one {base.__name__}, but defines {len(classes)}")
    if issubclass(classes[0], Encoding):
        functions = (name for name, value in vars(classes[0]).items() if inspect.isfunction(value))
        hooks = (hook for hook in HOOKS if classes[0].overrides_hook(hook))
        check_hook_names(
            f"{format_path(path)}: {classes[0].__name__}",
            functions,
            hooks,
            takes_positions=classes[0].takes_positions,
        )
    else:
        _check_function_names(path, classes[0], base)
    return classes[0]


def _check_function_names(path: Path, method: type[PositionModule], base: type[PositionModule]) -> None:
    """Check that no function of a processor or temperature is a misspelled one of the base class."""
    known = [name for name in {**vars(PositionModule), **vars(base)} if not name.startswith("_")]
    for name in (name for name, value in vars(method).items() if inspect.isfunction(value)):
        if name not in known and (matches := difflib.get_close_matches(name, known, 1, cutoff=0.75)):
            raise MethodFileError(
                f"{format_path(path)}: {method.__name__}.{name} is not a function of a {base.__name__.lower()}; "
                f"did you mean {matches[0]}?"
            )


def _import_file(folder: str, name: str, path: Path) -> ModuleType:
    """Import the file of a method, as part of the project's package or on its own."""
    if path.parent == FOLDER / folder:
        return importlib.import_module(f"{__package__}.{folder}.{name}")
    module = ModuleType(f"farfield_methods.{folder}.{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # read by pickle and inspect
    try:
        # no importer, because its compiled file could be stale if the file was edited within the same second
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def _pass_on_signal(error: BaseException) -> None:
    """Re-raise the exception of a signal, a subclass of SystemExit: the file is not at fault."""
    if isinstance(error, SystemExit) and type(error) is not SystemExit:
        raise error


def _describe_error_in_file(path: Path, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    message = error.msg if isinstance(error, SyntaxError) else f"{type(error).__name__}: {error}"
    return " ".join(f"{format_path(path)}{'' if line is None else f':{line}'}: {message}".split())


def load_encoding_class(name: str) -> type[Encoding]:
    """Return the class of an encoding. Raises ValueError with the nearest name if the name is unknown."""
    return _load_class("encodings", name, Encoding)


def load_processor_class(name: str) -> type[Processor]:
    """Return the class of a processor. Raises ValueError with the nearest name if the name is unknown."""
    return _load_class("processors", name, Processor)


def load_temperature_class(name: str) -> type[Temperature]:
    """Return the class of a temperature. Raises ValueError with the nearest name if the name is unknown."""
    return _load_class("temperatures", name, Temperature)


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
            shown = "null" if value is None else repr(value)
            raise OptionError(option, f"is {shown}; it must be of type {expected.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise OptionError(option, f"is {value}; it must be a finite number")
        if expected in MAX_OPTION and not abs(value) <= MAX_OPTION[expected]:
            raise OptionError(option, f"is {value}; it must be at most {MAX_OPTION[expected]:,}")


def build_encoding(name: str, dims: AttentionDims, options: Mapping[str, Any] | None = None) -> Encoding:
    """Build a position encoding.

    Raises:
        ValueError: unknown name or option.
        OptionError: invalid value of an option.
        MethodFileError: the file cannot be imported, the constructor fails, or a hook returns an invalid result.
    """
    encoding = _build(load_encoding_class(name), name, dims, options or {})
    check_hook_results(encoding)
    return encoding


def build_processor(
    name: str, dims: AttentionDims, options: Mapping[str, Any] | None = None, *, has_bias: bool
) -> Processor:
    """Build a score processor for an encoding with or without a bias. Raises as `build_encoding` does."""
    processor = _build(load_processor_class(name), name, dims, options or {}, has_bias=has_bias)
    if processor.preceding_rows and processor.overrides("row_terms"):
        raise MethodFileError(
            f"{_describe(type(processor))} has both preceding_rows and row_terms; only one is allowed"
        )
    _check_processor(processor)
    return processor


def build_temperature(name: str, dims: AttentionDims, options: Mapping[str, Any] | None = None) -> Temperature:
    """Build an attention temperature. Raises as `build_encoding` does."""
    temperature = _build(load_temperature_class(name), name, dims, options or {})
    _check_factors(temperature)
    return temperature


def _build(method: type[ModuleT], name: str, dims: AttentionDims, options: Mapping[str, Any], **facts: bool) -> ModuleT:
    try:
        _check_options(method, name, options)
        return method(dims, **facts, **options)
    except OptionError as error:
        error.method = name
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, SystemExit, TypeError) as error:
        _pass_on_signal(error)
        # These errors are mistakes in the file. A ValueError is the user's choice, and a RuntimeError may be lack of
        # memory.
        raise MethodFileError(_describe_error_in_file(Path(inspect.getfile(method)), error)) from error


def describe_methods(names: Collection[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Describe methods in one record each, and list one error line for each method whose file is invalid.

    A record has kind, name, formula, parameters, options with defaults, traits, source and advice.

    Args:
        names: names of the methods.
    """
    records, errors = [], []
    loaders = [
        ("encoding", list_encodings(), load_encoding_class),
        ("processor", list_processors(), load_processor_class),
        ("temperature", list_temperatures(), load_temperature_class),
    ]
    for kind, method_names, load_class in loaders:
        for name in (name for name in method_names if name in names):
            try:
                method: type[PositionModule] = load_class(name)
                _check_description(method)
            except MethodFileError as error:
                errors.append(str(error))
                continue
            records.append(
                {
                    "kind": kind,
                    "name": name,
                    "formula": method.formula,
                    "parameters": method.parameters_summary,
                    "options": {option: parameter.default for option, parameter in method.options().items()},
                    "traits": list(method.traits()),
                    "source": method.source,
                    "advice": method.advice,
                }
            )
    return records, errors


def _check_description(method: type[PositionModule]) -> None:
    for name in ("formula", "source", "advice"):
        if not isinstance(getattr(method, name, None), str):
            raise MethodFileError(f"{_describe(method, name)} is missing; it describes the method in a string")


def check_hook_results(encoding: Encoding) -> None:
    """Call each implemented hook of an encoding for a few tokens, and check its result.

    Raises:
        MethodFileError: names the file, the class, the hook and the expected result.
    """
    dims = encoding.dims
    rows, columns = _choose_checked_tokens(encoding.max_length)
    device = next(encoding.parameters(), torch.empty(0)).device
    hidden = torch.zeros(1, columns.length, dims.hidden_size, device=device)
    q, k = (torch.zeros(1, dims.num_heads, x.length, dims.head_dim, device=device) for x in (rows, columns))
    scores = torch.zeros(1, dims.num_heads, rows.length, columns.length, device=device)
    distances = torch.arange(columns.length, device=device, dtype=torch.float32)
    calls: dict[str, Callable[[], Any]] = {
        "embed": lambda: encoding.embed(columns, hidden),
        "rotate": lambda: encoding.rotate(q, rows),
        "table": lambda: encoding.table(distances),
        "dense": lambda: encoding.dense(rows, columns, q, ALL_HEADS),
        "contextual": lambda: encoding.contextual(q, k, scores, rows, columns, ALL_HEADS),
        "gate": lambda: encoding.gate(hidden, ALL_HEADS),
    }
    shapes = {
        "embed": (columns.length, dims.hidden_size),
        "rotate": (*q.shape[:-1], encoding.qk_head_dim),
        "table": (dims.num_heads, columns.length),
        "dense": (dims.num_heads, rows.length, columns.length),
        "contextual": tuple(scores.shape),
        "gate": (1, dims.num_heads, columns.length),
    }
    if (encoding.max_length is not None) != encoding.has_position_table:
        raise MethodFileError(
            f"{_describe(type(encoding))}: its max_length is {encoding.max_length}, but has_position_table is "
            f"{encoding.has_position_table}"
        )
    for hook in (hook for hook in HOOKS if type(encoding).overrides_hook(hook)):
        result = _call_hook(encoding, hook, calls[hook])
        if hook in ("table", "dense"):
            _check_terms(encoding, hook, result, shapes[hook])
        elif result is not None or hook in ("rotate", "gate"):
            _check_tensor(encoding, hook, result, shapes[hook])
            if hook == "rotate" and not encoding.rotates_alike:
                keys = _call_hook(encoding, "rotate_keys", lambda: encoding.rotate_keys(q, rows))
                _check_tensor(encoding, "rotate_keys", keys, shapes[hook])
    _check_flops(encoding, "product_flops", lambda: encoding.product_flops(1.0))
    if type(encoding).overrides_hook("gate") and not encoding.adds_bias:
        name = _describe(type(encoding), "gate")
        raise MethodFileError(f"{name} returns a bias, but {type(encoding).__name__}.adds_bias is False")


def _choose_checked_tokens(max_length: int | None = None) -> tuple[TokenRange, TokenRange]:
    """Return two rows and three columns, or fewer if positions end before; equal numbers could hide a wrong shape."""
    num_columns = min(3, max_length or 3)
    num_rows = min(2, num_columns)
    return TokenRange(num_columns - num_rows, num_rows), TokenRange(0, num_columns)


def _check_processor(processor: Processor) -> None:
    """Call the functions of a processor for a few tokens, and check their results.

    Raises as `check_hook_results` does.
    """
    dims = processor.dims
    rows, columns = _choose_checked_tokens()
    device = next(processor.parameters(), torch.empty(0)).device
    maps = (1, dims.num_heads, rows.length, columns.length)
    visible = torch.ones(1, 1, *maps[2:], dtype=torch.bool, device=device).tril(rows.start)
    scores = torch.zeros(maps, device=device)
    bias = torch.zeros(maps[1:], device=device) if processor.has_bias else None
    summed = scores[:, processor.summed_heads], None if bias is None else bias[processor.summed_heads]
    output = torch.zeros(*maps[:3], dims.head_dim, device=device)
    calls: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
        "forward": (lambda: processor(scores, bias, visible), maps),
        "row_terms": (lambda: processor.row_terms(*summed, visible, rows, columns), (1, *maps[2:])),
        "apply_row_sums": (lambda: processor.apply_row_sums(scores, scores[:, 0]), maps),
        "process_weights": (lambda: processor.process_weights(scores, visible), maps),
        "process_output": (lambda: processor.process_output(output), tuple(output.shape)),
    }
    needed = {"forward"} | ({"apply_row_sums"} if processor.overrides("row_terms") else set())
    for function, (call, shape) in calls.items():
        if function in needed or processor.overrides(function):
            _check_tensor(processor, function, _call_hook(processor, function, call), shape)
    half = max(1, dims.num_heads // 2)  # heads of a tensor-parallel rank
    logits = _call_hook(processor, "forward", lambda: processor(scores, bias, visible, slice(half), None))
    if tuple(logits.shape) != (1, half, *maps[2:]):
        name = _describe(type(processor), "forward")
        raise MethodFileError(
            f"{name} returns the shape {list(logits.shape)} for heads=slice({half}); it must be {[1, half, *maps[2:]]}"
        )
    _check_flops(processor, "flops_per_score", processor.flops_per_score)


def _check_flops(module: PositionModule, function: str, call: Callable[[], Any]) -> None:
    """Check that a function of a method returns a finite number that is not negative."""
    flops = _call_hook(module, function, call)
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 <= flops < math.inf:
        raise MethodFileError(f"{_describe(type(module), function)} returns {flops!r}; it must be a number, at least 0")


def _check_factors(temperature: Temperature) -> None:
    """Compute the factors of two rows, and check the result."""
    device = next(temperature.parameters(), torch.empty(0)).device
    rows = torch.arange(2.0, device=device), torch.arange(1.0, 3.0, device=device)
    result = _call_hook(temperature, "forward", lambda: temperature(*rows))
    num_heads = temperature.dims.num_heads
    if not isinstance(result, Tensor) or tuple(result.shape) not in ((1, 2), (num_heads, 2)):
        shape = list(result.shape) if isinstance(result, Tensor) else _describe_type(result)
        raise MethodFileError(
            f"{_describe(type(temperature), 'forward')} returns {shape} for two rows; it must be [{num_heads}, 2] or "
            "[1, 2]"
        )


def _call_hook(module: PositionModule, function: str, call: Callable[[], Any]) -> Any:
    """Call a function of a method without gradients. Raises MethodFileError if it fails or is not implemented."""
    name = _describe(type(module), function)
    try:
        with torch.no_grad():
            return call()
    except NotImplementedError as error:
        raise MethodFileError(f"{name} is not implemented") from error
    except Exception as error:
        raise MethodFileError(" ".join(f"{name} raised {type(error).__name__}: {error}".split())) from error


def _check_terms(encoding: Encoding, hook: str, result: object, shape: tuple[int, ...]) -> None:
    name = _describe(type(encoding), hook)
    if not isinstance(result, ScoreTerms):
        raise MethodFileError(f"{name} must return ScoreTerms(bias, weight), not {_describe_type(result)}")
    for term, value, fact in zip(("bias", "weight"), result, ("adds_bias", "multiplies_scores"), strict=True):
        declared = getattr(encoding, fact)
        if term == "bias" and value is None and type(encoding).overrides_hook("gate"):
            continue  # the gate may be the only source of a bias
        if (value is not None) != declared:
            returned = f"no {term}" if value is None else f"a {term}"
            raise MethodFileError(f"{name} returns {returned}, but {type(encoding).__name__}.{fact} is {declared}")
        if value is not None:
            _check_tensor(encoding, hook, value, shape)


def _check_tensor(module: PositionModule, function: str, result: object, shape: tuple[int, ...]) -> None:
    name = _describe(type(module), function)
    if not isinstance(result, Tensor):
        raise MethodFileError(f"{name} must return a tensor of the shape {list(shape)}, not {_describe_type(result)}")
    if tuple(result.shape) != shape:
        rows, columns = _choose_checked_tokens(getattr(module, "max_length", None))
        raise MethodFileError(
            f"{name} returns the shape {list(result.shape)} for {rows.length} queries, {columns.length} keys and "
            f"{module.dims.num_heads} heads; it must be {list(shape)}"
        )
    if not result.is_floating_point():
        raise MethodFileError(f"{name} returns {result.dtype}; it must be a floating-point tensor")


def _describe(method: type[PositionModule], function: str | None = None) -> str:
    source = inspect.getsourcefile(method)
    path = "" if source is None else f"{format_path(Path(source))}: "
    return path + method.__name__ + ("" if function is None else f".{function}")


def _describe_type(value: object) -> str:
    return "None" if value is None else type(value).__name__

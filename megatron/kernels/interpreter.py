"""Triton's interpreter, which runs kernels on the CPU, with bfloat16 and without nine tenths of its time."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from megatron.kernels import interpreted_bfloat16
from megatron.kernels.interpreted_bfloat16 import Bfloat16Builder


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Compute with bfloat16, and skip work that does not change the results of the interpreter.

    The interpreter computes integers a second time in 64 bits for an overflow assertion, which is then dropped unless
    Triton is debugging. At each call of a device function it searches Triton's language for functions to replace,
    although the enclosing launch has already replaced them. Each call of a language function also derives the same
    facts from the types of its arguments again (`_Plan`).
    """
    builder, scope = interpreter.interpreter_builder, interpreter._LangPatchScope()
    scope.set_attr(builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug))
    scope.set_attr(interpreter.InterpretedFunction, "__call__", _call_interpreted)
    scope.set_attr(builder, "__class__", Bfloat16Builder)
    scope.set_attr(interpreter.TensorHandle, "__post_init__", interpreted_bfloat16.round_handle)
    scope.set_attr(interpreter.ReduceScanOpInterface, "check_tensor", interpreted_bfloat16.check_reduced)
    scope.set_attr(interpreter, "_validate_np_data_size", interpreted_bfloat16.fits_size)
    scope.set_attr(interpreter, "_get_np_dtype", _remember(interpreted_bfloat16.get_numpy_dtype))
    scope.set_attr(interpreter, "_patch_attr", partial(_replace_builtin, _PLANS[builder.options]))
    # A launch patches the `tl` of its kernel's file; Triton's own device functions access the language as `core`.
    core = interpreter._patch_lang(tl.zeros.fn)
    try:
        yield
    finally:
        core.restore()
        scope.restore()


def _call_interpreted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function inside a launch."""
    return function.rewrite()(*args, **kwargs)


def _remember(function: Any) -> Any:
    """Cache a function of a type by the type's name, which identifies the type and compares faster."""
    answers: dict[str, Any] = {}

    def ask(type: Any) -> Any:
        if type.name not in answers:
            answers[type.name] = function(type)
        return answers[type.name]

    return ask


class _Plan(NamedTuple):
    """Recorded calls to the interpreter's builder, which computes, made by one function of Triton's language.

    The calls depend on the types of the tensor arguments and on the other arguments, never on the values in the
    tensors. Calls with the same types and arguments therefore replay the record without the function.

    For `x + 1` with a block of float32, the builder creates a float of 1, then a block of ones, and adds. The ones
    follow from the types alone, so the plan stores them as a value, and has one step: `create_fadd` of two slots, the
    tensor's and that of the ones. Its result gets its own slot.
    """

    values: list[Any]
    """Arguments of the builder after the function's tensors; None in the slot of a step's result."""
    steps: list[tuple[str, list[int], int]]
    """Name of a builder method, the slots of its arguments, and the slot of its result."""
    result: tuple[int, dict[str, Any]] | None
    """Slot of the function's result, and the other attributes of that tensor; None if the function returns nothing."""

    def replay(self, builder: Any, handles: list[Any]) -> Any:
        """Return the function's result for these tensors."""
        values = handles + self.values
        for method, places, place in self.steps:
            values[place] = getattr(builder, method)(*[values[i] for i in places])
        if self.result is None:
            return None
        place, known = self.result
        result = object.__new__(tl.tensor)
        vars(result).update(known, handle=values[place])
        return result


class _Recorder:
    """Wrapper of the interpreter's builder that records the calls of a function on its tensors."""

    def __init__(self, builder: Any, handles: list[Any]) -> None:
        self.builder, self.given, self.values = builder, len(handles), list(handles)
        self.places = {id(handle): place for place, handle in enumerate(handles)}
        self.varying = set(self.places.values())
        self.steps: list[tuple[str, list[int], int]] = []
        self.is_complete = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.builder, name)
        return partial(self._note, name) if callable(found) else found

    def _note(self, method: str, *args: Any) -> Any:
        """Call a builder method and record it.

        Results of constants alone are constants, not steps, unless they are returned.
        """
        result = getattr(self.builder, method)(*args)
        if isinstance(result, tl.dtype):
            return result
        places = [self._find(arg) for arg in args]
        place = len(self.values)
        self.values.append(result)
        self.steps.append((method, places, place))
        if _has_handle(result):
            self.places[id(result)] = place
        if not self.varying.isdisjoint(places):
            self.varying.add(place)
        return result

    def _find(self, value: Any) -> int:
        """Return the slot of a value. An unknown tensor, for example inside a list, makes the plan incomplete."""
        if id(value) in self.places:
            return self.places[id(value)]
        self.is_complete &= not _has_handle(value)
        self.values.append(value)
        return len(self.values) - 1

    def plan(self, result: Any) -> _Plan | None:
        """Build the plan of the function that returned `result`.

        The result tensor is created anew in each call: it may be the program's index in the grid, or the caller may
        modify it.
        """
        output = None
        if isinstance(result, tl.tensor):
            output = self._find(result.handle), {key: value for key, value in vars(result).items() if key != "handle"}
            self.varying.add(output[0])
        if not self.is_complete or (output is None and result is not None):
            return None
        values = [None if place in self.varying else value for place, value in enumerate(self.values)]
        return _Plan(values[self.given :], [step for step in self.steps if step[-1] in self.varying], output)


def _has_handle(value: Any) -> bool:
    """Return True for a tensor of the interpreter's builder, or a list with one."""
    parts = value if isinstance(value, list | tuple) else [value]
    return any(type(part).__module__ == "triton.runtime.interpreter" for part in parts)


_PLANS: dict[Any, dict[Any, dict[Any, _Plan | None]]] = defaultdict(partial(defaultdict, dict))
"""Plans by the interpreter's options, the language function, and the description of its arguments; None without a plan.
"""


def _replace_builtin(plans: Any, owner: Any, name: str, function: Any, builder: Any, scope: Any) -> None:
    """Make a language function replay its plan while `scope` is active."""
    known, tensor = plans[function], tl.tensor

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is not None:  # called by another function of the language
            return function(*args, _semantic=_semantic, **kwargs)
        given = [*args, *kwargs.values()] if kwargs else args
        key = (*kwargs, *[x.type.name if type(x) is tensor else _describe(x) for x in given])
        if key not in known:
            result, known[key] = _record(function, builder, args, kwargs)
            return result
        if (plan := known[key]) is None:
            return function(*args, _semantic=TritonSemantic(builder), **kwargs)
        return plan.replay(builder, [x.handle for x in given if type(x) is tensor])

    scope.set_attr(owner, name, call)


def _describe(argument: Any) -> Any:
    """Describe everything by which a language function may decide.

    A type's name identifies it. 1, 1.0 and True are different.
    """
    if isinstance(argument, tl.tensor):
        return argument.type.name
    if isinstance(argument, list | tuple | tl.tuple):
        return tuple(map(_describe, argument))
    if isinstance(argument, slice):
        return slice, argument.start, argument.stop, argument.step
    if isinstance(argument, tl.constexpr):
        return tl.constexpr, _describe(argument.value)
    return type(argument), argument.name if isinstance(argument, tl.dtype) else argument


def _record(function: Any, builder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Plan | None]:
    """Call a function and return its result and its plan.

    Arguments are copied, so that a repeated tensor counts as two.
    """
    given = [tl.tensor(copy(x.handle), x.type) if isinstance(x, tl.tensor) else x for x in (*args, *kwargs.values())]
    recorder = _Recorder(builder, [x.handle for x in given if isinstance(x, tl.tensor)])
    named = dict(zip(kwargs, given[len(args) :], strict=True))
    result = function(*given[: len(args)], _semantic=TritonSemantic(recorder), **named)
    return result, recorder.plan(result)

"""Triton's interpreter, which runs kernels on the CPU, without what takes nine tenths of its time."""

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


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Leave out what changes nothing that the interpreter computes.

    Integers are computed a second time in 64 bits for an assertion about overflow, which is then dropped unless Triton
    debugs; at each call of a device function Triton's language is searched for what the interpreter replaces in it,
    though the launch around the call has replaced it; and each call of a function of the language finds out anew what
    follows from the types of its arguments (`_Plan`).
    """
    builder, scope = interpreter.interpreter_builder, interpreter._LangPatchScope()
    scope.set_attr(builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug))
    scope.set_attr(interpreter.InterpretedFunction, "__call__", _call_interpreted)
    scope.set_attr(interpreter, "_get_np_dtype", _remember(interpreter._get_np_dtype))
    scope.set_attr(interpreter, "_patch_attr", partial(_replace_builtin, _PLANS[builder.options]))
    # A launch replaces what its kernel's file names `tl`; Triton's own device functions know the language as `core`.
    core = interpreter._patch_lang(tl.zeros.fn)
    try:
        yield
    finally:
        core.restore()
        scope.restore()


def _call_interpreted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function's call inside a launch."""
    return function.rewrite()(*args, **kwargs)


def _remember(function: Any) -> Any:
    """A function of a type, asked once about each: a type's name says all of it and is sooner compared."""
    answers: dict[str, Any] = {}

    def ask(type: Any) -> Any:
        if type.name not in answers:
            answers[type.name] = function(type)
        return answers[type.name]

    return ask


class _Plan(NamedTuple):
    """What a function of Triton's language has the interpreter's builder do, which is what computes.

    The function decides that by the types of the tensors that it is given and by its other arguments, never by the
    numbers in the tensors. So what it did once is done again where those are the same, without asking the function.

    `x + 1` of a block of float32 has the builder make a float of 1, then a block of ones, and add. The ones follow from
    the types alone, so the plan keeps them as a value, and one step: `create_fadd` of the values at two places, the
    tensor's and the ones'; what it returns gets a place of its own.
    """

    values: list[Any]
    """What the builder is given beside the function's tensors, which come before; None where a step's result goes."""
    steps: list[tuple[str, list[int], int]]
    """A method of the builder, the places of the values that it is given, and that of the value that it returns."""
    result: tuple[int, dict[str, Any]] | None
    """The place of what the function returns, and what else is known of that tensor; None if it returns nothing."""

    def carry_out(self, builder: Any, handles: list[Any]) -> Any:
        """The function's result for these tensors."""
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
    """The interpreter's builder, which notes what a function has it do with the tensors that the function is given."""

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
        """What is made of constants alone is a constant, and no step of the plan, unless the function returns it."""
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
        """A value's place. A tensor that stands in a list, or came some other way, has none: there can be no plan."""
        if id(value) in self.places:
            return self.places[id(value)]
        self.is_complete &= not _has_handle(value)
        self.values.append(value)
        return len(self.values) - 1

    def plan(self, result: Any) -> _Plan | None:
        """Of the function that returned this, which is made anew each time: it may be the program's place in the grid,
        or altered by who gets it."""
        output = None
        if isinstance(result, tl.tensor):
            output = self._find(result.handle), {key: value for key, value in vars(result).items() if key != "handle"}
            self.varying.add(output[0])
        if not self.is_complete or (output is None and result is not None):
            return None
        values = [None if place in self.varying else value for place, value in enumerate(self.values)]
        return _Plan(values[self.given :], [step for step in self.steps if step[-1] in self.varying], output)


def _has_handle(value: Any) -> bool:
    """Is it a tensor, as the interpreter's builder knows it, or a list with one?"""
    parts = value if isinstance(value, list | tuple) else [value]
    return any(type(part).__module__ == "triton.runtime.interpreter" for part in parts)


_PLANS: dict[Any, dict[Any, dict[Any, _Plan | None]]] = defaultdict(partial(defaultdict, dict))
"""By the interpreter's options, by function of the language, by what describes its arguments; None if there is none."""


def _replace_builtin(plans: Any, owner: Any, name: str, function: Any, builder: Any, scope: Any) -> None:
    """Have a function of the language carry out its plan, as long as `scope` lasts."""
    known, tensor = plans[function], tl.tensor

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is not None:  # a function of the language calls it
            return function(*args, _semantic=_semantic, **kwargs)
        given = [*args, *kwargs.values()] if kwargs else args
        key = (*kwargs, *[x.type.name if type(x) is tensor else _describe(x) for x in given])
        if key not in known:
            result, known[key] = _record(function, builder, args, kwargs)
            return result
        if (plan := known[key]) is None:
            return function(*args, _semantic=TritonSemantic(builder), **kwargs)
        return plan.carry_out(builder, [x.handle for x in given if type(x) is tensor])

    scope.set_attr(owner, name, call)


def _describe(argument: Any) -> Any:
    """What a function of the language may decide by. A type's name says all of it; 1, 1.0 and True are not the same."""
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
    """What the function returns, and its plan. It is given copies, so that a tensor in two places is two tensors."""
    given = [tl.tensor(copy(x.handle), x.type) if isinstance(x, tl.tensor) else x for x in (*args, *kwargs.values())]
    recorder = _Recorder(builder, [x.handle for x in given if isinstance(x, tl.tensor)])
    named = dict(zip(kwargs, given[len(args) :], strict=True))
    result = function(*given[: len(args)], _semantic=TritonSemantic(recorder), **named)
    return result, recorder.plan(result)

"""Launches of kernels at a fraction of what Triton's own path takes the host.

Triton finds compiled code by what an argument's value means to the compiler (a type, an alignment, 1), which its binder
works out for every launch, and asks the device and the stream besides. Here the same is told by a key that is at least
as fine, and code that Triton compiled once for a key is launched again as it is. The key that is asked first has whole
numbers as they are: the layers and steps of a run repeat them. One met with other numbers (a step of decoding has its
own lengths) is looked up by what they mean to the compiler. Whatever is unusual (the interpreter, a profiler's hooks,
neither key met before) goes Triton's way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

MAX_EXACT_KEYS = 4096
"""Of launches that are kept by their numbers; then these are forgotten."""


class _Launchable(NamedTuple):
    """What was compiled, and all that a launch takes of it besides arguments."""

    compiled: Any
    run: Any
    function: Any
    metadata: Any
    rest: tuple[Any, ...]
    """The constants that follow the other arguments."""


# Keys begin with the kernel's id: kernels live as long as their modules.
_BY_MEANING: dict[tuple[Any, ...], _Launchable] = {}
_BY_NUMBERS: dict[tuple[Any, ...], tuple[_Launchable, dict[str, Any], dict[str, Any]]] = {}
"""With the constants and options, which keys name by their ids: kept, so that nothing else gets these."""


def list_compiled_kernels() -> list[Any]:
    """What `launch` has compiled in this process, each program once."""
    return list({id(code.compiled): code.compiled for code in _BY_MEANING.values()}.values())


def describe_arguments(arguments: Sequence[Any]) -> list[Any]:
    """What code depends on of the arguments, or more: of a tensor its type and whether it begins at a multiple of 16
    bytes, of an integer itself, of a tuple its members, of all else the type."""
    described: list[Any] = []
    for value in arguments:
        kind = type(value)
        if kind is int:
            described.append(value)
        elif kind is Tensor or isinstance(value, Tensor):
            described.append(value.dtype)
            described.append(value.data_ptr() & 15)
        elif isinstance(value, tuple):
            described.append(kind)
            described += describe_arguments(value)
        else:
            described.append(kind)
    return described


def _generalize(value: Any) -> Any:
    """Of an integer whether it is 1, a multiple of 16, and beyond 32 bits: all that its value means to the compiler."""
    if type(value) is not int or value == 1:
        return value
    return (2 if value & 15 == 0 else 3) if -(1 << 31) <= value < 1 << 31 else (4 if value & 15 == 0 else 5, value)


def _has_hooks() -> bool:
    """Does something, a profiler perhaps, want to be told of launches?"""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Launch a kernel on the current device and stream; returns what was compiled, as Triton's own launch does.

    Args:
        kernel: of `triton.jit`.
        grid: programs along the three dimensions.
        arguments: those that are no constants, in the kernel's order, before these.
        constants: by name; like the options kept and not to be changed.
        options: what the compiler is told (`Tile.options`).
    """
    if _has_hooks() or not isinstance(kernel, triton.JITFunction):
        return kernel[grid](*arguments, **constants, **options)
    device = torch.cuda.current_device()
    described = describe_arguments(arguments)
    key = (id(kernel), device, id(constants), id(options), *described)
    kept = _BY_NUMBERS.get(key)
    if kept is None:
        meaning = (id(kernel), device, *constants.values(), *options.values(), *map(_generalize, described))
        known = _BY_MEANING.get(meaning)
        if known is None:
            compiled = kernel[grid](*arguments, **constants, **options)
            rest = tuple([constants[name] for name in kernel.arg_names[len(arguments) :]])
            _BY_MEANING[meaning] = _Launchable(
                compiled, compiled.run, compiled.function, compiled.packed_metadata, rest
            )
            return compiled
        if len(_BY_NUMBERS) >= MAX_EXACT_KEYS:
            _BY_NUMBERS.clear()
        kept = _BY_NUMBERS[key] = known, constants, options
    code = kept[0]
    stream = torch._C._cuda_getCurrentRawStream(device)
    # Triton's own, without what it prepares for hooks.
    code.run(*grid, stream, code.function, code.metadata, None, None, None, *arguments, *code.rest)
    return code.compiled

"""Kernel launches with a fraction of the host time of Triton's own launcher.

For every launch, Triton derives a cache key from what the arguments mean to the compiler (types, alignment, equality to
1) and queries the device and the stream. This module uses keys that are at least as fine and relaunches the code that
Triton compiled for a key. It first looks up the exact integers, because the layers and steps of a run repeat them. If
they are new (each decoding step has its own lengths), it looks up what they mean to the compiler. Triton handles all
other launches: in the interpreter, with a profiler's hooks, or with a new key.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron.kernels.runtime import get_current_device

MAX_EXACT_KEYS = 4096
"""Maximum number of launches cached by their exact integers. The cache is cleared when it is full."""


class _Launchable(NamedTuple):
    """Compiled kernel, with everything that a launch needs besides arguments."""

    compiled: Any
    run: Any
    function: Any
    metadata: Any
    rest: tuple[Any, ...]
    """Constants that follow the other arguments."""


# Keys begin with the kernel's id: kernels live as long as their modules.
_BY_MEANING: dict[tuple[Any, ...], _Launchable] = {}
_BY_NUMBERS: dict[tuple[Any, ...], tuple[_Launchable, dict[str, Any], dict[str, Any]]] = {}
"""Also stores the constants and options. Keys identify them by id, so they must stay alive."""


def list_compiled_kernels() -> list[Any]:
    """List the programs that `launch` has compiled in this process, each once."""
    return list({id(code.compiled): code.compiled for code in _BY_MEANING.values()}.values())


def describe_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Describe what the compiled code depends on, or more.

    A tensor is described by its type and by its address modulo 16, an integer by its value, a tuple by its elements,
    and any other argument by its type.
    """
    described: list[Any] = []
    describe = described.append
    for value in arguments:
        kind = type(value)
        if kind is int:
            describe(value)
        elif kind is Tensor or isinstance(value, Tensor):
            describe(value.dtype)
            describe(value.data_ptr() & 15)
        elif isinstance(value, tuple):
            describe(kind)
            described += describe_arguments(value)
        else:
            describe(kind)
    return described


def _generalize(value: Any) -> Any:
    """Reduce an integer to what the compiler uses: whether it is 1, divisible by 16, or larger than 32 bits."""
    if type(value) is not int or value == 1:
        return value
    return (2 if value & 15 == 0 else 3) if -(1 << 31) <= value < 1 << 31 else (4 if value & 15 == 0 else 5, value)


def _has_hooks() -> bool:
    """Return True if a hook, for example a profiler's, must be called for each launch."""
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
    """Launch a kernel on the current device and stream. Return the compiled kernel, as Triton's launch does.

    Args:
        kernel: function decorated with `triton.jit`.
        grid: number of programs in each of the three dimensions.
        arguments: arguments that are not constants, in the kernel's order; they precede the constants.
        constants: values of constexpr arguments by name. Like the options they are cached and must not be modified.
        options: compiler options (`Tile.options`).
    """
    if _has_hooks() or not isinstance(kernel, triton.JITFunction):
        return kernel[grid](*arguments, **constants, **options)
    device = get_current_device()
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
    # Triton's own launch, without the preparation for hooks.
    code.run(*grid, stream, code.function, code.metadata, None, None, None, *arguments, *code.rest)
    return code.compiled

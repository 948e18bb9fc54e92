"""Launches of kernels at a third of what Triton's own path takes the host.

Triton finds compiled code by what an argument's value means to the compiler (a type, an alignment, 1), which its binder
works out for every launch, and asks the device and the stream besides. Here the same is told by a key that is at least
as fine, and code that Triton compiled once for a key is launched again as it is. Whatever is unusual (the interpreter,
a profiler's hooks, a key not met before) goes Triton's way.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.runtime import is_interpreted

_SEEN: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Of each key, which begins with the kernel's id (kernels live as long as their modules): what was compiled, and the
constants that follow the other arguments."""


def describe_argument(value: Any) -> Any:
    """What code depends on of an argument, or more: of a tensor its type and whether it begins at a multiple of 16
    bytes, of an integer whether it is 1, a multiple of 16, and beyond 32 bits; of a tuple that of its members."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() & 15 == 0
    if isinstance(value, int):
        if value == 1:
            return 1
        return (2 if value & 15 == 0 else 3) if -(1 << 31) <= value < 1 << 31 else (4 if value & 15 == 0 else 5, value)
    if isinstance(value, tuple):
        return tuple([describe_argument(member) for member in value])
    return type(value)


def _has_hooks() -> bool:
    """Does something, a profiler perhaps, want to be told of launches?"""
    runtime = triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def launch(
    kernel: Any, grid: Sequence[int], arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, Any]
) -> Any:
    """Launch a kernel on the current device and stream; returns what was compiled, as Triton's own launch does.

    Args:
        kernel: of `triton.jit`.
        grid: programs along up to three dimensions.
        arguments: those that are no constants, in the kernel's order, before these.
        constants: by name.
        options: what the compiler is told (`Tile.options`).
    """
    if is_interpreted() or _has_hooks():
        return kernel[tuple(grid)](*arguments, **constants, **options)
    device = torch.cuda.current_device()
    described = tuple([describe_argument(value) for value in arguments])
    key = (id(kernel), device, described, *constants.values(), *options.values())
    seen = _SEEN.get(key)
    if seen is None:
        compiled = kernel[tuple(grid)](*arguments, **constants, **options)
        names = kernel.arg_names[len(arguments) :]
        _SEEN[key] = compiled, tuple(constants[name] for name in names)
        return compiled
    compiled, rest = seen
    compiled[grid](*arguments, *rest, stream=torch._C._cuda_getCurrentRawStream(device))
    return compiled

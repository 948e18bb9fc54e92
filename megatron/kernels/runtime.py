"""Launch of kernels: on a CUDA device, or on CPU tensors inside Triton's interpreter.

The same tiles and options launch a kernel and cross-compile it (`aot_configs.py`).

`launch` needs a fraction of the host time of Triton's own launcher. For every launch, Triton derives a cache key from
what the arguments mean to the compiler (types, alignment, equality to 1) and queries the device and the stream. This
module uses keys that are at least as fine and relaunches the code that Triton compiled for a key. It first looks up the
exact integers, because the layers and steps of a run repeat them. If they are new (each decoding step has its own
lengths), it looks up what they mean to the compiler. Triton handles all other launches: in the interpreter, with a
profiler's hooks, or with a new key.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Compute types of kernels; they accumulate in float32."""
INPUT_PRECISION = "ieee"
"""Precision of float32 matrix products: IEEE, no TF32. Half types are not affected."""
MAX_HEADS_IN_BATCH = 65535
"""Maximum number of sequences times heads: CUDA's limit for the second and third dimension of a grid."""
MAX_EXACT_KEYS = 4096
"""Maximum number of launches cached by their exact integers. The cache is cleared when it is full."""


@dataclass(frozen=True)
class Tile:
    """Block of one program, and its warps and stages."""

    block_m: int
    """Number of rows."""
    block_n: int
    """Number of columns, or of distances in CDAPE's processor kernels and in sums over diagonals."""
    num_warps: int
    num_stages: int

    @property
    def blocks(self) -> dict[str, int]:
        """Block sizes as constants of the kernel."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Compiler options. Fused multiply-add is set explicitly, because Triton's default depends on its version."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def check_heads_in_batch(batch: int, heads: int) -> None:
    """Raise ValueError if a grid cannot have a program for each head of each sequence."""
    if batch * heads > MAX_HEADS_IN_BATCH:
        raise ValueError(f"{batch} sequences of {heads} heads; batch times heads must be at most {MAX_HEADS_IN_BATCH}")


def cdiv(count: int, block: int) -> int:
    """Return the number of blocks that cover `count` elements.

    Triton's own function, called outside of a kernel, takes as long as three operations of PyTorch.
    """
    return -(-count // block)


def is_interpreted() -> bool:
    """Return True if this process interprets kernels (TRITON_INTERPRET was set before triton was imported)."""
    return bool(triton.knobs.runtime.interpret)


def get_arch(x: Tensor) -> int | None:
    """Return the compute capability of the tensor's device as major · 10 + minor, or None in the interpreter.

    Raises:
        RuntimeError: if a kernel cannot run on the tensor's device.
    """
    if is_interpreted():
        return None
    if x.device.type != "cuda":
        raise RuntimeError(f"this kernel needs a CUDA device, its tensors are on {x.device}")
    return _read_arch(x.get_device())


@cache
def _read_arch(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


class DeviceProperties(NamedTuple):
    """Properties of a device that determine the size of a workspace, named as in PyTorch."""

    total_memory: int
    """Device memory, in bytes."""
    multi_processor_count: int


A100_40GB = DeviceProperties(40 << 30, 108)
"""Properties of the smaller A100, used without a GPU."""


def get_device_properties(x: Tensor) -> DeviceProperties:
    """Return the properties of the tensor's device, or those of an A100 if it is not a CUDA device."""
    return _read_device_properties(x.get_device()) if x.is_cuda else A100_40GB


@cache
def _read_device_properties(device: int) -> DeviceProperties:
    properties = torch.cuda.get_device_properties(device)
    return DeviceProperties(properties.total_memory, properties.multi_processor_count)


def get_current_device() -> int:
    """Return the index of the current CUDA device, in a process that has a tensor on one.

    `torch.cuda.current_device` first checks that CUDA is initialized, which takes longer than the rest of a launch.
    """
    return torch._C._cuda_getDevice()


_NO_CONTEXT = nullcontext()


def launch_context(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels launch on the tensor's device. The interpreter gets bfloat16 and speed."""
    if x.is_cuda:
        index = x.get_device()
        return _NO_CONTEXT if index == get_current_device() else torch.cuda.device(index)
    if not is_interpreted():
        return _NO_CONTEXT
    from megatron.kernels.interpreter import fast_interpreter  # slow to import, and not needed on a GPU

    return fast_interpreter()


def get_uncompiled_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without torch.compile tracing into it: the call breaks the graph."""
    return torch._dynamo.disable(function.apply) if torch.compiler.is_compiling() else function.apply


def get_backward_number() -> int:
    """Return the number of the running backward pass, which distinguishes it from leftovers of another pass."""
    return torch._C._current_graph_task_id()


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

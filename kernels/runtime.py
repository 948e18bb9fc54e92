"""How and where kernels are launched: on a CUDA device, or on CPU tensors inside Triton's interpreter.

The same tiles and options launch a kernel and compile it for a GPU that is not here (`aot_configs.py`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels compute in; they accumulate in float32."""
INPUT_PRECISION = "ieee"
"""Of matrix products of float32: exact to the type, no TF32. Half types are not affected."""


@dataclass(frozen=True)
class Tile:
    """The block of one program, and what computes it."""

    block_m: int
    """Rows."""
    block_n: int
    """Columns; in CDAPE's processor kernels and in sums over diagonals, distances."""
    num_warps: int
    num_stages: int

    @property
    def blocks(self) -> dict[str, int]:
        """As constants of the kernel."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}

    @cached_property
    def options(self) -> dict[str, Any]:
        """What the compiler is told. Multiply and add in one rounding: Triton's default depends on its version."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def cdiv(count: int, block: int) -> int:
    """How many blocks hold so many. Triton's own, called outside of a kernel, takes as long as three of PyTorch's
    operations."""
    return -(-count // block)


def is_interpreted() -> bool:
    """Does this process run kernels in the interpreter (TRITON_INTERPRET was set before triton was imported)?"""
    return bool(triton.knobs.runtime.interpret)


def get_arch(x: Tensor) -> int | None:
    """Compute capability of the tensor's device as major · 10 + minor; None in the interpreter.

    Raises:
        RuntimeError: a kernel cannot run where the tensor is, or not in its type.
    """
    if is_interpreted():
        if x.dtype == torch.bfloat16:
            raise RuntimeError("Triton's interpreter computes bfloat16 wrongly: choose float32 or float16")
        return None
    if x.device.type != "cuda":
        raise RuntimeError(f"this kernel needs a CUDA device, its tensors are on {x.device}")
    return _read_arch(x.device)


@cache
def _read_arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


class DeviceProperties(NamedTuple):
    """What the size of a workspace depends on, as PyTorch names it."""

    total_memory: int
    """Bytes."""
    multi_processor_count: int


A100_40GB = DeviceProperties(40 << 30, 108)
"""The smaller A100; taken where there is no GPU."""


def get_device_properties(x: Tensor) -> DeviceProperties:
    """The tensor's device."""
    if x.device.type != "cuda":
        return A100_40GB
    return _read_device_properties(x.device)


@cache
def _read_device_properties(device: torch.device) -> DeviceProperties:
    properties = torch.cuda.get_device_properties(device)
    return DeviceProperties(properties.total_memory, properties.multi_processor_count)


_NO_CONTEXT = nullcontext()


def launch_context(x: Tensor) -> AbstractContextManager[object]:
    """Kernels launch on the current device; make it the tensor's. The interpreter does only what is needed."""
    if x.is_cuda:
        index = x.get_device()
        return _NO_CONTEXT if index == torch.cuda.current_device() else torch.cuda.device(index)
    if not is_interpreted():
        return _NO_CONTEXT
    from kernels.interpreter import fast_interpreter  # it takes its time, and a GPU needs none of it

    return fast_interpreter()


def outside_graphs(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, where torch.compile ends its graph and begins another instead of looking into it."""
    return torch._dynamo.disable(function.apply) if torch.compiler.is_compiling() else function.apply


def get_backward_number() -> int:
    """The number of the backward pass that is running; what another left behind is none of its business."""
    return torch._C._current_graph_task_id()

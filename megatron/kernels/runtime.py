"""Launch of kernels: on a CUDA device, or on CPU tensors inside Triton's interpreter.

The same tiles and options launch a kernel and cross-compile it (`aot_configs.py`).
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
"""Compute types of kernels; they accumulate in float32."""
INPUT_PRECISION = "ieee"
"""Precision of float32 matrix products: IEEE, no TF32. Half types are not affected."""


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
        RuntimeError: if a kernel cannot run on the tensor's device or in its type.
    """
    if is_interpreted():
        if x.dtype == torch.bfloat16:
            raise RuntimeError("Triton's interpreter computes bfloat16 wrongly: choose float32 or float16")
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
    """Return a context in which kernels launch on the tensor's device. The interpreter gets its faster version."""
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

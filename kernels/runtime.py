"""Where kernels run: on a CUDA device, or on CPU tensors inside Triton's interpreter."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels compute in; they accumulate in float32."""


def interpreted() -> bool:
    """Does this process run kernels in the interpreter (TRITON_INTERPRET was set before triton was imported)?"""
    return bool(triton.knobs.runtime.interpret)


def capability(x: Tensor) -> int | None:
    """Compute capability of the tensor's device as major · 10 + minor; None in the interpreter.

    Raises:
        RuntimeError: a kernel cannot run where the tensor is, or not in its type.
    """
    if interpreted():
        if x.dtype == torch.bfloat16:
            raise RuntimeError("Triton's interpreter computes bfloat16 wrongly: choose float32 or float16")
        return None
    if x.device.type != "cuda":
        raise RuntimeError(f"this kernel needs a CUDA device, its tensors are on {x.device}")
    major, minor = torch.cuda.get_device_capability(x.device)
    return major * 10 + minor


class Machine(NamedTuple):
    """What the size of a workspace depends on."""

    memory: int
    """Bytes."""
    processors: int
    """Streaming multiprocessors."""


SMALLEST = Machine(40 << 30, 108)
"""The smaller A100; taken where there is no GPU."""


def machine_of(x: Tensor) -> Machine:
    """The tensor's device."""
    if x.device.type != "cuda":
        return SMALLEST
    found = torch.cuda.get_device_properties(x.device)
    return Machine(found.total_memory, found.multi_processor_count)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Kernels launch on the current device; make it the tensor's. The interpreter does only what is needed."""
    if x.device.type == "cuda":
        return torch.cuda.device(x.device)
    if interpreted():
        from kernels.interpreter import lean

        return lean()
    return nullcontext()

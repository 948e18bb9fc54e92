"""Launch CUDA C++ kernels on the current device and stream, through the driver that torch has loaded."""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch

from megatron.kernels.cuda.compile import CudaKernel, compile_kernel
from megatron.kernels.runtime import get_current_device

MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9
"""Values of the function attributes of these names in cuda.h."""


_Parameters = ctypes.c_void_p * 1


class _Function(NamedTuple):
    handle: ctypes.c_void_p
    launch: Any
    """Driver's `cuLaunchKernel`."""


def launch_kernel(kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
    """Launch a kernel.

    Args:
        kernel: kernel; it is compiled at its first launch unless the cache folder has it.
        grid: number of blocks, and of sequences.
        arguments: the kernel's only parameter. The arrays that it points to must live until the kernel has run.

    Raises:
        CompileError: if it cannot be compiled.
        RuntimeError: if the driver returns an error.
    """
    device = get_current_device()
    function = _load(kernel, device)
    parameters = _Parameters(ctypes.addressof(arguments))
    stream = torch._C._cuda_getCurrentRawStream(device)
    block = kernel.num_threads, 1, 1, kernel.shared_bytes
    result = function.launch(function.handle, grid[1], grid[0], 1, *block, stream, parameters, None)
    if result != 0:
        _check(result, kernel)


@cache
def _load(kernel: CudaKernel, device: int) -> _Function:
    major, minor = torch.cuda.get_device_capability(device)
    code, name = compile_kernel(kernel, major * 10 + minor)
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.current_stream(device)  # creates the device's context and makes it current
    _check(driver.cuModuleLoadData(ctypes.byref(module), code), kernel)
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), kernel)
    _check(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes), kernel)
    # Percent of the cache: as many blocks share a multiprocessor as its memory holds.
    _check(driver.cuFuncSetAttribute(function, PREFERRED_SHARED_MEMORY_CARVEOUT, 100), kernel)
    driver.cuLaunchKernel.argtypes = (
        *(ctypes.c_void_p, *(ctypes.c_uint,) * 7),
        *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
    )
    return _Function(function, driver.cuLaunchKernel)


def _check(result: int, kernel: CudaKernel) -> None:
    if result != 0:
        raise RuntimeError(f"{kernel.name}: the CUDA driver returned error {result}")

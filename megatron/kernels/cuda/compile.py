"""Compile CUDA C++ kernels with NVRTC, a compiler library included in torch's CUDA wheels, and launch them.

A kernel compiles in a few seconds, for one architecture. It is stored in the user's cache folder under a name derived
from the sources, the architecture and the compiler's version. Compiling needs neither a GPU nor the CUDA toolkit. A
launch uses the current device and stream, through the driver that torch has loaded.
"""

import ctypes
import fcntl
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.kernels.jit_build import CompileError, iter_cache_folders, open_cache_folder, store_file
from megatron.kernels.runtime import cdiv, get_current_device

LANGUAGE = Path(__file__).parent
FLAGS = ("--std=c++17",)
NUM_REGS, MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFERRED_SHARED_MEMORY_CARVEOUT = 4, 8, 9
"""Values of the function attributes of these names in cuda.h."""
RESERVED_BYTES = 1024
"""Shared memory that the system reserves for each block, in bytes."""
REGISTERS = 65536
"""Registers of a multiprocessor, on all GPUs of compute capability 8.0 to 9.0."""

_Parameters = ctypes.c_void_p * 1


class CudaKernel(NamedTuple):
    """Kernel in the language of `warp.h`: a struct in a header, and the struct of its arguments."""

    folder: Path
    header: str
    name: str
    """Name of the struct with its template arguments, for example "MixerBackward<Geometry<…>, true, false>"."""
    arguments: str
    num_threads: int
    shared_bytes: int
    """Dynamic shared memory of a block, in bytes; equal to `MEMORY_BYTES` in the header, which a test checks."""


@cache
def compile_kernel(kernel: CudaKernel, arch: int) -> tuple[bytes, str]:
    """Return a kernel's machine code (a cubin) and the name of its function, compiled now or by an earlier process.

    If several processes start together, the first one compiles and the others wait.

    Args:
        arch: compute capability as major · 10 + minor, for example 90.

    Raises:
        CompileError: if NVRTC was not found, or rejects the source; with its first error.
    """
    nvrtc = load_nvrtc()
    headers = {path.name: path.read_bytes() for path in [*LANGUAGE.glob("*.h"), *kernel.folder.glob("*.h")]}
    expression = f"launch_kernel<{kernel.name}, {kernel.arguments}>"
    flags = [*FLAGS, f"--gpu-architecture=sm_{arch}{'a' if arch == 90 else ''}"]
    version = (ctypes.c_int(), ctypes.c_int())
    nvrtc.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    parts = [expression, *flags, f"NVRTC {version[0].value}.{version[1].value}"]
    key = hashlib.sha256("\0".join(parts).encode() + b"\0".join(headers[name] for name in sorted(headers)))
    stem = f"cuda-{key.hexdigest()[:16]}"
    for folder in iter_cache_folders():
        try:
            open_cache_folder(folder)
            with (folder / f"{stem}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                code, name = folder / f"{stem}.cubin", folder / f"{stem}.name"
                if not (code.exists() and name.exists()):
                    made = _compile(nvrtc, kernel.header, headers, expression, flags)
                    store_file(code, made[0])
                    store_file(name, made[1].encode())
                return code.read_bytes(), name.read_text(encoding="ascii")
        except OSError:
            continue  # this folder cannot be used as a cache
    return _compile(nvrtc, kernel.header, headers, expression, flags)


@cache
def load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC of the CUDA version with which torch was built.

    Raises:
        CompileError: if it was not found.
    """
    major = (torch.version.cuda or "").split(".")[0]
    if not major:
        raise CompileError("this build of torch has no CUDA")
    for candidate in _iter_libraries(f"libnvrtc.so.{major}"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CompileError(f"libnvrtc.so.{major} was found neither in torch's packages nor on the system")


def _iter_libraries(name: str) -> Iterator[str]:
    packages = Path(torch.__file__).parents[1] / "nvidia"
    yield from map(str, sorted(packages.glob(f"*/lib/{name}")))
    yield name


def _compile(
    nvrtc: ctypes.CDLL, header: str, headers: dict[str, bytes], expression: str, flags: list[str]
) -> tuple[bytes, str]:
    program = ctypes.c_void_p()
    contents = (ctypes.c_char_p * len(headers))(*headers.values())
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    source = f'#include "{header}"\n'.encode()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", len(headers), contents, names)
    if created != 0:
        raise CompileError(f"NVRTC failed with error {created}")
    try:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if nvrtc.nvrtcCompileProgram(program, len(flags), options) != 0:
            lines = _read(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace").splitlines()
            error = next((line for line in lines if "error" in line), "no message")
            raise CompileError(f"NVRTC failed: {error}")
        name = ctypes.c_char_p()
        nvrtc.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(name))
        assert name.value is not None
        return _read(nvrtc, "CUBIN", program), name.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, content)
    return content.raw


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


def choose_carveout(kernel: CudaKernel, registers: int, shared_bytes: int) -> int:
    """Return the shared memory that the blocks on a multiprocessor need, in percent of the maximum.

    The driver rounds it up to a size that the GPU supports, and the L1 cache gets the rest of the memory.

    Args:
        registers: registers of a thread.
        shared_bytes: maximum shared memory of a multiprocessor.
    """
    block_bytes = kernel.shared_bytes + RESERVED_BYTES
    # A warp gets registers in units of 256.
    blocks = min(shared_bytes // block_bytes, REGISTERS // (cdiv(registers, 8) * 8 * kernel.num_threads))
    return min(100, cdiv(100 * blocks * block_bytes, shared_bytes))


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
    registers = ctypes.c_int()
    _check(driver.cuFuncGetAttribute(ctypes.byref(registers), NUM_REGS, function), kernel)
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    carveout = choose_carveout(kernel, registers.value, shared_bytes)
    _check(driver.cuFuncSetAttribute(function, PREFERRED_SHARED_MEMORY_CARVEOUT, carveout), kernel)
    driver.cuLaunchKernel.argtypes = (
        *(ctypes.c_void_p, *(ctypes.c_uint,) * 7),
        *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
    )
    return _Function(function, driver.cuLaunchKernel)


def _check(result: int, kernel: CudaKernel) -> None:
    if result != 0:
        raise RuntimeError(f"{kernel.name}: the CUDA driver returned error {result}")

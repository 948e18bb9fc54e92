"""The null device's library in this process: what it counts, what it loaded, and who listens to its collectives."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Counters:
    """What the process asked of the device so far; the order is that of `struct counters` in native/null_device.h."""

    launches: int
    """Kernels of the CUDA runtime: PyTorch's own."""
    triton: int
    """Kernels of the driver: Triton's, and those that PyTorch has NVRTC compile."""
    gemm: int
    """Matrix products of cuBLAS."""
    convolutions: int
    """Of cuDNN."""
    copies: int
    """In any direction."""
    fills: int
    synchronizations: int
    """Times that the host waited for the device."""
    collectives: int
    """Calls of NCCL that exchange something."""

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Counters)))

    @property
    def all_launches(self) -> int:
        """Everything that a card would run: kernels, products, convolutions, copies, fills, collectives."""
        return self.launches + self.triton + self.gemm + self.convolutions + self.copies + self.fills + self.collectives


@dataclass(frozen=True)
class LoadedKernel:
    """A Triton kernel that was compiled and loaded."""

    name: str
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread's local memory: what did not fit into its registers."""
    shared: int
    """Bytes of shared memory of a block, the most that a launch asked for."""
    launches: int


Listener = Callable[[str, str, int, int, int, int, int, int, int, int], None]
"""Of a collective: its name, the communicator and its size, this rank in it, the number of elements and their type, the
other rank or the root, the kind of reduction, and the addresses of what is sent and received."""

_LISTENER = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_size_t,
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


@cache
def load_library() -> ctypes.CDLL:
    """The library, which must be in this process already.

    Raises:
        RuntimeError: this process does not run on the null device.
    """
    library = ctypes.CDLL(None)
    try:
        library.null_device_listen.restype = None
    except AttributeError:
        raise RuntimeError("its library was not loaded before the others (LD_PRELOAD)") from None
    return library


def read_counters() -> Counters:
    """What this process asked of the device so far."""
    count = len(fields(Counters))
    return Counters(*(ctypes.c_long * count).in_dll(load_library(), "null_device_counters"))


def read_kernels() -> list[LoadedKernel]:
    """The Triton kernels that were loaded in this process, one line for each compilation."""
    library = load_library()
    kernels: list[LoadedKernel] = []
    name, values = ctypes.create_string_buffer(256), (ctypes.c_int * 4)()
    while library.null_device_kernel(len(kernels), name, values) == 0:
        kernels.append(LoadedKernel(name.value.decode(), *values))
    return kernels


def read_stub_calls() -> dict[str, int]:
    """Functions of CUDA, cuBLAS, cuDNN and NCCL that were answered with success alone, and how often."""
    library = load_library()
    names: list[str] = []
    pointers = ctypes.cast(library.null_device_stub_names, ctypes.POINTER(ctypes.c_char_p))
    while (name := pointers[len(names)]) is not None:
        names.append(name.decode())
    calls = (ctypes.c_long * len(names)).in_dll(library, "null_device_stub_calls")
    return {name: count for name, count in zip(names, calls, strict=True) if count}


_kept: list[Any] = []


def listen_to_collectives(listener: Listener) -> None:
    """Have a function called, with the interpreter's lock, in the thread of each call of NCCL."""

    def call(operation: bytes, communicator: bytes, *rest: Any) -> None:
        listener(operation.decode(), communicator.decode(), *(0 if value is None else value for value in rest))

    callback = _LISTENER(call)
    _kept.append(callback)  # ctypes does not
    load_library().null_device_listen(callback)

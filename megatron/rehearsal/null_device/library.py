"""Interface to the null device's library in this process.

It provides counters, loaded kernels, and the listener of its collectives.

A summary of the process (peak memory, counters, kernels and stub calls) is written at exit to `rank-r.summary.json` in
the ledger's folder.
"""

import atexit
import ctypes
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Counters:
    """Operations requested from the device so far, in the order of `struct counters` in native/null_device.h."""

    launches: int
    """Kernel launches of the CUDA runtime: PyTorch's own kernels."""
    triton: int
    """Kernel launches of the driver: Triton's kernels, and kernels that PyTorch compiles with NVRTC."""
    gemm: int
    """Matrix products of cuBLAS."""
    convolutions: int
    """Convolutions of cuDNN."""
    copies: int
    """Copies in any direction."""
    fills: int
    synchronizations: int
    """Number of times the host waited for the device."""
    collectives: int
    """NCCL calls that exchange data."""

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Counters)))

    @property
    def all_launches(self) -> int:
        """Total operations that a GPU would run.

        These are kernels, matrix products, convolutions, copies, fills and collectives.
        """
        return self.launches + self.triton + self.gemm + self.convolutions + self.copies + self.fills + self.collectives


@dataclass(frozen=True)
class LoadedKernel:
    """Triton kernel that was compiled and loaded."""

    name: str
    registers: int
    """Registers per thread."""
    stack: int
    """Local memory per thread, in bytes: values spilled from registers."""
    shared: int
    """Largest shared memory per block of any launch, in bytes."""
    launches: int


Listener = Callable[[str, str, int, int, int, int, int, int, int, int], None]
"""Listener of collectives. Its arguments are the operation, the communicator and its size, this rank's index in it,
the number of elements and their type, the peer or root, the reduction, and the addresses of the send and receive
buffers."""

_LISTENER = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_size_t,
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


@cache
def load_library() -> ctypes.CDLL:
    """Return the library, which this process must have loaded already.

    Raises:
        RuntimeError: if this process does not run on the null device.
    """
    library = ctypes.CDLL(None)
    try:
        library.null_device_listen.restype = None
    except AttributeError:
        raise RuntimeError("its library was not loaded first (LD_PRELOAD)") from None
    return library


def read_counters() -> Counters:
    """Return the operations that this process has requested from the device so far."""
    count = len(fields(Counters))
    return Counters(*(ctypes.c_long * count).in_dll(load_library(), "null_device_counters"))


def read_kernels() -> list[LoadedKernel]:
    """Return the Triton kernels loaded in this process, one entry per compilation."""
    library = load_library()
    kernels: list[LoadedKernel] = []
    name, values = ctypes.create_string_buffer(256), (ctypes.c_int * 4)()
    while library.null_device_kernel(len(kernels), name, values) == 0:
        kernels.append(LoadedKernel(name.value.decode(), *values))
    return kernels


def read_stub_calls() -> dict[str, int]:
    """Return the call counts of the stubs for CUDA, cuBLAS, cuDNN and NCCL functions that only return success."""
    library = load_library()
    names: list[str] = []
    pointers = ctypes.cast(library.null_device_stub_names, ctypes.POINTER(ctypes.c_char_p))
    while (name := pointers[len(names)]) is not None:
        names.append(name.decode())
    calls = (ctypes.c_long * len(names)).in_dll(library, "null_device_stub_calls")
    return {name: count for name, count in zip(names, calls, strict=True) if count}


_kept: list[Any] = []


def listen_to_collectives(listener: Listener) -> None:
    """Register a function to be called on each NCCL call, in the calling thread and with the interpreter's lock."""

    def call(operation: bytes, communicator: bytes, *rest: Any) -> None:
        listener(operation.decode(), communicator.decode(), *(0 if value is None else value for value in rest))

    callback = _LISTENER(call)
    _kept.append(callback)  # ctypes keeps no reference
    load_library().null_device_listen(callback)


def get_summary_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.summary.json"


def write_summary_at_exit(folder: str) -> Callable[[Any], None]:
    """Return the patch of torch that writes this process's summary at exit."""

    def change(torch: Any) -> None:
        process = os.getpid()

        def write() -> None:
            if os.getpid() == process and torch.cuda.is_initialized():
                write_summary(folder, torch)

        atexit.register(write)

    return change


def write_summary(folder: str | Path, torch: Any) -> None:
    """Write the summary of this process so far."""
    summary = {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "counters": asdict(read_counters()),
        "kernels": [asdict(kernel) for kernel in read_kernels()],
        "stub_calls": read_stub_calls(),
    }
    path = get_summary_path(folder, int(os.environ.get("RANK", "0")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

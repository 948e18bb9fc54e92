"""Run CUDA C++ kernels on a CPU, from the same source as on a GPU (`megatron/kernels/cuda/emulator.h`).

The kernels' folder has an `emulate.cpp`, which is built for each kernel that a test launches.
"""

import ctypes
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatron.kernels.cuda.compile import LANGUAGE, CudaKernel
from megatron.kernels.jit_build import CompileError, hash_sources, load_library

FLAGS = ("-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-fvisibility=hidden")
"""Names of a library are hidden from others: each has counts and arrays of its own."""
OPTIMIZATION = "-O1"
FAULT_OPTIMIZATION = "-Og"
"""For kernels with a planted fault, which run once: they compile in 0.7 of the time and run for 1.7 times as long."""


class Faults(NamedTuple):
    """Counts of the emulator. All but the last two are errors of a kernel."""

    races: int
    """Words of shared memory accessed by two warps without a barrier in between, at least one access being a write."""
    unwritten: int
    """Words of shared memory that are read before they are written."""
    outside: int
    """Accesses outside of shared memory or of the registered tensors."""
    misaligned: int
    stuck: int
    """Barriers at which some warps wait while others have exited."""
    accesses: int
    """Clocks of the shared memory accesses without bank conflicts."""
    clocks: int
    """Clocks of the shared memory accesses with bank conflicts."""

    @property
    def errors(self) -> tuple[int, ...]:
        """Counts that are zero in a correct kernel."""
        return self[:5]


class PlantedFault(NamedTuple):
    """Kernel with a fault that a test must find. Other kernels have none, so that they need not be compiled again."""

    folder: Path
    """Copy of the kernels' sources with the fault."""
    kernel: str
    """Part of the kernel's name."""


class Emulator:
    """Kernels of a folder, runnable on a CPU, one of them possibly with a planted fault."""

    def __init__(self, folder: Path, fault: PlantedFault | None = None) -> None:
        self.folder, self.fault = folder, fault
        self.tensors: list[Tensor] = []
        self.libraries: list[ctypes.CDLL] = []

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Reset counts and arrays, and register the tensors that kernels may access."""
        self.tensors = list(tensors)
        self.libraries = []

    def register(self, x: Tensor) -> None:
        """Register another tensor that kernels may access."""
        self.tensors.append(x)

    def launch(
        self, kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure, *, backwards: bool = False
    ) -> None:
        """Run a kernel on a grid of blocks and sequences.

        Args:
            backwards: run the warps in the reverse order between two barriers.
        """
        if self.fault is not None and self.fault.kernel in kernel.name:
            library = _build(self.fault.folder, kernel, FAULT_OPTIMIZATION)
        else:
            library = _build(self.folder, kernel)
        assert (library.num_threads(), library.memory_bytes()) == (kernel.num_threads, kernel.shared_bytes), kernel.name
        if library not in self.libraries:
            library.forget_counts()
            self.libraries.append(library)
        library.forget_arrays()
        for x in self.tensors:
            library.register_array(ctypes.c_void_p(x.data_ptr()), ctypes.c_longlong(x.numel() * x.element_size()))
        library.launch(ctypes.byref(arguments), *grid, int(backwards))

    def get_faults(self) -> Faults:
        """Return the counts since `begin`."""
        total = [0] * len(Faults._fields)
        for library in self.libraries:
            counts = (ctypes.c_longlong * len(total))()
            library.get_faults(counts)
            total = [x + y for x, y in zip(total, counts, strict=True)]
        return Faults(*total)


def find_compiler() -> str | None:
    """Return the path of this machine's C++ compiler, or None."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@cache
def _build(folder: Path, kernel: CudaKernel, optimization: str = OPTIMIZATION) -> ctypes.CDLL:
    """Compile the folder's `emulate.cpp` for a kernel, once for each state of the sources.

    Raises:
        CompileError: if this machine has no C++ compiler, or it rejects the source.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("no C++ compiler was found (c++, g++, clang++)")
    source = folder / "emulate.cpp"
    sources = [source, *sorted(LANGUAGE.glob("*.h")), *sorted(folder.glob("*.h"))]
    definitions = (f'KERNEL_HEADER="{kernel.header}"', f"KERNEL={kernel.name}", f"KERNEL_ARGUMENTS={kernel.arguments}")
    command = [compiler, *FLAGS, optimization, f"-I{LANGUAGE}", *(f"-D{definition}" for definition in definitions)]
    return load_library(f"emulate-{hash_sources(sources, command)}.so", [*command, str(source)])

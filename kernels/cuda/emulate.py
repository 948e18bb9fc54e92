"""Runs kernels in CUDA C++ on a CPU, from the source that a GPU runs (`emulator.h`): for tests.

The folder of the kernels has an `emulate.cpp`, which gives each kernel functions for C. Their names are the kernel's,
with an underscore for what no name in C has.
"""

import ctypes
import re
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from kernels.cuda.compile import LANGUAGE
from kernels.cuda.kernel import CudaKernel
from kernels.jit_build import CompileError, hash_sources, load_library

FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas")


class Faults(NamedTuple):
    """Counts of the emulator. All but the last two are errors of a kernel."""

    races: int
    """Words of shared memory that two warps access, one of them writing, with no barrier between."""
    unwritten: int
    """Words of shared memory that are read before they are written."""
    outside: int
    """Accesses outside of shared memory or of the registered tensors."""
    misaligned: int
    stuck: int
    """Barriers at which some warps wait and others have ended."""
    accesses: int
    """Clocks that accesses of shared memory would take without bank conflicts."""
    clocks: int
    """Clocks that they take."""

    @property
    def errors(self) -> tuple[int, ...]:
        """Counts that are zero in a correct kernel."""
        return self[:5]


class Emulator:
    """The kernels of a folder on a CPU."""

    def __init__(self, folder: Path) -> None:
        self.library = _build(folder)
        self.library.register_array.argtypes = [ctypes.c_void_p, ctypes.c_longlong]

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Forget counts and arrays; kernels may then access these tensors only."""
        self.library.forget_arrays()
        for x in tensors:
            self.register(x)

    def register(self, x: Tensor) -> None:
        """Let kernels access a tensor too."""
        self.library.register_array(x.data_ptr(), x.numel() * x.element_size())

    def launch(
        self, kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure, *, backwards: bool = False
    ) -> None:
        """Run a kernel on a grid of blocks and sequences.

        Args:
            backwards: run the warps in the reverse order between two barriers.
        """
        name = re.sub(r"\W+", "_", kernel.name).strip("_")
        sizes = (getattr(self.library, f"{name}_{x}")() for x in ("num_threads", "memory_bytes"))
        assert tuple(sizes) == (kernel.num_threads, kernel.shared_bytes), kernel.name
        getattr(self.library, name)(ctypes.byref(arguments), *grid, int(backwards))

    def get_faults(self) -> Faults:
        """Return what was counted since `begin`."""
        counts = (ctypes.c_longlong * len(Faults._fields))()
        self.library.get_faults(counts)
        return Faults(*counts)


def find_compiler() -> str | None:
    """Return the path of this machine's C++ compiler, or None."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@cache
def _build(folder: Path) -> ctypes.CDLL:
    """Compile the folder's `emulate.cpp`, once for each state of the sources.

    Raises:
        CompileError: there is no C++ compiler here, or it rejects the source.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("no C++ compiler was found (c++, g++, clang++)")
    source = folder / "emulate.cpp"
    sources = [source, *sorted(LANGUAGE.glob("*.h")), *sorted(folder.glob("*.h"))]
    command = [compiler, *FLAGS, f"-I{LANGUAGE}"]
    return load_library(f"emulate-{hash_sources(sources, command)}.so", [*command, str(source)])

"""Runs kernels in CUDA C++ on a CPU, from the source that a GPU runs (`emulator.h`): for tests.

The folder of the kernels has an `emulate.cpp`, which gives each kernel a function for C.
"""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from kernels.cuda.compile import LANGUAGE
from kernels.jit_build import CompileError, iter_cache_folders, open_cache_folder, run_compiler

FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas")


class Faults(NamedTuple):
    """What the emulator counted. All but the last two are errors of a kernel."""

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
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [*(path.read_text(encoding="utf-8") for path in sources), version, *FLAGS]
    name = f"emulate-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    for cache_folder in iter_cache_folders():
        try:
            open_cache_folder(cache_folder)
            if not (cache_folder / name).exists():
                with tempfile.TemporaryDirectory(dir=cache_folder) as own:
                    library = Path(own) / name
                    run_compiler([compiler, *FLAGS, f"-I{LANGUAGE}", str(source), "-o", str(library)])
                    library.replace(cache_folder / name)
            return ctypes.CDLL(str(cache_folder / name))
        except OSError:
            continue
    raise CompileError("what was compiled cannot be kept or loaded")

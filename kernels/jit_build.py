"""Compiles C for the processor that is here, once, and loads it.

What is compiled lies in the user's cache folder, under a name that holds the sources, the compiler and the processor:
a home that several kinds of machine share gets one for each. Where there is no compiler, callers do without.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
COMPILER_FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread")
ARCH_FLAGS = ("-march=native",)
"""Flags that fit the code to this processor; tests give others."""


class CompileError(RuntimeError):
    """There is no compiler here, or it does not take the sources; says which."""


@cache
def build_library(folder: Path, arch_flags: tuple[str, ...] = ARCH_FLAGS) -> ctypes.CDLL:
    """All of the folder's C files as one library.

    Args:
        folder: holds the sources and nothing else that ends in .c or .h.
        arch_flags: the compiler's flags that choose instructions.

    Raises:
        CompileError: no compiler was found, or it failed.
    """
    compiler = find_compiler()
    sources = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    command = [compiler, *COMPILER_FLAGS, *arch_flags]
    name = f"{folder.parent.name}-{hash_sources(sources, command)}.so"
    return load_library(name, [*command, *(str(path) for path in sources if path.suffix == ".c")])


def load_library(name: str, command: Sequence[str]) -> ctypes.CDLL:
    """Load a library from a cache folder, where the command makes it if it is not there or damaged.

    Args:
        name: the library's file name, which tells its contents apart (`hash_sources`).
        command: the compiler's, without the output.

    Raises:
        CompileError: the compiler failed, or the library cannot be kept or loaded.
    """
    for cache_folder in iter_cache_folders():
        try:
            return _load(cache_folder, name, command)
        except OSError as error:
            failed = error
    raise CompileError(f"what was compiled cannot be kept or loaded: {failed}")


def _load(folder: Path, name: str, command: Sequence[str]) -> ctypes.CDLL:
    open_cache_folder(folder)
    if (folder / name).exists():
        try:
            return ctypes.CDLL(str(folder / name))
        except OSError:
            pass  # it is damaged, and made again
    # Ranks that begin together each compile their own, and the last one's stays.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        library = Path(own) / name
        run_compiler([*command, "-o", str(library), "-lm"])
        library.replace(folder / name)
    return ctypes.CDLL(str(folder / name))


def find_compiler() -> str:
    """The path of this machine's C compiler.

    Raises:
        CompileError: there is none.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CompileError(f"no C compiler was found ({', '.join(COMPILERS)})")
    return compiler


def run_compiler(command: Sequence[str]) -> None:
    """Run a compiler.

    Raises:
        CompileError: it failed; names its first error.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it says nothing"]
        error = next((line for line in said if "error" in line), said[0])
        raise CompileError(f"{Path(command[0]).name} failed: {error}")


def iter_cache_folders() -> Iterator[Path]:
    """Where what was compiled may be kept: the user's cache folder, else a folder of this user's beside everybody's
    temporary files."""
    with contextlib.suppress(RuntimeError):  # Path.home: this user has none
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farfield"
    yield Path(tempfile.gettempdir()) / f"farfield-{os.getuid()}"


def open_cache_folder(folder: Path) -> None:
    """Make a folder for what is compiled, if it is not there.

    Raises:
        OSError: it cannot be made, or it is somebody else's.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else")


def hash_sources(sources: Sequence[Path], command: Sequence[str]) -> str:
    """A name for what a compiler makes: the same for the same compiler, flags, sources and processor."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    parts = [*(path.read_text(encoding="utf-8") for path in sources), *command, version, _describe_processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _describe_processor() -> str:
    """What the processor can do, as Linux tells it; elsewhere its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")

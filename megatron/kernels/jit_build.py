"""Compile C code for this machine's processor once, and load it.

Libraries are stored in the user's cache folder, under a name derived from the sources, the compiler and the processor.
A home folder shared by different machines gets one library per kind. Callers fall back if there is no compiler.
"""

import contextlib
import ctypes
import errno
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
"""Flags that optimize the code for this processor; tests use others."""


class CompileError(RuntimeError):
    """Raised if there is no compiler or it rejects the sources; the message gives the reason."""


@cache
def build_library(folder: Path, arch_flags: tuple[str, ...] = ARCH_FLAGS) -> ctypes.CDLL:
    """Compile all C files of a folder into one library and load it.

    Args:
        folder: folder with the sources, and no other files that end in .c or .h.
        arch_flags: compiler flags that select the instruction set.

    Raises:
        CompileError: if no compiler was found, or it failed.
    """
    compiler = find_compiler()
    sources = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    command = [compiler, *COMPILER_FLAGS, *arch_flags]
    name = f"{folder.parent.name}-{hash_sources(sources, command)}.so"
    return load_library(name, [*command, *(str(path) for path in sources if path.suffix == ".c")])


def load_library(name: str, command: Sequence[str]) -> ctypes.CDLL:
    """Load a library from a cache folder. Build it with the command if it is missing or damaged.

    Args:
        name: file name of the library, which identifies its contents (`hash_sources`).
        command: compiler command without the output option.

    Raises:
        CompileError: if the compiler failed, or the library cannot be stored or loaded.
    """
    failed: OSError | str = "no folder is writable"
    for cache_folder in iter_cache_folders():
        try:
            return _load(cache_folder, name, command)
        except OSError as error:
            failed = error
    raise CompileError(f"the compiled library cannot be stored or loaded: {failed}")


def _load(folder: Path, name: str, command: Sequence[str]) -> ctypes.CDLL:
    open_cache_folder(folder)
    if (folder / name).exists():
        try:
            return ctypes.CDLL(str(folder / name))
        except OSError:
            pass  # damaged: build it again
    # Ranks that start together each compile a library; the last one replaces the others.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        library = Path(own) / name
        run_compiler([*command, "-o", str(library), "-lm"])
        library.replace(folder / name)
    return ctypes.CDLL(str(folder / name))


def find_compiler() -> str:
    """Return the path of this machine's C compiler.

    Raises:
        CompileError: if there is none.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CompileError(f"no C compiler was found ({', '.join(COMPILERS)})")
    return compiler


def run_compiler(command: Sequence[str]) -> None:
    """Run a compiler.

    Raises:
        CompileError: if it fails, with its first error.
        OSError: if the disk is full, so that the caller may try another folder.
    """
    # English messages, so that a full disk can be recognized.
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(number) in done.stderr:
                raise OSError(number, os.strerror(number))
        output = done.stderr.strip().splitlines() or ["no message"]
        error = next((line for line in output if "error" in line), output[0])
        raise CompileError(f"{Path(command[0]).name} failed: {error}")


def iter_cache_folders() -> Iterator[Path]:
    """Yield possible cache folders: the user's cache folder, then a folder of this user in the temporary folder."""
    with contextlib.suppress(RuntimeError):  # Path.home fails for a user without a home folder
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farfield"
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files is writable
        yield Path(tempfile.gettempdir()) / f"farfield-{os.getuid()}"


def open_cache_folder(folder: Path) -> None:
    """Create a cache folder if it does not exist.

    Raises:
        OSError: if it cannot be created, or belongs to another user.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user")


def store_file(path: Path, content: bytes) -> None:
    """Write a file of a cache folder. Other processes see the whole file or none, and a full disk leaves nothing.

    Raises:
        OSError: if it cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as own:
        written = Path(own) / path.name
        written.write_bytes(content)
        written.replace(path)


def hash_sources(sources: Sequence[Path], command: Sequence[str]) -> str:
    """Return a name for a compiler's output that is unique per compiler, flags, sources and processor."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    parts = [*(path.read_text(encoding="utf-8") for path in sources), *command, version, _describe_processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _describe_processor() -> str:
    """Return the processor's features as listed by Linux; on other systems its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")

"""Build of the null device's library for the installed torch, with the system's C compiler.

`native/` implements the functions that need an answer. This module generates a stub that returns success for every
other function that torch's libraries import from CUDA, cuBLAS, cuDNN and NCCL. It reads the names from the undefined
symbols of the installed libraries, so the stubs always match the installed torch. `library.py` reports at exit which
stubs were called.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron.distributed.hardware import torch_has_cuda
from megatron.kernels.jit_build import (
    CompileError,
    find_compiler,
    hash_sources,
    iter_cache_folders,
    open_cache_folder,
    run_compiler,
)
from megatron.utils.errors import UserError
from megatron.utils.project import PACKAGES_FOLDER

SOURCES = Path(__file__).parent / "native"
LIBRARY = "libcuda.so.1"
"""File name of the driver, which Triton and PyTorch load."""
NVML_LIBRARY = "libnvidia-ml.so.1"
"""File name of NVML, which PyTorch loads to count devices. It is the same library; the loader identifies it by its
file."""
INSTALL_CUDA_TORCH = "pip install 'torch==2.13.0,!=2.13.0+cpu'"

_NVIDIA_FUNCTIONS = re.compile(r"^(cuda|__cuda|cublas|cudnn|nccl)")
_FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{LIBRARY}")


@dataclass(frozen=True)
class NullDevice:
    """Built null device library."""

    folder: Path
    """Folder that contains `libcuda.so.1`."""

    @property
    def library(self) -> Path:
        return self.folder / LIBRARY


def build_null_device() -> NullDevice:
    """Return the library for the installed torch and Triton.

    Build it on the first call and cache it in the user's cache folder.

    Raises:
        UserError: if torch is a CPU build, or the compiler, headers or symbols are missing. The message names them.
    """
    site_packages = _find_cuda_torch()
    try:
        return _build(site_packages)
    except CompileError as error:
        raise UserError(f"the null device cannot be built: {error}") from error


def _find_cuda_torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError(f"the null device needs torch: {_describe_remedy()}")
    if not torch_has_cuda():
        raise UserError(
            f"the null device needs the CUDA build of torch (but no GPU and no driver); the CPU build is "
            f"installed: {_describe_remedy()}"
        )
    return Path(spec.origin).parent.parent


def _describe_remedy() -> str:
    """Describe how to get the null device: use the environment of `make setup-cuda`, or install into the user's own."""
    python = PACKAGES_FOLDER / ".venv-cuda" / "bin" / "python"
    if python.is_file():
        return f"run with {os.path.relpath(python)}, which has it"
    return (
        f"make setup-cuda (once, 5 GB), then run with {os.path.relpath(python)}; or in your own environment, "
        f"{INSTALL_CUDA_TORCH}"
    )


def _build(site_packages: Path) -> NullDevice:
    compiler = find_compiler()
    sources = sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])
    command = [compiler, *_FLAGS, *(f"-I{folder}" for folder in _find_headers(site_packages))]
    versions = [(site_packages / "torch" / "version.py"), Path(__file__)]
    name = f"null-device-{hash_sources([*sources, *versions], command)}"
    failed: OSError | None = None
    for cache_folder in iter_cache_folders():
        try:
            open_cache_folder(cache_folder)
            folder = cache_folder / name
            if not (folder / LIBRARY).is_file():
                _compile(command, sources, site_packages, folder)
            return NullDevice(folder)
        except OSError as error:
            failed = error
    raise CompileError(f"the compiled library cannot be saved: {failed}")


def _find_headers(site_packages: Path) -> list[Path]:
    """Find the CUDA headers shipped with torch and Triton: `cuda_runtime_api.h` and its includes."""
    runtime = sorted(site_packages.glob("nvidia/cu*/include/cuda_runtime_api.h"))
    triton = site_packages / "triton/backends/nvidia/include"
    if not runtime or not (triton / "crt/host_defines.h").is_file():
        raise CompileError("CUDA headers not found; torch's CUDA build and Triton include them")
    return [runtime[-1].parent, triton]


def _compile(command: list[str], sources: list[Path], site_packages: Path, folder: Path) -> None:
    files = [str(path) for path in sources if path.suffix == ".c"]
    # Concurrent processes each compile their own copy; the first one to finish is kept.
    with tempfile.TemporaryDirectory(dir=folder.parent) as own:
        written = Path(own) / "stubs.c"
        run_compiler([*command, *files, "-o", f"{own}/answers.so", "-ldl"])
        answered = _list_symbols(Path(own) / "answers.so", "--defined-only")
        needed = set[str]()
        for library in sorted((site_packages / "torch" / "lib").glob("*.so*")):
            needed |= {name for name in _list_symbols(library, "--undefined-only") if _NVIDIA_FUNCTIONS.match(name)}
        header = next(folder for folder in _find_headers(site_packages)) / "cuda.h"
        needed |= _list_driver_functions(header.read_text(encoding="utf-8", errors="replace"))
        written.write_text(_render_stubs(sorted(needed - answered)), encoding="utf-8")
        built = Path(own) / "built"
        built.mkdir()
        run_compiler([*command, *files, str(written), "-o", str(built / LIBRARY), "-ldl"])
        (built / NVML_LIBRARY).symlink_to(LIBRARY)
        try:
            built.rename(folder)
        except OSError:
            if not (folder / LIBRARY).is_file():
                raise


def _list_symbols(library: Path, which: str) -> set[str]:
    """List the symbols that a library defines or imports."""
    tool = shutil.which("nm")
    if tool is None:
        raise CompileError("nm not found; install binutils, which come with the compiler")
    done = subprocess.run([tool, "-D", which, str(library)], capture_output=True, text=True, check=False)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line.strip()}


def _list_driver_functions(header: str) -> set[str]:
    """List all functions of the driver. PyTorch looks them up by name at run time."""
    functions = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header))
    versioned = dict(re.findall(r"#define\s+(cu[A-Z]\w+)\s+(cu\w+_v\d+)\b", header))
    return functions | set(versioned) | set(versioned.values())


def _render_stubs(names: list[str]) -> str:
    lines = [
        "/* Generated: functions that are answered with success alone. */",
        "const char *const null_device_stub_names[] = {" + "".join(f'"{name}", ' for name in names) + "0};",
        f"long null_device_stub_calls[{len(names) + 1}];",
        *(f"long {name}(void) {{ null_device_stub_calls[{i}]++; return 0; }}" for i, name in enumerate(names)),
    ]
    return "\n".join(lines) + "\n"

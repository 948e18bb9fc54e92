"""Null device of a child process: the GPU that it emulates, the build of its library, and environment variables.

Sizes of shared memory of the emulated GPUs come from NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability"; multiprocessors and L2 caches from the data sheets; device memory from `distributed/hardware.py`.

`native/` implements the functions that need an answer. This module generates a stub that returns success for every
other function that torch's libraries import from CUDA, cuBLAS, cuDNN and NCCL. It reads the names from the undefined
symbols of the installed libraries, so the stubs always match the installed torch. `recorder.py` reports at exit which
stubs were called.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.distributed.hardware import get_gpu_spec, resolve_gpu_name, torch_has_cuda
from megatron.kernels.jit_build import (
    CompileError,
    find_compiler,
    hash_sources,
    iter_cache_folders,
    open_cache_folder,
    run_compiler,
)
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices
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


GIB = 2**30


@dataclass(frozen=True)
class GpuModel:
    """Emulated GPU."""

    name: str
    """Name accepted by `--gpu`."""
    device_name: str
    """Name reported by the driver."""
    capability: tuple[int, int]
    processors: int
    block_shared: int
    """Maximum shared memory of a block, in bytes."""
    shared: int
    """Shared memory of a multiprocessor, in bytes."""
    l2: int
    """Size of the L2 cache, in bytes."""
    memory: int
    """Device memory visible to PyTorch, in bytes."""

    @property
    def architecture(self) -> str:
        """Architecture name for compilers, for example sm_80."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


def _build_ampere(name: str, device_name: str) -> GpuModel:
    memory = int(get_gpu_spec(name).gib * GIB)
    return GpuModel(name, device_name, (8, 0), 108, 163 * 1024, 164 * 1024, 40 * 2**20, memory)


def _build_hopper(name: str, device_name: str, processors: int = 132) -> GpuModel:
    memory = int(get_gpu_spec(name).gib * GIB)
    return GpuModel(name, device_name, (9, 0), processors, 227 * 1024, 228 * 1024, 50 * 2**20, memory)


GPU_MODELS = (
    _build_ampere("a100-40gb", "NVIDIA A100-SXM4-40GB"),
    _build_ampere("a100-80gb", "NVIDIA A100-SXM4-80GB"),
    _build_ampere("a800", "NVIDIA A800-SXM4-80GB"),
    _build_hopper("gh200", "NVIDIA GH200 480GB"),
    _build_hopper("h100", "NVIDIA H100 80GB HBM3"),
    _build_hopper("h100-nvl", "NVIDIA H100 NVL"),
    _build_hopper("h100-pcie", "NVIDIA H100 PCIe", 114),
    _build_hopper("h200", "NVIDIA H200"),
    _build_hopper("h800", "NVIDIA H800"),
)
"""Emulated GPUs: those known by name (`distributed/hardware.py`) for which the kernels are compiled and tested (compute
capability 8.0 and 9.0)."""


def get_gpu_model(text: str) -> GpuModel:
    """Return the GPU for a name given by the user, as `resolve_gpu_name` reads it: a100-80, A100_80GB, h100.

    Raises:
        UserError: if the name is unknown, or the GPU is only supported for planning. The message lists the valid names.
    """
    names = [gpu.name for gpu in GPU_MODELS]
    try:
        name = resolve_gpu_name(text)
    except UserError:
        raise UserError(f"--gpu {text}: unknown GPU; {format_choices(text.lower(), names)}") from None
    if name not in names:
        raise UserError(
            f"--gpu {text}: supported by plan but not by rehearse, which needs compute capability 8.0 or "
            f"9.0: {', '.join(names)}"
        )
    return GPU_MODELS[names.index(name)]


DEVICE_VARIABLE = "FARFIELD_NULL_DEVICE"
"""Emulated GPU, read by `native/memory.c`. If set, the null device is active in the child process."""
LEDGER_VARIABLE = "FARFIELD_NULL_DEVICE_LEDGER"
"""Folder to which each rank writes its ledger and its summary."""
SINGLE_RANK_VARIABLE = "FARFIELD_NULL_DEVICE_LONE_RANK"
"""Set if the process is a single rank of a job whose other ranks do not run."""

VOID_RESULTS = "the null device computes nothing: its losses, times and output files are meaningless"

HERE = Path(__file__).parent


def build_environment(
    gpu: GpuModel,
    *,
    devices: int = 1,
    ledger: Path | None = None,
    is_single_rank: bool = False,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Build the environment of a child process that runs on the null device.

    Args:
        gpu: GPU that each device emulates.
        devices: number of devices of the node.
        ledger: folder for the records of each rank (`recorder.py`); None writes none.
        is_single_rank: True if the child is one of many ranks (by torchrun's variables) and the others do not run.
        base: environment to extend; by default this process's.

    Raises:
        UserError: if the null device cannot be built on this machine.
    """
    device = build_null_device()
    environment = dict(os.environ if base is None else base)
    fields = {
        "memory": gpu.memory,
        "major": gpu.capability[0],
        "minor": gpu.capability[1],
        "processors": gpu.processors,
        "block_shared": gpu.block_shared,
        "shared": gpu.shared,
        "l2": gpu.l2,
        "devices": devices,
    }
    name = f"{gpu.device_name} (null device)"  # appears in every record made on the null device
    environment[DEVICE_VARIABLE] = ";".join([name, *(f"{key}={value}" for key, value in fields.items())])
    _prepend(environment, "LD_PRELOAD", str(device.library), " ")
    _prepend(environment, "LD_LIBRARY_PATH", str(device.folder))
    _prepend(environment, "PATH", str(HERE / "bin"))
    _prepend(environment, "PYTHONPATH", f"{HERE / 'site'}{os.pathsep}{PACKAGES_FOLDER}")
    environment["TRITON_LIBCUDA_PATH"] = str(device.folder)
    # Inductor's own launcher looks up driver functions by itself; without it, kernels are launched through Triton.
    environment["TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER"] = "0"
    for variable, value in ((LEDGER_VARIABLE, ledger), (SINGLE_RANK_VARIABLE, "1" if is_single_rank else None)):
        environment.pop(variable, None)
        if value is not None:
            environment[variable] = str(value)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def _prepend(environment: dict[str, str], variable: str, value: str, separator: str = os.pathsep) -> None:
    before = environment.get(variable)
    environment[variable] = value if not before else f"{value}{separator}{before}"

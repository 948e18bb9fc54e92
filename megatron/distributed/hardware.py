"""Hardware of this machine, and specifications of known GPUs, without importing torch.

The specifications of a GPU are its speed, its memory and its link bandwidth. Peaks are dense, without sparsity, from
the vendors' data sheets. Memory is the size that PyTorch reports: about 1.5% less than the data sheet, and 7.5% less on
cards with error correction of GDDR memory. The link is one direction of the connection between the GPUs of a node:
NVLink if present, otherwise PCIe.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


DEVICE_FOLDER = Path("/dev")
PROCESSES_PER_CORE = 4
"""Maximum number of processes per core.

Several processes may share a core, to try out configurations for several GPUs. More would only wait for each other, and
each takes about a gigabyte of memory.
"""


@dataclass(frozen=True)
class LocalHardware:
    """Hardware available to a run."""

    num_gpus: int
    num_cores: int
    memory: int | None = None
    """Memory available to all processes together, in bytes, or None if unknown."""
    gpu_memory: int | None = None
    """Memory of the largest GPU, in bytes, or None if unknown."""

    @staticmethod
    def detect() -> "LocalHardware":
        """Detect the hardware of this machine that this process may use."""
        num_gpus = count_gpus()
        return LocalHardware(num_gpus, count_cores(), detect_memory(), detect_gpu_memory() if num_gpus else None)


def detect_memory() -> int | None:
    """Return the size of memory and swap in bytes, limited by this process's control group; None if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        total = sum(1024 * int(lines[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use; 0 if torch was built without CUDA."""
    if not torch_has_cuda():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = _count_installed_gpus()
    if visible is None or installed == 0:
        return installed
    # As in CUDA, entries count up to the first invalid one, so -1 hides all that follow.
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry == "-1" or (entry.isdigit() and int(entry) >= installed):
            break
        count += 1
    return count


def torch_has_cuda() -> bool:
    """Return True if the installed torch is a CUDA build, read from its version file instead of importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True  # an unusual build: leave the error to torch
    match = re.search(r"^cuda\b[^=]*=\s*(.+)$", text, re.MULTILINE)
    return match is None or match.group(1).strip() != "None"


def _count_installed_gpus() -> int:
    devices = [path for path in DEVICE_FOLDER.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if devices:
        return len(devices)
    tool = shutil.which("nvidia-smi")  # GPUs are not device files on Windows Subsystem for Linux
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def read_gpu_name() -> str | None:
    """Return the name of the first GPU as reported by the driver, or None."""
    names = _query_gpus("name")
    return names[0].strip() if names else None


def detect_gpu_memory() -> int | None:
    """Return the memory of the largest GPU in bytes as reported by the driver, or None."""
    try:
        return max((int(mib) << 20 for mib in _query_gpus("memory.total")), default=None)
    except ValueError:  # "[N/A]" if the GPU shares the host's memory
        return None


def _query_gpus(field: str) -> list[str]:
    """Return the values of a field for all GPUs from nvidia-smi; an empty list if it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        command = [tool, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


@dataclass(frozen=True)
class GpuSpec:
    """Specifications of a GPU."""

    half_tflops: float
    """Peak TFLOP/s in bfloat16 and float16."""
    single_tflops: float
    """Peak TFLOP/s in float32, without TF32."""
    gib: float
    """Memory in GiB; the smallest size if there are several."""
    nvlink_gb_per_s: float
    """Bandwidth to another GPU of the node in one direction, in GB/s."""

    def get_peak_tflops(self, precision: str) -> float:
        """Return the peak TFLOP/s in a precision (fp32, bf16, fp16)."""
        return self.single_tflops if precision == "fp32" else self.half_tflops


GPUS = {
    "B200": GpuSpec(2250.0, 75.0, 177.0, 900),
    "GH200": GpuSpec(989.0, 67.0, 94.5, 450),
    "H200": GpuSpec(989.0, 67.0, 139.0, 450),
    "H100 PCIe": GpuSpec(756.0, 51.0, 79.1, 64),
    "H100 NVL": GpuSpec(835.0, 60.0, 92.5, 300),
    "H100": GpuSpec(989.0, 67.0, 79.1, 450),
    "A100": GpuSpec(312.0, 19.5, 39.4, 300),
    "A800": GpuSpec(312.0, 19.5, 79.1, 200),
    "H800": GpuSpec(989.0, 67.0, 79.1, 200),
    "A40": GpuSpec(149.7, 37.4, 44.4, 32),
    "A6000": GpuSpec(154.8, 38.7, 47.3, 32),
    "A10G": GpuSpec(70.0, 35.0, 22.2, 32),
    "A10": GpuSpec(125.0, 31.2, 22.2, 32),
    "L40S": GpuSpec(362.0, 91.6, 44.4, 32),
    "L40": GpuSpec(181.0, 90.5, 44.4, 32),
    "L4": GpuSpec(121.0, 30.3, 22.2, 32),
    "V100": GpuSpec(125.0, 15.7, 15.8, 150),
    "T4": GpuSpec(65.0, 8.1, 14.8, 16),
    "RTX 4090": GpuSpec(165.2, 82.6, 23.6, 32),
    "RTX 3090": GpuSpec(71.0, 35.6, 23.6, 32),
}
"""GPU specifications by a part of the driver's name. The first match counts, so more specific names come first."""

MEMORY_SIZES = {"A100 40GB": 39.4, "A100 80GB": 79.1, "V100 16GB": 15.8, "V100 32GB": 31.5}
"""Memory in GiB of GPUs that are sold with several sizes."""


def find_gpu_spec(name: str) -> GpuSpec | None:
    """Return the specifications of a GPU by its driver name ("NVIDIA A100-SXM4-80GB"), or None if unknown.

    The memory reported by the GPU itself is more accurate.
    """
    return next((gpu for part, gpu in GPUS.items() if part in name), None)


def list_gpu_names() -> list[str]:
    """Return the GPU names accepted by `--gpu`, one per memory size."""
    sized = {name.split()[0] for name in MEMORY_SIZES}
    return [name.lower().replace(" ", "-") for name in sorted([*(GPUS.keys() - sized), *MEMORY_SIZES])]


def resolve_gpu_name(text: str) -> str:
    """Resolve a GPU name written by a user to one of `list_gpu_names`: a100-40gb, A100_40GB, a100-40, "RTX 4090".

    A name without a size (a100) means the smallest size.

    Raises:
        UserError: the name is unknown; the message lists known ones.
    """
    wanted, names = _normalize_name(text), list_gpu_names()
    for name in names:
        if wanted in (_normalize_name(name), _normalize_name(name).removesuffix("gb")):
            return name
    sizes = [name for name in MEMORY_SIZES if _normalize_name(name.split()[0]) == wanted]
    if sizes:
        return min(sizes, key=MEMORY_SIZES.__getitem__).lower().replace(" ", "-")
    raise UserError(f"--gpu {text}: unknown GPU; {format_choices(text.lower(), names)}")


def describe_assumed_size(text: str) -> str | None:
    """Return a note on the memory size assumed for a GPU name without one (a100), or None if the name has one."""
    sizes = [name.lower().replace(" ", "-") for name in MEMORY_SIZES if name.split()[0].lower() == text.lower()]
    if not sizes:
        return None
    assumed = resolve_gpu_name(text)
    others = " or ".join(f"--gpu {name}" for name in sizes if name != assumed)
    return f"--gpu {text}: assuming the smallest size, {assumed}; use {others} for another"


def get_gpu_spec(text: str) -> GpuSpec:
    """Return the specifications of a GPU by a name written by a user. Raises UserError as `resolve_gpu_name` does."""
    wanted = resolve_gpu_name(text)
    for name in (*MEMORY_SIZES, *GPUS):
        if _normalize_name(name) == _normalize_name(wanted):
            gpu = GPUS[name if name in GPUS else name.split()[0]]
            return replace(gpu, gib=MEMORY_SIZES.get(name, gpu.gib))
    raise AssertionError(f"{wanted} is a known name without specifications")


def _normalize_name(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())

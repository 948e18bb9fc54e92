"""What this machine has to compute on, found without importing torch."""

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


def count_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


DEV = Path("/dev")
PROCESSES_PER_CORE = 4
"""Several processes may share a core, to try out what runs on several GPUs elsewhere. More would only wait for each
other, at about a gigabyte of memory each."""


@dataclass(frozen=True)
class Machine:
    """What there is to compute on."""

    gpus: int
    cores: int
    memory: int | None = None
    """Bytes that its processes may use together; None if that is not known."""

    @staticmethod
    def here() -> "Machine":
        """This machine, as far as this process may use it."""
        return Machine(count_gpus(), count_cores(), find_memory())


def find_memory() -> int | None:
    """Bytes of memory and swap of this machine, or what this process's control group may use of them."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        total = sum(1024 * int(lines[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text(encoding="ascii")))
        except (OSError, ValueError):  # none there, or "max"
            continue
    return total


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use; 0 where torch was built without CUDA."""
    if not _torch_has_cuda():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = _installed_gpus()
    if visible is None or there == 0:
        return there
    # As CUDA does: entries count up to the first that is not valid, so -1 hides all that follow.
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry == "-1" or (entry.isdigit() and int(entry) >= there):
            break
        count += 1
    return count


def _torch_has_cuda() -> bool:
    """`torch.version.cuda`, read from the file instead of imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True  # an unusual build: let torch itself say no
    found = re.search(r"^cuda\b[^=]*=\s*(.+)$", text, re.MULTILINE)
    return found is None or found.group(1).strip() != "None"


def _installed_gpus() -> int:
    devices = [path for path in DEV.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if devices:
        return len(devices)
    tool = shutil.which("nvidia-smi")  # where GPUs are not files: Windows' Linux
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())

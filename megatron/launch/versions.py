"""`./deepy.py --version`: what is installed, and on what it would run. Without importing any of it."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from megatron.distributed.hardware import LocalHardware
from megatron.utils.atomic_io import get_farfield_version

PACKAGES = ("torch", "triton", "deepspeed", "megatron-core", "transformers", "lm-eval")
"""Those that decide what is computed, and that reports of a problem should name."""


def list_versions() -> dict[str, str]:
    """Names and versions, ours first; the device last."""
    versions = {"farfield": get_farfield_version(), "python": platform.python_version()}
    return versions | {name: _find_version(name) for name in PACKAGES} | {"device": _describe_device()}


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _describe_device() -> str:
    """What `device: auto` would take, with the GPU's name where its driver tells."""
    machine = LocalHardware.detect()
    if not machine.num_gpus:
        return f"cpu ({machine.num_cores} cores)"
    return f"cuda ({machine.num_gpus} × {_read_gpu_names()})"


def _read_gpu_names() -> str:
    """The first GPU's name."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "GPU"
    try:
        completed = [tool, "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(completed, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "GPU"
    return names[0].strip() if names else "GPU"

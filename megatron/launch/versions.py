"""`./deepy.py --version`: what is installed, and on what it would run. Without importing any of it."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from megatron.distributed.devices import Machine
from megatron.files import farfield_version

PACKAGES = ("torch", "triton", "deepspeed", "megatron-core", "transformers", "lm-eval")
"""Those that decide what is computed, and that reports of a problem should name."""


def versions() -> dict[str, str]:
    """Names and versions, ours first; the device last."""
    found = {"farfield": farfield_version(), "python": platform.python_version()}
    return found | {name: _installed(name) for name in PACKAGES} | {"device": _device()}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device() -> str:
    """What `device: auto` would take, with the GPU's name where its driver tells."""
    machine = Machine.here()
    if not machine.gpus:
        return f"cpu ({machine.cores} cores)"
    return f"cuda ({machine.gpus} × {_gpu_name()})"


def _gpu_name() -> str:
    """The first GPU's name."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "GPU"
    try:
        asked = [tool, "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "GPU"
    return names[0].strip() if names else "GPU"

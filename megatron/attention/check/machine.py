"""Conditions of a check's result: the card, and the software that runs on it."""

import hashlib
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron.utils.project import PACKAGES_FOLDER

SOURCES = ("kernels", "megatron/attention", "megatron/position")
"""Folders with the source files that determine the results of backends."""
SUFFIXES = (".py", ".h")
"""Suffixes of these files: Python, and the headers of CUDA kernels."""
KERNEL_VARIABLE = "FARFIELD_CUDA_MIXER"
"""Environment variable that chooses between kernels (`kernels/cdape_attention/mixer.py`)."""
DRIVER_VERSION = Path("/sys/module/nvidia/version")


def describe_card(device: torch.device) -> dict[str, Any]:
    """Describe the card of a device, in JSON types."""
    if device.type != "cuda":
        return {"name": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "multi_processors": properties.multi_processor_count,
    }


def describe_software() -> dict[str, Any]:
    """Describe the driver, the versions, the sources of the attention code and their switch, in JSON types."""
    try:
        driver = DRIVER_VERSION.read_text(encoding="utf-8").strip()
    except OSError:
        driver = None
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "sources": hash_attention_sources(),
        "cuda_mixer": os.environ.get(KERNEL_VARIABLE),
    }


@cache
def hash_attention_sources() -> str:
    """Return a hash of all files that determine the results of backends."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted(path for path in (PACKAGES_FOLDER / folder).rglob("*") if path.suffix in SUFFIXES):
            digest.update(str(path.relative_to(PACKAGES_FOLDER)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]

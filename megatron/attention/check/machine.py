"""What a check's result is true of: the card, and the software that computes on it."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
SOURCES = ("kernels", "megatron/attention", "megatron/position")
"""Whose files decide what backends compute."""
DRIVER_VERSION = Path("/sys/module/nvidia/version")


def describe_card(device: torch.device) -> dict[str, Any]:
    """The card of a device, in JSON's types."""
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
    """Driver, versions and the sources of what computes attention, in JSON's types."""
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
    }


@cache
def hash_attention_sources() -> str:
    """Of all Python files that decide what backends compute."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]

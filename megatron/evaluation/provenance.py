"""What records say beside their values: of which model, when, where and with what something was measured."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.utils.atomic_io import get_farfield_version

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel

# torch is imported where it is used: a mistake in what was asked for is told at once.


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """What records say of a model."""
    import torch

    from megatron.evaluation.names import format_method_name

    config, model = loaded.config, loaded.model
    name = format_method_name(config.position, loaded.position.attention_window)
    parameter = next(model.parameters())
    device = parameter.device
    return {
        "method": name,
        "train_length": config.model.seq_length,
        "seed": config.training.seed,
        "position": name,
        "max_length": model.max_length,
        "parameters": model.num_parameters(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def start_stopwatch() -> Callable[[], dict[str, Any]]:
    """Begin a measurement. What is returned tells, when it has ended, the fields of records on its time."""
    begun = time.perf_counter()

    def taken() -> dict[str, Any]:
        now = datetime.now(UTC)
        return {"seconds": round(time.perf_counter() - begun, 3), "date": now.isoformat(timespec="seconds")}

    return taken


def describe_machine() -> str:
    """Operating system, processor and threads."""
    import torch

    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass  # not Linux
    return f"{platform.system()} {platform.machine()}, {processor}, {torch.get_num_threads()} threads"


def list_software_versions() -> str:
    """Versions."""
    import torch

    python = ".".join(map(str, sys.version_info[:3]))
    packages = f"torch {torch.__version__}, megatron-core {version('megatron-core')}"
    return f"farfield {get_farfield_version()}, Python {python}, {packages}"

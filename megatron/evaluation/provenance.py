"""Where, when and with what something was measured, as records say it."""

import platform
import sys
import time
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def stopwatch() -> Callable[[], dict[str, Any]]:
    """Begin a measurement. What is returned tells, when it has ended, the fields of records on its time."""
    begun = time.perf_counter()

    def taken() -> dict[str, Any]:
        now = datetime.now(UTC)
        return {"seconds": round(time.perf_counter() - begun, 3), "date": now.isoformat(timespec="seconds")}

    return taken


def machine() -> str:
    """Operating system, processor and threads."""
    import torch

    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass  # not Linux
    return f"{platform.system()} {platform.machine()}, {processor}, {torch.get_num_threads()} threads"


def software() -> str:
    """Versions."""
    import torch

    project = Path(__file__).parents[2] / "pyproject.toml"
    ours = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"] if project.is_file() else "?"
    python = ".".join(map(str, sys.version_info[:3]))
    return f"farfield {ours}, Python {python}, torch {torch.__version__}, megatron-core {version('megatron-core')}"

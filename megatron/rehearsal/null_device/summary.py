"""Summary of a process on the null device, written at exit: peak memory, counters, kernels and stub calls.

The file is `rank-r.summary.json` in the ledger's folder.
"""

import atexit
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.rehearsal.null_device.library import read_counters, read_kernels, read_stub_calls


def get_summary_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.summary.json"


def write_summary_at_exit(folder: str) -> Callable[[Any], None]:
    """Return the patch of torch that writes this process's summary at exit."""

    def change(torch: Any) -> None:
        process = os.getpid()

        def write() -> None:
            if os.getpid() == process and torch.cuda.is_initialized():
                write_summary(folder, torch)

        atexit.register(write)

    return change


def write_summary(folder: str | Path, torch: Any) -> None:
    """Write the summary of this process so far."""
    summary = {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "counters": asdict(read_counters()),
        "kernels": [asdict(kernel) for kernel in read_kernels()],
        "stub_calls": read_stub_calls(),
    }
    path = get_summary_path(folder, int(os.environ.get("RANK", "0")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

"""Where, when and with what a record of docs/results was measured, told alike by every tool.

Versions are asked of the installed packages, not of the packages themselves: a machine that lacks most of them can be
stamped too, and nothing heavy is imported.
"""

import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "numpy", "deepspeed", "megatron-core")


def stamp(script: str, device: str) -> dict[str, Any]:
    """The head of a record.

    Args:
        script: the tool's file; its arguments are this process's.
        device: "cpu", or "cuda" for the current GPU.

    Returns:
        date, command, commit (with -dirty where files differ from it; None outside a checkout), machine and versions
        (of Python, of the packages that are installed and, on a GPU, of CUDA).
    """
    import torch  # every tool has it loaded by now; --help and errors come without it

    name, cuda = platform.machine(), {}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, cuda = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)", {"cuda": torch.version.cuda}
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", Path(script).resolve().relative_to(ROOT).as_posix(), *sys.argv[1:]]),
        "commit": commit(),
        "machine": f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), **versions(PACKAGES), **cuda},
    }


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Short name of the commit that is checked out."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, capture_output=True, text=True
        )
    except OSError:  # no git here
        return None
    return done.stdout.strip() or None

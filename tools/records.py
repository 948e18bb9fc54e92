"""Records of docs/results: the JSON file, the page beside it, and where, when and with what it was measured.

Versions are asked of the installed packages, not of the packages themselves: a machine that lacks most of them can be
described too, and nothing heavy is imported.
"""

import json
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


def collect_provenance(script: str, device: str) -> dict[str, Any]:
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
        "commit": describe_commit(),
        "machine": f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), **list_package_versions(PACKAGES), **cuda},
    }


def write_record(path: Path, record: dict[str, Any], page: str | None = None) -> None:
    """Write a record as JSON and, if there is one, its page beside it, as .md."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if page is not None:
        path.with_suffix(".md").write_text(page, encoding="utf-8")


def format_provenance(provenance: dict[str, Any]) -> str:
    """The last line of a page."""
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    return f"{format_origin(provenance)} on {provenance['machine']}; {versions}."


def format_origin(provenance: dict[str, Any]) -> str:
    """When and by what a record was made, for one that is the same on every machine."""
    return f"Recorded {provenance['date']} by `{provenance['command']}` at {provenance['commit']}"


def list_package_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe_commit() -> str | None:
    """Short name of the commit that is checked out."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, capture_output=True, text=True
        )
    except OSError:  # no git here
        return None
    return done.stdout.strip() or None

"""Records in docs/results: the JSON file, the page next to it, and their provenance.

Versions come from the metadata of installed packages. A machine without most packages can therefore be described too,
and nothing heavy is imported.
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
    """Return the header of a record.

    Args:
        script: path of the tool; its arguments are those of this process.
        device: "cpu", or "cuda" for the current GPU.

    Returns:
        date, command, commit (with -dirty if files differ from it; None outside a checkout), machine and versions (of
        Python, of installed packages and, on a GPU, of CUDA).
    """
    import torch  # every tool has loaded it by now; --help and errors work without it

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
    """Write a record as JSON and, if given, its page next to it as .md. A killed process leaves the earlier ones."""
    from megatron.utils.atomic_io import write_text_atomically  # as torch above

    write_text_atomically(path, json.dumps(record, indent=1) + "\n")
    if page is not None:
        write_text_atomically(path.with_suffix(".md"), page)


def format_provenance(provenance: dict[str, Any]) -> str:
    """Format the last line of a page."""
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    return f"{format_origin(provenance)} on {provenance['machine']}; {versions}."


def format_origin(provenance: dict[str, Any]) -> str:
    """Format the date and command of a record whose contents do not depend on the machine."""
    return f"Recorded {provenance['date']} by `{provenance['command']}` at {provenance['commit']}"


def list_package_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe_commit() -> str | None:
    """Return the short hash of the checked-out commit, or None."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, capture_output=True, text=True
        )
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None

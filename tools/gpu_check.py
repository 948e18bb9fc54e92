#!/usr/bin/env python3
"""Everything that needs a GPU, in one command and one JSON file, in under 8 minutes: tests first, then benchmarks.

    make gpu-check            or    python tools/gpu_check.py --json docs/results/gpu_check.json

Every part is a process of its own with a time limit, so one that hangs or fails leaves the others their turn; the file
is written after each. `--rehearse` runs the same parts on a CPU, tiny, with Triton's interpreter.

Needs, beside Python 3.11 or later: torch with CUDA, triton, pytest, hypothesis, megatron-core, pydantic.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "torch": "torch", "triton": "triton", "pytest": "pytest", "hypothesis": "hypothesis",
    "megatron.core": "megatron-core", "pydantic": "pydantic",
}  # fmt: skip
BENCH, STEP = "tools/bench_kernels.py", "tools/bench_step.py"
LONG = ["--lengths", "65536", "--batch", "1", "--peers", "triton", "--rounds", "3"]
# name, seconds it may take, command; {json} is where its records go
PARTS: list[tuple[str, int, list[str]]] = [
    ("tests", 90, ["-m", "pytest", "tests/kernels", "-q", "-x", "-p", "no:cacheprovider", "--junitxml", "{json}"]),
    (
        "biased_attention",
        80,
        [BENCH, "--op", "biased_attention", "--lengths", "512", "2048", "8192", "--json", "{json}"],
    ),
    ("cdape", 90, [BENCH, "--op", "cdape", "--lengths", "512", "2048", "8192", "--json", "{json}"]),
    ("cdape_long", 40, [BENCH, "--op", "cdape", *LONG, "--json", "{json}"]),
    ("cdape_k1", 25, [BENCH, "--op", "cdape", "--kernel-size", "1", "--lengths", "2048", "--json", "{json}"]),
    ("steps", 120, [STEP, "--shapes", "125M:512", "125M:2048", "350M:512", "--json", "{json}"]),
    ("step_long", 40, [STEP, "--shapes", "125M:65536", "--tokens", "65536", "--methods", "cdape", "--rounds", "2",
                       "--json", "{json}"]),
]  # fmt: skip
TINY = ["--device", "cpu", "--lengths", "24", "--batch", "1", "--heads", "2", "--dim", "16", "--rounds", "2"]
REHEARSAL: list[tuple[str, int, list[str]]] = [
    ("tests", 900, ["-m", "pytest", "tests/kernels", "-q", "-x", "-p", "no:cacheprovider", "-k", "opcheck or refused",
                    "--junitxml", "{json}"]),
    ("biased_attention", 200, [BENCH, "--op", "biased_attention", *TINY, "--json", "{json}"]),
    ("cdape", 200, [BENCH, "--op", "cdape", "--width", "4", *TINY, "--json", "{json}"]),
    ("cdape_k1", 200, [BENCH, "--op", "cdape", "--kernel-size", "1", "--width", "4", *TINY, "--json", "{json}"]),
    ("steps", 300, [STEP, "--device", "cpu", "--shapes", "tiny:32", "--tokens", "64", "--rounds", "2", "--dtype",
                    "fp32", "--json", "{json}"]),
]  # fmt: skip


def missing_packages() -> list[str]:
    """Names, for pip, of packages that are not here."""
    missing = []
    for module, package in PACKAGES.items():
        try:
            found = find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            missing.append(package)
    return missing


def run(name: str, seconds: int, command: list[str], folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run one part; its result, or how it failed."""
    output = folder / f"{name}.{'xml' if 'pytest' in command else 'json'}"
    command = [sys.executable, *(part.replace("{json}", str(output)) for part in command)]
    begun = time.perf_counter()
    result: dict[str, Any] = {"command": " ".join(["python", *command[1:]]).replace(str(output), output.name)}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=seconds,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        result["exit"], text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        result["exit"] = f"stopped after {seconds} s"
        text = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
    result["seconds"] = round(time.perf_counter() - begun, 1)
    if output.is_file():
        result |= _tests(output) if output.suffix == ".xml" else json.loads(output.read_text(encoding="utf-8"))
    if result["exit"] != 0 or not output.is_file():
        result["output"] = text[-4000:]
    return result


def _tests(path: Path) -> dict[str, Any]:
    """Counts and failures of a JUnit file."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    return {
        "counts": {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")},
        "failed": failed,
    }


def machine() -> dict[str, Any]:
    """Device and versions."""
    import torch
    import triton

    here: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        here |= {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1),
                 "cuda": torch.version.cuda}  # fmt: skip
    return here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "docs/results/gpu_check.json")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny, in Triton's interpreter")
    parser.add_argument("--parts", nargs="+", help="only these")
    arguments = parser.parse_args()
    if missing := missing_packages():
        sys.exit(f"error: this needs {', '.join(missing)}: pip install {' '.join(missing)}")
    import torch

    if not torch.cuda.is_available() and not arguments.rehearse:
        print("error: no CUDA device is here; --rehearse runs the same parts on a CPU", file=sys.stderr)
        sys.exit(2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if arguments.rehearse:
        environment["TRITON_INTERPRET"] = "1"
    result: dict[str, Any] = {"date": date.today().isoformat(), "rehearsal": arguments.rehearse, "machine": machine()}
    result["parts"] = {}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, seconds, command in REHEARSAL if arguments.rehearse else PARTS:
            if arguments.parts and name not in arguments.parts:
                continue
            part = result["parts"][name] = run(name, seconds, command, Path(folder), environment)
            print(f"{name:<18} exit {part['exit']!s:<6} {part['seconds']:>7.1f} s", flush=True)
            result["seconds"] = round(time.perf_counter() - begun, 1)
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {arguments.json}")
    sys.exit(0 if all(part["exit"] == 0 for part in result["parts"].values()) else 1)


if __name__ == "__main__":
    main()

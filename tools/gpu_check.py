#!/usr/bin/env python3
"""Everything that needs a GPU, in one command and one JSON file, in under 8 minutes: tests first, then benchmarks.

    make gpu-check            or    python tools/gpu_check.py --json docs/results/gpu_check.json

Every part is a process of its own with a time limit, so one that hangs or fails leaves the others their turn; the file
is written after each. `--rehearse` runs the same parts on a CPU, tiny, with Triton's interpreter.

Needs, beside Python 3.11 or later, torch with CUDA and triton. A part that needs more (pytest and hypothesis for tests,
megatron-core and pydantic for training steps) says so where it is missing and does not run; the exit code is then 1.
With pytest-xdist the tests run eight at a time.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.arguments import Parser, output_file  # noqa: E402
from tools.stamp import stamp  # noqa: E402

MODEL = ("megatron.core", "pydantic")
"""What building a model needs."""
TOTAL = 470
"""Seconds that all parts together may take on a GPU; a part gets its own limit or what is left."""


@dataclass(frozen=True)
class Part:
    """A process of its own."""

    name: str
    seconds: int
    """It may take this long."""
    command: tuple[str, ...]
    """What Python gets; {output} is where its records (JSON) or its test results (JUnit) go."""
    needs: tuple[str, ...] = ()
    """Modules beside torch and triton."""


PACKAGES = {"megatron.core": "megatron-core"}
"""What pip calls a module that has another name."""


def missing(modules: tuple[str, ...]) -> list[str]:
    """Names, for pip, of modules that are not here."""
    found = []
    for module in modules:
        try:
            here = find_spec(module) is not None
        except ModuleNotFoundError:
            here = False
        if not here:
            found.append(PACKAGES.get(module, module))
    return found


def bench(name: str, seconds: int, *options: str) -> Part:
    """A part of the kernels' benchmark."""
    return Part(name, seconds, ("tools/bench_kernels.py", *options, "--json", "{output}"))


def steps(name: str, seconds: int, *options: str) -> Part:
    """A part of the training steps' benchmark."""
    command = ("tools/bench_step.py", *options, "--json", "{output}")
    return Part(name, seconds, command, MODEL)


def tests(seconds: int, *options: str) -> Part:
    """The kernels' tests, those of the backend in whole models only where these can be built."""
    if missing(MODEL):
        options = (*options, "--ignore", "tests/kernels/test_triton_backend.py")
    if not missing(("xdist",)):
        options = (*options, "-n", "8")  # kernels are compiled by each test that is the first to need them
    command = ("-m", "pytest", "tests/kernels", "-q", "--maxfail", "20", "-p", "no:cacheprovider", *options)
    return Part("tests", seconds, (*command, "--junitxml", "{output}"), ("pytest", "hypothesis"))


CDAPE = ("--op", "cdape")
LONG = ("--lengths", "65536", "--batch", "1", "--peers", "triton", "--rounds", "3")
PARTS = [
    tests(110),
    bench("biased_attention", 90, "--op", "biased_attention", "--lengths", "512", "2048", "8192"),
    bench("cdape", 80, *CDAPE, "--lengths", "512", "2048", "8192"),
    bench("cdape_long", 40, *CDAPE, *LONG),
    bench("cdape_k1", 20, *CDAPE, "--kernel-size", "1", "--lengths", "2048"),
    steps("steps", 100, "--shapes", "125M:512", "125M:2048", "350M:512"),
    steps("step_long", 30, "--shapes", "125M:65536", "--tokens", "65536", "--methods", "cdape", "--rounds", "2"),
]
TINY = ("--device", "cpu", "--lengths", "24", "--batch", "1", "--heads", "2", "--dim", "16", "--rounds", "2")
TINY_STEP = ("--device", "cpu", "--shapes", "tiny:32", "--tokens", "64", "--rounds", "2", "--dtype", "fp32")
REHEARSAL = [
    tests(900, "-k", "opcheck or refused"),
    bench("biased_attention", 200, "--op", "biased_attention", *TINY),
    bench("cdape", 200, *CDAPE, "--width", "4", *TINY),
    bench("cdape_k1", 200, *CDAPE, "--kernel-size", "1", "--width", "4", *TINY),
    steps("steps", 300, *TINY_STEP),
]


def run(part: Part, folder: Path, environment: dict[str, str], left: float = float("inf")) -> dict[str, Any]:
    """Run one part for at most `left` seconds; its records or counts, or why it failed."""
    if lacking := missing(part.needs):
        return {"exit": f"not run: needs {', '.join(lacking)}", "seconds": 0.0}
    seconds = min(part.seconds, left)
    if seconds <= 0:
        return {"exit": "not run: no time was left", "seconds": 0.0}
    output = folder / f"{part.name}.{'xml' if 'pytest' in part.command else 'json'}"
    command = [word.replace("{output}", str(output)) for word in part.command]
    result: dict[str, Any] = {"command": " ".join(["python", *part.command]).replace("{output}", output.name)}
    begun = time.perf_counter()
    result["exit"], text = _finish([sys.executable, *command], environment, seconds)
    result["seconds"] = round(time.perf_counter() - begun, 1)
    if output.is_file():
        result |= _tests(output) if output.suffix == ".xml" else _records(output)
    if result["exit"] != 0 or not output.is_file():
        result["output"] = text[-4000:]
    return result


def _finish(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int | str, str]:
    """Exit code (or that it was stopped) and output. A part's own processes end with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        written.seek(0)
        return code, written.read()


def _records(path: Path) -> dict[str, Any]:
    """The records of a benchmark, without its stamp: it is this one's, and its command names a file that is gone."""
    try:
        return {"records": json.loads(path.read_text(encoding="utf-8"))["records"]}
    except json.JSONDecodeError:  # stopped while it wrote
        return {"records": []}


def _tests(path: Path) -> dict[str, Any]:
    """Counts and failures of a JUnit file."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    return {
        "counts": {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")},
        "failed": failed,
    }


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=output_file, default=ROOT / "docs/results/gpu_check.json")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny, in Triton's interpreter")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    arguments = parser.parse_args()
    if lacking := missing(("torch", "triton")):
        parser.error(f"this needs {', '.join(lacking)}: pip install {' '.join(lacking)}")
    import torch

    if not torch.cuda.is_available() and not arguments.rehearse:
        parser.error("no CUDA device is here; --rehearse runs the same parts on a CPU")
    parts = [
        part
        for part in (REHEARSAL if arguments.rehearse else PARTS)
        if not arguments.parts or part.name in arguments.parts
    ]
    if absent := set(arguments.parts or ()) - {part.name for part in parts}:
        parser.error(f"a rehearsal has no part {', '.join(sorted(absent))}")
    sys.exit(check(parts, arguments.json, rehearsal=arguments.rehearse))


def check(parts: list[Part], path: Path, *, rehearsal: bool) -> int:
    """Run parts one after the other and write the file after each; 0 if every one of them exits with 0, else 1."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **({"TRITON_INTERPRET": "1"} if rehearsal else {})}
    result: dict[str, Any] = {**stamp(__file__, "cpu" if rehearsal else "cuda"), "rehearsal": rehearsal, "parts": {}}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            left = float("inf") if rehearsal else TOTAL - (time.perf_counter() - begun)
            done = result["parts"][part.name] = run(part, Path(folder), environment, left)
            print(f"{part.name:<18} exit {done['exit']!s:<6} {done['seconds']:>7.1f} s", flush=True)
            result["seconds"] = round(time.perf_counter() - begun, 1)
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return 0 if all(done["exit"] == 0 for done in result["parts"].values()) else 1


if __name__ == "__main__":
    main()

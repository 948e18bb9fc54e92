#!/usr/bin/env python3
"""Run every check that needs a GPU in one command under 8 minutes, and write one JSON file and one page.

    make gpu-check            or    python tools/gpu/check.py --json docs/results/gpu_check.json

Every part (tools/gpu/parts.py) is a separate process with a time limit. If one hangs or fails, the others still run; a
part that exceeds its limit is interrupted and keeps its results so far. The JSON file and the page of goals next to it
(tools/gpu/goals.py; .md instead of .json) are written after each part. `--rehearse` runs the same parts at small sizes
on a CPU, with Triton's interpreter.

Requires Python 3.11 or later, torch with CUDA, and triton. A part with further requirements is skipped with a message
if they are missing; docs/gpu.md explains how to copy them to the machine. The exit code is 0 if all parts finish
without failures, else 1.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, parse_record_path, print_interrupts_in_one_line  # noqa: E402
from tools.gpu.goals import check_goals, render_page  # noqa: E402
from tools.gpu.parts import CheckPart, list_missing, list_parts, list_rehearsal_parts  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

RECORD = ROOT / "docs/results/gpu_check.json"
REHEARSAL_RECORD = Path(tempfile.gettempdir()) / "farfield_gpu_rehearsal.json"
"""Default record of a rehearsal, which never overwrites a real record."""
MAX_TOTAL_SECONDS = 470
"""Time limit of all parts together on a GPU, in seconds. Each part gets its own limit or the remaining time."""
GRACE_SECONDS = 20
"""Time within the limit reserved for writing results after the interrupt; pytest-xdist gives its workers ten
seconds."""


def run_part(
    part: CheckPart,
    folder: Path,
    environment: dict[str, str],
    left: float = float("inf"),
    results: Path | None = None,
) -> dict[str, Any]:
    """Run one part, and return its records or counts, or the reason for its failure.

    Args:
        folder: folder of the part's records.
        left: remaining time in seconds.
        results: folder for additional files of the part; `folder` if None.
    """
    if lacking := list_missing(part.needs):
        return {"exit": f"not run: needs {', '.join(lacking)}", "seconds": 0.0}
    seconds = min(part.seconds, left - GRACE_SECONDS)
    if seconds <= 0:
        return {"exit": "not run: no time left", "seconds": 0.0}
    output = folder / f"{part.name}.{'xml' if 'pytest' in part.command else 'json'}"
    values = {"{output}": str(output), "{results}": str(results or folder), "{seconds}": f"{seconds:.0f}"}
    command = [_fill_in(word, values) for word in part.command]
    named = {**values, "{output}": output.name, "{results}": "."}
    result: dict[str, Any] = {"command": " ".join(["python", *(_fill_in(word, named) for word in part.command)])}
    start_time = time.perf_counter()
    result["exit"], text = _run_command([sys.executable, *command], environment, seconds)
    result["seconds"] = round(time.perf_counter() - start_time, 1)
    if output.is_file():
        result |= _read_junit(output) if output.suffix == ".xml" else _read_records(output)
    if result["exit"] != 0 or not output.is_file():
        result["output"] = text[-4000:]
    return result


def _fill_in(word: str, values: dict[str, str]) -> str:
    """Replace the placeholders of a part's command."""
    for placeholder, value in values.items():
        word = word.replace(placeholder, value)
    return word


def _run_command(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int | str, str]:
    """Return the exit code (or a note on the interruption) and the output. The part's child processes end with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        with _defer_interrupts() as came:  # an interrupt would leave the new process running
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            if came:
                raise KeyboardInterrupt
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"cut after {seconds:.0f} s"
            process.send_signal(signal.SIGINT)  # benchmarks and pytest write their results so far
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                code += ", killed"
        finally:
            with suppress(ProcessLookupError):  # the processes have all ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written.seek(0)
        return code, written.read()


@contextmanager
def _defer_interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C in a list instead of raising KeyboardInterrupt, inside the context."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _read_records(path: Path) -> dict[str, Any]:
    """Read a benchmark's records without their provenance, whose command names a temporary file."""
    try:
        return {"records": json.loads(path.read_text(encoding="utf-8"))["records"]}
    except json.JSONDecodeError:  # killed while writing
        return {"records": []}


def _read_junit(path: Path) -> dict[str, Any]:
    """Read the counts and failures of a JUnit file."""
    try:
        suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    except ElementTree.ParseError:  # killed while writing
        return {}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {
        "counts": {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")},
        "failed": failed,
    }


def main() -> None:
    names = [part.name for part in list_parts()]
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json",
        type=parse_record_path,
        help="output file, with the page next to it; by default docs/results/gpu_check.json",
    )
    parser.add_argument("--rehearse", action="store_true", help="run small versions on a CPU with Triton's interpreter")
    parser.add_argument("--parts", nargs="+", choices=names, help="run only these parts")
    arguments = parser.parse_args()
    if lacking := list_missing(("torch", "triton")):
        parser.error(f"missing packages: {', '.join(lacking)}; pip install {' '.join(lacking)}")
    path = arguments.json or (REHEARSAL_RECORD if arguments.rehearse else RECORD)
    import torch

    if not torch.cuda.is_available() and not arguments.rehearse:
        parser.error("no CUDA device found; --rehearse runs the same parts on a CPU")
    chosen = list_rehearsal_parts() if arguments.rehearse else list_parts()
    chosen = [part for part in chosen if not arguments.parts or part.name in arguments.parts]
    sys.exit(report_check(run_parts(chosen, path, rehearsal=arguments.rehearse), path))


def run_parts(
    chosen: list[CheckPart],
    path: Path,
    *,
    rehearsal: bool,
    script: str = __file__,
    max_seconds: float = MAX_TOTAL_SECONDS,
    render: Callable[[dict[str, Any]], str] = render_page,
    header: dict[str, Any] | None = None,
    kept: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run parts in order, write the file and the page after each, and return the result.

    Args:
        script: path of the tool.
        max_seconds: time limit of all parts together on a GPU.
        render: function that renders the page.
        header: further fields of the file.
        kept: results of an earlier record for parts that are not run.
    """
    result: dict[str, Any] = {
        **collect_provenance(script, "cpu" if rehearsal else "cuda"),
        "rehearsal": rehearsal,
        **(header or {}),
        "parts": dict(kept or {}),
    }
    start_time = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen:
            left = float("inf") if rehearsal else max_seconds - (time.perf_counter() - start_time)
            done = result["parts"][part.name] = run_part(
                part, Path(folder), build_environment(rehearsal=rehearsal), left, path.parent.absolute()
            )
            print(f"{part.name:<15} {done['seconds']:>6.1f} s   {_format_exit(done['exit'])}", flush=True)
            result["seconds"] = round(time.perf_counter() - start_time, 1)
            write_record(path, result, render(result))
    return result


def report_check(result: dict[str, Any], path: Path) -> int:
    """Print the goals that were met; return 0 if every part exited with 0, else 1."""
    for goal, measured, wanted, met in check_goals(result):
        print(f"{goal}: {measured}; goal {wanted}: {met or 'for information'}")
    print(f"written: {path} and {path.with_suffix('.md')}")
    return get_exit_code(result)


def get_exit_code(result: dict[str, Any]) -> int:
    """Return 0 if every part exited with 0, else 1."""
    return 0 if all(done["exit"] == 0 for done in result["parts"].values()) else 1


def _format_exit(code: int | str) -> str:
    return code if isinstance(code, str) else "done" if code == 0 else f"exit code {code}"


def build_environment(*, rehearsal: bool) -> dict[str, str]:
    """Build a part's environment. It keeps PYTHONPATH, because packages may have been copied next to the project."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **({"TRITON_INTERPRET": "1"} if rehearsal else {})}


if __name__ == "__main__":
    print_interrupts_in_one_line()
    main()

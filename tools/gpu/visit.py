#!/usr/bin/env python3
"""Run the most important measurements within fifteen minutes on a GPU, in order, with a record after each part.

    python tools/gpu/visit.py --json $OUT/gpu_visit.json            or, on a CPU,    --rehearse

The parts are those of `parts.list_visit_parts`, each a process with a time limit (`check.py` runs them). The page
beside the JSON file compares every time with the last record's, if both contain the same measurement on the same GPU.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, int_at_least, parse_record_path, print_interrupts_in_one_line  # noqa: E402
from tools.gpu.check import get_exit_code, run_parts  # noqa: E402
from tools.gpu.parts import list_missing, list_visit_parts, list_visit_rehearsal_parts  # noqa: E402
from tools.records import format_provenance  # noqa: E402

RECORD = ROOT / "docs/results/gpu_visit.json"
REHEARSAL_RECORD = Path(tempfile.gettempdir()) / "farfield_gpu_visit_rehearsal.json"
VISIT_SECONDS = 780
"""Time limit of all parts in seconds: fifteen minutes without starting a machine and copying files."""
KEY = ("op", "peer", "model", "dtype", "B", "H", "T", "d", "width", "kernel_size")
"""Fields that identify a measurement within a part."""

Measurement = tuple[str, tuple[Any, ...]]


def list_times(result: dict[str, Any]) -> dict[Measurement, float]:
    """Return the median milliseconds of each measurement, by part and key."""
    found: dict[Measurement, float] = {}
    for part, done in result.get("parts", {}).items():
        for record in done.get("records", ()):
            times = record.get("ms")
            median = times["both"][1] if isinstance(times, dict) and "both" in times else record.get("wall_ms")
            if median is not None:
                found[part, tuple(record.get(name) for name in KEY)] = median
    return found


def list_memory_lines(result: dict[str, Any]) -> list[str]:
    """Return a table of the peak memory of whole trainings beside the estimates of `./deepy.py plan`."""
    rows = [
        f"| {record['case']} | {record['model']} | {record['B']} × {record['T']} | {record['eager_peak_gb']:.2f} | "
        f"{record['planned_gb']:.2f} | {record['eager_peak_gb'] / record['planned_gb']:.3f} |"
        for done in result["parts"].values()
        for record in done.get("records", ())
        if record.get("planned_gb")
    ]
    head = ["", "| training | model | tokens | peak, GB | plan, GB | ratio |", "|---|---|---|--:|--:|--:|"]
    return [*head, *rows] if rows else []


def render_visit(result: dict[str, Any], last: dict[str, Any] | None) -> str:
    """Render the page of a visit: its parts, its times beside those of the last record, and memory beside the plan."""
    lines = ["# A visit to a GPU", "", f"{format_provenance(result)}", ""]
    lines += ["| part | ended | seconds |", "|---|---|--:|"]
    for name, done in result["parts"].items():
        lines.append(f"| `{name}` | {'done' if done['exit'] == 0 else done['exit']} | {done['seconds']:.0f} |")
    is_comparable = last is not None and last.get("machine") == result.get("machine")
    before = list_times(last) if last is not None and is_comparable else {}
    lines += ["", "| part | measurement | ms | last record | ratio |", "|---|---|--:|--:|--:|"]
    for (part, key), median in list_times(result).items():
        named = [f"{name} {value}" for name, value in zip(KEY, key, strict=True) if value is not None]
        earlier = before.get((part, key))
        ratio = "" if earlier is None else f"{median / earlier:.3f}"
        lines.append(f"| `{part}` | {', '.join(named)} | {median:.3f} | {earlier or ''} | {ratio} |")
    lines += list_memory_lines(result)
    refusals = [
        f"- `{part}`, {record.get('peer')}: {record['refusal']}"
        for part, done in result["parts"].items()
        for record in done.get("records", ())
        if record.get("refusal")
    ]
    return "\n".join([*lines, "", *(["Not measured:", "", *refusals] if refusals else []), ""])


def main() -> None:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json",
        type=parse_record_path,
        help="output file, with the page next to it; by default docs/results/gpu_visit.json",
    )
    parser.add_argument("--rehearse", action="store_true", help="run small versions on a CPU with Triton's interpreter")
    parser.add_argument(
        "--seconds", type=int_at_least(1), default=VISIT_SECONDS, help=f"time limit of all parts ({VISIT_SECONDS})"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=[part.name for part in list_visit_parts()], help="run only these parts"
    )
    arguments = parser.parse_args()
    if lacking := list_missing(("torch", "triton")):
        parser.error(f"missing packages: {', '.join(lacking)}; pip install {' '.join(lacking)}")
    import torch

    if not torch.cuda.is_available() and not arguments.rehearse:
        parser.error("no CUDA device found; --rehearse runs the same parts on a CPU")
    path = arguments.json or (REHEARSAL_RECORD if arguments.rehearse else RECORD)
    last = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else None
    chosen = list_visit_rehearsal_parts() if arguments.rehearse else list_visit_parts()
    result = run_parts(
        [part for part in chosen if not arguments.parts or part.name in arguments.parts],
        path,
        rehearsal=arguments.rehearse,
        script=__file__,
        max_seconds=arguments.seconds,
        render=partial(render_visit, last=last),
    )
    print(f"written: {path} and {path.with_suffix('.md')}")
    sys.exit(get_exit_code(result))


if __name__ == "__main__":
    print_interrupts_in_one_line()
    main()

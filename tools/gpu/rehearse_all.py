#!/usr/bin/env python3
"""Rehearse every shipped cluster configuration with every model, and record the reports.

    python tools/gpu/rehearse_all.py                                   # rehearse missing combinations
    python tools/gpu/rehearse_all.py --overlays a100_8k --models 2-7B --gpus 64 --again

The tool runs `./deepy.py rehearse` for each pair of configs/cluster and configs/model. The number of 80 GB A100s is the
minimum that the planner finds (parallel.md). docs/results/rehearsals.json and .md are written after each pair. Like
`rehearse`, the tool needs the CUDA build of torch. Large models at long lengths take minutes each.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, comma_separated, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

from tools.docs.parallel_page import GPUS, METHOD, MODELS, OVERLAYS, list_estimates  # noqa: E402
from tools.records import collect_provenance, describe_commit, format_provenance, write_record  # noqa: E402

CARD = "a100-80gb"
GIB = 2**30


def find_num_gpus(model: str, overlay: str) -> int:
    """Return the fewest GPUs that the planner finds for a model with an overlay."""
    return next(gpus for gpus, estimate in list_estimates(model, overlay) if estimate.fits(GPUS["80 GB"]))


def rehearse_pair(model: str, overlay: str, method: str, gpus: int, ranks: str, extra: list[str]) -> dict[str, Any]:
    """Run one rehearsal; return its report and command, or `error` if there is no report."""
    command = ["deepy.py", "rehearse", model, method, overlay, *extra, "--gpus", str(gpus), "--gpu", CARD]
    command += ["--ranks", ranks, "--json"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    entry: dict[str, Any] = {"model": model, "overlay": overlay, "gpus": gpus, "command": f"./{' '.join(command)}"}
    entry["commit"] = describe_commit()
    try:
        report = json.loads(done.stdout)
    except ValueError:
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return entry | {"error": lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}"}
    for role in report["roles"]:  # not shown on the page
        role.pop("stub_calls", None)
        role["collectives"] = role.get("collectives", [])[:4]
    return entry | {"report": report}


def render_page(record: dict[str, Any]) -> str:
    """Render a table with one row per rehearsal, and the kernels."""
    lines = [
        "# Rehearsals of the shipped configurations",
        "",
        f"`./deepy.py rehearse MODEL {record['method']} OVERLAY --gpu {CARD}` for every overlay of configs/cluster and "
        "every model,",
        "on the minimum number of GPUs found by the planner. Written by `tools/gpu/rehearse_all.py`.",
        "The peak is that of PyTorch's allocator over the ranks that ran (allocated tensors, and reserved memory); "
        "the plan is the estimate for the stage with the peak.",
        "“No resume” means that the checkpoint did not fit in the memory of this machine (see “Findings”).",
        "CPU time is the sum over the processes, which compute nothing on the device; the machine did other work too.",
        "Nothing here was measured on a GPU.",
        "",
        "| model | overlay | GPUs | layout | ranks run | verdict | peak GiB | reserved | plan GiB | ranks agree | "
        "checkpoint | CPU s |",
        "|---|---|--:|---|--:|---|--:|--:|--:|---|--:|--:|",
    ]
    for entry in record["rehearsals"]:
        head = f"| {entry['model']} | `{entry['overlay']}` | {entry['gpus']} |"
        if "error" in entry:
            lines.append(f"{head} | | {entry['error']} | | | | | | |")
            continue
        report = entry["report"]
        sizes, roles = report["mesh"], [role for role in report["roles"] if "verdict" in role]
        layout = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
        worst = max(roles, key=lambda role: role["peak_allocated"])
        planned = "?" if worst["planned"] is None else f"{worst['planned'] / GIB:.2f}"
        checkpoint = "" if report["disk"] is None else f"{report['disk']['checkpoint'] / GIB:.1f} GiB"
        lines.append(
            f"{head} {layout} | {len(roles)} | {_describe_verdict(report)} | {worst['peak_allocated'] / GIB:.2f} | "
            f"{max(role['peak_reserved'] for role in roles) / GIB:.2f} | {planned} | "
            f"{'no' if report['mismatches'] else 'yes'} | "
            f"{checkpoint} | {sum(role['cpu_seconds'] for role in roles):.0f} |"
        )
    there = {(entry["model"], entry["overlay"]) for entry in record["rehearsals"]}
    if missing := [f"{model} `{overlay}`" for overlay in OVERLAYS for model in MODELS if (model, overlay) not in there]:
        lines += ["", f"Not rehearsed yet: {', '.join(missing)}."]
    problems = [
        f"* {entry['model']} `{entry['overlay']}`: {text}"
        for entry in record["rehearsals"]
        if "report" in entry
        for text in _list_problems(entry["report"])
    ]
    if problems:
        lines += ["", "## Findings", "", *problems]
    fallbacks = sorted({line for e in record["rehearsals"] if "report" in e for line in e["report"]["fallbacks"]})
    if fallbacks:
        lines += ["", "Fallbacks to PyTorch:", "", *(f"* {line}" for line in fallbacks)]
    commits = ", ".join(sorted({str(entry["commit"]) for entry in record["rehearsals"]}))
    return "\n".join([*lines, "", format_provenance(record["provenance"]) + f" Rehearsed at {commits}.", ""])


def _describe_verdict(report: dict[str, Any]) -> str:
    """Describe the verdict, or that training fits but this machine lacked memory for the resume."""
    errors = [error for role in report["roles"] for error in role.get("errors", ())]
    lacks_memory = all(error["action"] == "resume" and error["kind"] == "host memory" for error in errors)
    return "fits; no resume" if errors and lacks_memory else str(report["verdict"])


def _list_problems(report: dict[str, Any]) -> list[str]:
    found = [f"{mismatch['action']}: {mismatch['message']}" for mismatch in report["mismatches"]]
    for role in report["roles"]:
        for error in role.get("errors", ()):
            where = f" ({error['where'][0]})" if error["where"] else ""
            phase = f" in {error['phase']}" if error["phase"] else ""
            found.append(f"rank {role['rank']}, {error['action']}{phase}: {error['message']}{where}")
    return found


def main() -> int:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=comma_separated(MODELS), default=list(MODELS))
    parser.add_argument("--overlays", type=comma_separated(OVERLAYS), default=list(OVERLAYS))
    parser.add_argument("--method", default=METHOD, help="overlay of configs/position")
    parser.add_argument("--gpus", type=int_at_least(1), help="number of GPUs; by default the planner's")
    parser.add_argument("--ranks", default="roles", help="as for ./deepy.py rehearse")
    parser.add_argument("--again", action="store_true", help="repeat rehearsals that the record contains")
    parser.add_argument("--json", type=parse_output_path, default=ROOT / "docs/results/rehearsals.json")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="additional keys of every run")
    options = parser.parse_args()
    record: dict[str, Any] = {"provenance": collect_provenance(__file__, "cpu"), "method": options.method}
    record["rehearsals"] = []
    if options.json.is_file():
        record["rehearsals"] = json.loads(options.json.read_text(encoding="utf-8"))["rehearsals"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for overlay in options.overlays:
        for model in options.models:
            before = [e for e in record["rehearsals"] if (e["model"], e["overlay"]) == (model, overlay)]
            if before and not options.again:
                continue
            gpus = options.gpus or find_num_gpus(model, overlay)
            print(f"{model} {overlay} on {gpus} GPUs", flush=True)
            entry = rehearse_pair(model, overlay, options.method, gpus, options.ranks, options.keys)
            print(f"  {entry.get('error') or entry['report']['verdict']}", flush=True)
            kept = [e for e in record["rehearsals"] if e not in before]
            order = {(o, m): i for i, (o, m) in enumerate((o, m) for o in OVERLAYS for m in MODELS)}
            kept = sorted([*kept, entry], key=lambda e: order[e["overlay"], e["model"]])
            record["rehearsals"] = kept
            write_record(options.json, record, render_page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())

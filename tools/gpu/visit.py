#!/usr/bin/env python3
"""Run the most important measurements within fifteen minutes on a GPU, in order, with a record after each part.

    python tools/gpu/visit.py --json $OUT/gpu_visit.json            or, on a CPU,    --rehearse

The parts are those of `parts.list_visit_parts`, each a process with a time limit (`check.py` runs them). Parts that the
last record contains for the same machine, versions and sources are not repeated, so a visit continues where the last
one ended. `--again` repeats all. Evidence runs follow the most important parts, and the last parts use the time in
which no evidence run fits. `visit_page.py` renders the page next to the JSON file.
"""

import hashlib
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
from tools.gpu.parts import (  # noqa: E402
    VISIT_SECONDS,
    CheckPart,
    list_missing,
    list_visit_parts,
    list_visit_rehearsal_parts,
)
from tools.gpu.visit_page import render_visit  # noqa: E402
from tools.records import collect_provenance  # noqa: E402

RECORD = ROOT / "docs/results/gpu_visit.json"
REHEARSAL_RECORD = Path(tempfile.gettempdir()) / "farfield_gpu_visit_rehearsal.json"
MEASURED_SOURCES = (
    *("megatron/attention", "megatron/distributed", "megatron/kernels", "megatron/model", "megatron/position"),
    *("megatron/training", "tools/bench", "tools/gpu/parts.py", "tools/gpu/self_check.py"),
)
"""Folders and files with the code that the parts measure."""
RESUMED_PARTS = ("evidence",)
"""Parts that themselves skip the work of earlier visits."""


def compute_sources_digest() -> str:
    """Return a hash of the code that the parts measure."""
    digest = hashlib.sha256()
    for name in MEASURED_SOURCES:
        for path in [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*")):
            if path.suffix in (".py", ".h") and "__pycache__" not in path.parts:
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def is_part_complete(done: dict[str, Any] | None) -> bool:
    """Return True if a part succeeded and measured everything; without ncu, for example, it succeeds with a reason."""
    return done is not None and done["exit"] == 0 and not any(r.get("refusal") for r in done.get("records", ()))


def select_kept_parts(
    parts: list[CheckPart], last: dict[str, Any] | None, current: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the results of the last record that need not be measured again, with their dates.

    Args:
        parts: parts whose results may be kept.
        last: last record.
        current: header of the new record, with the digest of the sources.
    """
    if last is None or any(last.get(name) != current[name] for name in ("machine", "versions", "sources")):
        return {}
    names = [part.name for part in parts if part.name not in RESUMED_PARTS]
    results = {name: last["parts"][name] for name in names if is_part_complete(last["parts"].get(name))}
    return {name: {**done, "kept": done.get("kept", last["date"])} for name, done in results.items()}


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
    parser.add_argument("--again", action="store_true", help="repeat parts that the last record contains")
    arguments = parser.parse_args()
    if lacking := list_missing(("torch", "triton")):
        parser.error(f"missing packages: {', '.join(lacking)}; pip install {' '.join(lacking)}")
    import torch

    if not torch.cuda.is_available() and not arguments.rehearse:
        parser.error("no CUDA device found; --rehearse runs the same parts on a CPU")
    path = arguments.json or (REHEARSAL_RECORD if arguments.rehearse else RECORD)
    last = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else None
    parts = list_visit_rehearsal_parts() if arguments.rehearse else list_visit_parts()
    chosen = [part for part in parts if not arguments.parts or part.name in arguments.parts]
    header = {"sources": compute_sources_digest()}
    kept: dict[str, dict[str, Any]] = {}
    if not arguments.rehearse:
        # The new record also keeps parts that were not chosen.
        candidates = [part for part in parts if part not in chosen] if arguments.again else parts
        kept = select_kept_parts(candidates, last, {**collect_provenance(__file__, "cuda"), **header})
    if kept:
        print(f"kept from the last record: {', '.join(kept)}; --again repeats them")
    if all(part.name in kept for part in chosen):
        print("nothing is left to measure")
        return
    result = run_parts(
        [part for part in chosen if part.name not in kept],
        path,
        rehearsal=arguments.rehearse,
        script=__file__,
        max_seconds=arguments.seconds,
        render=partial(render_visit, last=last),
        header=header,
        kept=kept,
    )
    print(f"written: {path} and {path.with_suffix('.md')}")
    sys.exit(get_exit_code(result))


if __name__ == "__main__":
    print_interrupts_in_one_line()
    main()

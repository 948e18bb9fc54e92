#!/usr/bin/env python3
"""Run every CUDA feature of Farfield on the null device, and record the faults.

    python tools/gpu/null_device_matrix.py --page docs/results/cuda_matrix.md

Requires the CUDA build of torch and no GPU. tests/cuda runs a sample of the cases (`make test-cuda`). This tool runs
all: every overlay of configs/position × auto and triton × precision, recomputation, dropout, window, grouped queries,
head dimension and length; ZeRO × offload × precision; and layouts of eight ranks, as the first and the last rank. Each
part is one process, which shares imports and compiled kernels. A JSON file next to the page contains every case.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.rehearsal.null_device.environment import GPU_MODELS, build_environment, get_gpu_model  # noqa: E402
from megatron.rehearsal.rehearsed_run import write_synthetic_corpus  # noqa: E402
from megatron.utils.errors import FarfieldError  # noqa: E402
from tools.arguments import ToolParser, comma_separated, parse_output_path, print_interrupts_in_one_line  # noqa: E402
from tools.gpu.null_device_cases import (  # noqa: E402
    FEATURES,
    LONGEST,
    OVERLAYS,
    REPRESENTATIVES,
    VOCABULARY,
    Case,
    Outcome,
    find_expected_fallback,
    find_expected_rejection,
    find_faults,
    list_feature_cases,
    list_layout_cases,
    list_sharded_zero_cases,
    list_zero_cases,
)
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

WORKER = ROOT / "tools/gpu/null_device_worker.py"
RANKS = 8


@dataclass(frozen=True)
class MatrixPart:
    """Cases that one process runs, or that each of several ranks runs."""

    name: str
    title: str
    cases: list[Case]
    ranks: tuple[int, ...] = (0,)
    world_size: int = 1


def list_parts(features: Sequence[str] = tuple(FEATURES)) -> list[MatrixPart]:
    """List the parts of the whole matrix, or those of some features."""
    ends = (0, RANKS - 1)
    layouts = list_layout_cases(REPRESENTATIVES)
    return [
        MatrixPart("methods", "Every method in every shape, on one device", list_feature_cases(OVERLAYS, features)),
        MatrixPart("zero", "ZeRO, offload and precision, with a checkpoint after each step", list_zero_cases()),
        MatrixPart(
            "sharded", f"ZeRO over {RANKS} ranks, as the first and the last", list_sharded_zero_cases(), ends, RANKS
        ),
        MatrixPart("layouts", f"Layouts of {RANKS} ranks, as the first and the last", layouts, ends, RANKS),
    ]


def run_part(part: MatrixPart, gpu: str, corpus: Path, folder: Path) -> dict[str, Any]:
    """Run a part's processes in order. If a process dies, its case gets a fault."""
    start_time, results = time.perf_counter(), []
    for rank in part.ranks:
        job, output = folder / f"{part.name}.json", folder / f"{part.name}-{rank}.jsonl"
        cases = [asdict(case) for case in part.cases]
        job.write_text(json.dumps({"corpus": str(corpus), "cases": cases}), encoding="utf-8")
        base = dict(os.environ)
        if part.world_size > 1:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            base |= {name: str(value) for name, value in names.items()}
            base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        environment = build_environment(
            get_gpu_model(gpu), devices=part.world_size, is_single_rank=part.world_size > 1, base=base
        )
        done = subprocess.run(
            [sys.executable, str(WORKER), str(job), str(output)], env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        lines = output.read_text(encoding="utf-8").splitlines() if output.is_file() else []
        outcomes = {outcome["name"]: Outcome(**outcome) for outcome in map(json.loads, lines)}
        for case in part.cases:
            outcome = outcomes.get(case.name)
            died = f"its process exited with {done.returncode} before: {done.stderr.strip().splitlines()[-1:]}"
            faults = [died] if outcome is None else find_faults(case, outcome)
            described = {} if outcome is None else asdict(outcome)
            results.append({**described, "name": case.name, "rank": rank, "faults": faults})
    return {"seconds": round(time.perf_counter() - start_time, 1), "results": results}


def render_page(record: dict[str, Any]) -> str:
    parts = {part.name: part for part in list_parts()}
    lines = [
        "# CUDA features on the null device",
        "",
        "Small models train for two steps on the null CUDA device, until they finish or raise the documented error.",
        "There is no GPU: the code of PyTorch, Triton, DeepSpeed and NCCL runs, and kernels are compiled but compute",
        "nothing. A case passes if it neither crashes nor warns, and reports its fallbacks to PyTorch.",
        "Times are those of a shared machine, and no case tests numerical results.",
        "",
        "| part | cases | passed | rejected as documented | reported fallbacks | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in record["parts"].items():
        results, cases = run["results"], {case.name: case for case in parts[name].cases}
        right = sum(not result["faults"] for result in results)
        refused = sum(find_expected_rejection(cases[result["name"]]) is not None for result in results)
        fallen = sum(find_expected_fallback(cases[result["name"]]) is not None for result in results)
        counts = f"{len(results):,} | {right:,} | {refused} | {fallen} | {run['seconds']:,.0f}"
        lines.append(f"| {parts[name].title} | {counts} |")
    lines += ["", "## Faults", ""]
    faults: Counter[str] = Counter()
    where: dict[str, list[str]] = {}
    for run in record["parts"].values():
        for result in run["results"]:
            for fault in dict.fromkeys(_normalize(fault) for fault in result["faults"]):
                faults[fault] += 1
                where.setdefault(fault, []).append(result["name"])
    lines += [
        f"* {count} cases ({', '.join(dict.fromkeys(where[fault][:4]))}{' …' * (count > 4)}): {fault}"
        for fault, count in faults.most_common()
    ] or ["None."]
    lines += [
        "",
        "## Coverage",
        "",
        f"{len(OVERLAYS)} overlays: {', '.join(OVERLAYS)}.",
        "",
        f"Each with auto and triton: {', '.join(record['features'])}.",
        "",
        *_list_left_out(record),
        format_provenance(record),
    ]
    return "\n".join(lines) + "\n"


def _list_left_out(record: dict[str, Any]) -> list[str]:
    """List the parts that this record's command did not run."""
    features = [name for name in FEATURES if name not in record["features"]]
    parts = [part.title for part in list_parts() if part.name not in record["parts"]]
    left = [*features, *parts]
    return [f"Not run for this record, but by the full command: {'; '.join(left)}.", ""] if left else []


def _normalize(fault: str) -> str:
    """Remove the details that vary between cases from a fault."""
    return re.sub(r"\[W\d+ \S+ |\d{4,}", "…", fault.splitlines()[0])[:200]


def main() -> None:
    names = [part.name for part in list_parts()]
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=[card.name for card in GPU_MODELS], default="h100", help="emulated GPU (h100)")
    parser.add_argument("--parts", type=comma_separated(names), default=names, help=f"parts to run: {', '.join(names)}")
    parser.add_argument(
        "--features",
        type=comma_separated(FEATURES),
        default=list(FEATURES),
        help="features of methods to run; by default all",
    )
    parser.add_argument("--overlays", type=comma_separated(OVERLAYS), help="overlays to run; by default all")
    parser.add_argument(
        "--page", type=parse_output_path, help="output file of the page; the record is written next to it (.json)"
    )
    arguments = parser.parse_args()
    record: dict[str, Any] = {**collect_provenance(__file__, "cpu"), "gpu": arguments.gpu}
    record |= {"features": arguments.features, "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        write_synthetic_corpus(corpus, VOCABULARY, LONGEST)
        for part in list_parts(arguments.features):
            if part.name not in arguments.parts:
                continue
            if arguments.overlays:
                part = MatrixPart(
                    part.name, part.title, [c for c in part.cases if c.overlay in arguments.overlays], part.ranks,
                    part.world_size,
                )  # fmt: skip
            try:
                run = record["parts"][part.name] = run_part(part, arguments.gpu, corpus, Path(folder))
            except FarfieldError as error:
                parser.error(str(error))
            wrong = [result for result in run["results"] if result["faults"]]
            print(f"{part.name}: {len(run['results'])} cases, {len(wrong)} wrong, {run['seconds']:.0f} s", flush=True)
            for result in wrong:
                print(f"  {result['name']} (rank {result['rank']}): {result['faults'][0][:200]}", flush=True)
            if arguments.page is not None:
                write_record(arguments.page.with_suffix(".json"), record, render_page(record))
    sys.exit(any(result["faults"] for run in record["parts"].values() for result in run["results"]))


if __name__ == "__main__":
    print_interrupts_in_one_line()
    main()

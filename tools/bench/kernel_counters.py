#!/usr/bin/env python3
"""Read hardware counters of our attention kernels with NVIDIA Nsight Compute (ncu).

    python tools/bench/kernel_counters.py --json counters.json

The tool runs itself under ncu with one forward and backward pass of CDAPE's attention and of attention with a learned
bias, at the shapes of the 350M model. The record of a kernel contains its time, all instructions, instructions of the
load/store and tensor pipes, wavefronts of shared memory, those caused by bank conflicts, bytes of the L2 cache and of
device memory, and why warps wait: the clocks between two instructions of a warp, by reason.
Counts are also given in clocks of a multiprocessor per causal score position: issue slots divided by four schedulers,
wavefronts by one pipe.
`tools/bench/instructions.py` predicts these numbers, without the reasons.

If ncu is missing, or the driver does not permit counters, the tool prints and records the reason, and exits with 0.
"""

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import (  # noqa: E402
    ToolParser,
    int_at_least,
    parse_device,
    parse_output_path,
    print_interrupts_in_one_line,
)

if __name__ == "__main__":
    print_interrupts_in_one_line()

import torch  # noqa: E402

from tools.bench.attention_peers import AttentionProblem, build_peers  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

METRICS = {
    "gpu__time_duration.sum": "ns",
    "sm__cycles_elapsed.max": "cycles",
    "smsp__inst_issued.sum": "issued",
    "smsp__inst_executed_pipe_lsu.sum": "load_store",
    "sm__inst_executed_pipe_tensor.sum": "tensor",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "shared_wavefronts",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "shared_conflicts",
    "lts__t_bytes.sum": "l2_bytes",
    "dram__bytes.sum": "bytes",
    "launch__registers_per_thread": "registers",
}
"""Record fields by the names of ncu's counters."""
STALLS = {
    f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": reason
    for reason in (
        *("selected", "not_selected", "wait", "math_pipe_throttle", "short_scoreboard", "long_scoreboard", "barrier"),
        *("mio_throttle", "lg_throttle", "no_instruction", "imc_miss", "dispatch_stall", "branch_resolving", "drain"),
    )
}
"""Reasons for which a warp does not issue, by the names of ncu's counters (Kernel Profiling Guide, warp stall reasons).

`no_instruction` is a miss of the instruction cache, `wait` a fixed latency, and `math_pipe_throttle` a busy pipe.
"""
FEWER_METRICS = ("gpu__time_duration.sum", "sm__cycles_elapsed.max", "smsp__inst_issued.sum", "dram__bytes.sum")
"""Counters that every version supports, used if one of the others is unknown."""
FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
NO_PERMISSION = "ERR_NVGPUCTRPERM"
SCHEDULERS = 4
OPS = ("cdape", "biased_attention")
WORKLOAD = "FARFIELD_COUNTED_PROBLEM"
"""Environment variable with the problem of a process under ncu, as JSON."""


def find_ncu() -> str | None:
    """Return the path of ncu, or None."""
    if (found := shutil.which("ncu")) is not None:
        return found
    candidates = sorted(path for folder in FOLDERS for path in (*Path(folder).glob("ncu"), *Path(folder).glob("*/ncu")))
    return str(candidates[-1]) if candidates else None


def run_counted_pass(fields: dict[str, Any]) -> None:
    """Run a forward and backward pass between the calls that start and stop ncu's profiler."""
    problem = AttentionProblem(**{**fields, "dtype": getattr(torch, fields["dtype"])})
    attend, wanted = build_peers(problem)["triton"], problem.parameters()

    def run() -> None:
        leaves = problem.inputs()
        torch.autograd.grad(attend(*leaves), [*leaves, *wanted], problem.output_gradient(), allow_unused=True)

    for _ in range(2):  # warm-up: compiles kernels and fills host caches
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def read_counters(text: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of ncu's CSV output, which has one row per counter or one row per kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    kernels: dict[str, dict[str, Any]] = {}
    for row in rows:
        if not row["ID"]:  # units of the columns
            continue
        kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        named = {row["Metric Name"]: row["Metric Value"]} if "Metric Name" in row else row
        for metric in [*METRICS, *STALLS]:
            with suppress(KeyError, ValueError):  # "n/a": this GPU does not have the counter
                value = float(named[metric].replace(",", ""))
                if metric in STALLS:
                    kernel.setdefault("stalls", {})[STALLS[metric]] = value
                else:
                    kernel[METRICS[metric]] = value
    yield from kernels.values()


def run_ncu(command: list[str], environment: dict[str, str], seconds: float) -> tuple[str, str]:
    """Run ncu and return its output and its errors. The counted process always ends with it.

    Raises:
        subprocess.TimeoutExpired: if it takes longer than the given time.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):  # all of its processes have ended
                os.killpg(process.pid, signal.SIGKILL)


def count_problem(problem: dict[str, Any], ncu: str, seconds: int) -> list[dict[str, Any]]:
    """Return the records of a problem's kernels, or a single record with the reason why there are none."""
    head = {"op": "counters", "peer": problem["op"], **{x: problem[y] for x, y in zip("BHTd", SIZES, strict=True)}}
    reason, end = "no output", time.monotonic() + seconds
    for metrics in ((*METRICS, *STALLS), tuple(METRICS), FEWER_METRICS):
        # ncu would otherwise lock the clocks of a GPU that may be borrowed.
        command = [
            *(ncu, "--csv", "--print-units", "base", "--profile-from-start", "off", "--target-processes", "all"),
            *("--clock-control", "none", "--metrics", ",".join(metrics)),
            *(sys.executable, str(Path(__file__).resolve())),
        ]
        try:
            written, errors = run_ncu(command, {**os.environ, WORKLOAD: json.dumps(problem)}, end - time.monotonic())
        except (subprocess.TimeoutExpired, OSError) as failure:
            return [{**head, "refusal": f"ncu: {failure.__class__.__name__} after at most {seconds} s"}]
        output = written + errors
        if NO_PERMISSION in output:
            return [{**head, "refusal": "ncu: the driver permits counters to administrators only"}]
        kernels = list(read_counters(written))
        if kernels:
            return [{**head, **summarize_kernel(kernel, problem)} for kernel in kernels]
        reason = next((line for line in output.splitlines() if "ERROR" in line or "Error" in line), reason)
    return [{**head, "refusal": f"ncu: {reason.strip()[:200]}"}]


SIZES = ("batch", "heads", "length", "dim")


def summarize_kernel(kernel: dict[str, Any], problem: dict[str, Any]) -> dict[str, Any]:
    """Return a kernel's record with its clocks per causal score position over all heads."""
    positions = problem["batch"] * problem["length"] * (problem["length"] + 1) // 2
    found = {**kernel, "kernel": kernel["kernel"][:110]}
    for field, units in (("issued", SCHEDULERS), ("load_store", 1), ("shared_wavefronts", 1)):
        if field in kernel:
            found[f"{field}_clocks"] = round(kernel[field] / units / positions, 3)
    for field in ("bytes", "l2_bytes"):
        if field in kernel:
            found[f"{field}_per_position"] = round(kernel[field] / positions, 3)
    return found


def format_console_line(record: dict[str, Any]) -> str:
    if "refusal" in record:
        return f"{record['peer']}: not counted: {record['refusal']}"
    time = f"{record['ns'] / 1e3:9.1f} µs" if "ns" in record else " " * 12
    counts = ", ".join(f"{name} {record[name]}" for name in record if name.endswith(("_clocks", "_position")))
    return f"{record['peer']:<17} {time}  {record['kernel'][:60]:<60} {counts}"


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=parse_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS))
    for name, value in zip(SIZES, (32, 16, 512, 64), strict=True):
        parser.add_argument(f"--{name}", type=int_at_least(1), default=value)
    parser.add_argument("--width", type=int_at_least(1), default=32)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=int_at_least(1), default=60, help="time limit of one operator (60)")
    parser.add_argument("--json", type=parse_output_path, help="output file of the records")
    return parser.parse_args()


def main() -> None:
    if WORKLOAD in os.environ:
        run_counted_pass(json.loads(os.environ[WORKLOAD]))
        return
    arguments = parse_arguments()
    ncu, result = find_ncu(), {**collect_provenance(__file__, arguments.device), "records": []}
    for op in arguments.op:
        sizes = {name: getattr(arguments, name) for name in (*SIZES, "width", "dtype", "device")}
        problem = {"op": op, **sizes}
        if ncu is None:
            records = [{"op": "counters", "peer": op, "refusal": "ncu (Nsight Compute) is not installed"}]
        else:
            records = count_problem(problem, ncu, arguments.seconds)
        result["records"] += records
        for record in records:
            print(format_console_line(record), flush=True)
        if arguments.json is not None:
            write_record(arguments.json, result)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Profile a training step: time on the host, in each kernel, and between kernels.

    python tools/bench/profile_step.py --shapes 350M:512:32 350M:512:1 --json profile.json

The first record describes the machine, to compare hosts and GPUs: an empty Python loop, a launch through PyTorch and
through Triton, an allocation, a copy on the device, a large matrix product. Each shape and method then has

    wall       median time of a step, with the device synchronized after each
    host       median time until the step's last call returns, without synchronization
    busy       time during which some kernel runs, per step
    kernels    kernels with the most device time: calls per step, time per call, fraction of the total
    host_ops   host operations with the most self time

The models are those of `train_step.py`. Records are written after each shape and method. After `--seconds` the tool
records the remaining ones as not measured, and exits with 1.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, int_at_least, parse_device, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()
    warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch.profiler import ProfilerActivity  # noqa: E402

from tools.bench.error_gate import format_exception  # noqa: E402
from tools.bench.train_step import PEERS, Candidate, StepProblem, build_candidate, parse_shape  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

CALLS = 1000
"""Number of calls of a small operation that are timed together."""
NUM_WARMUP_STEPS, NUM_TIMED_STEPS, NUM_PROFILED_STEPS = 3, 8, 3
NUM_KERNELS, NUM_HOST_OPS = 25, 15
"""Number of entries in a record's tables."""
COPY_BYTES, PRODUCT_SIZE = 1 << 29, 8192


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def time_until_done(function: Callable[[], object], rounds: int, device: str) -> float:
    """Return the median time in seconds until the device has finished a call."""
    taken = []
    for _ in range(rounds):
        synchronize(device)
        start_time = time.perf_counter()
        function()
        synchronize(device)
        taken.append(time.perf_counter() - start_time)
    return statistics.median(taken)


def time_on_host(function: Callable[[], object], rounds: int, device: str) -> float:
    """Return the median time in seconds until a call returns; the device may still be busy."""
    taken = []
    for _ in range(rounds):
        synchronize(device)
        start_time = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start_time)
    synchronize(device)
    return statistics.median(taken)


def measure_machine(device: str) -> dict[str, Any]:
    """Return the costs of basic operations on this machine, in microseconds."""

    def loop() -> None:
        for _ in range(CALLS * CALLS):
            pass

    x = torch.zeros(32, device=device)

    def add() -> None:
        for _ in range(CALLS):
            x.add_(1)

    def allocate() -> None:
        for _ in range(CALLS):
            torch.empty(1 << 20, dtype=torch.uint8, device=device)

    add()
    record: dict[str, Any] = {
        "op": "machine",
        "device": device,
        "python_loop_ms": round(time_on_host(loop, 1, device) * 1e3, 2),
        "launch_host_us": round(time_on_host(add, 5, device) / CALLS * 1e6, 3),
        "launch_done_us": round(time_until_done(add, 5, device) / CALLS * 1e6, 3),
        "allocation_us": round(time_on_host(allocate, 3, device) / CALLS * 1e6, 3),
    }
    return record if device == "cpu" else {**record, **_measure_card(device, x)}


def _measure_card(device: str, x: torch.Tensor) -> dict[str, Any]:
    from megatron.kernels.runtime import Tile, launch
    from tools.bench.empty_kernel import write_zeros

    tile, constants = Tile(1, 1, 1, 1), {"BLOCK": 32}

    def launch_triton() -> None:
        for _ in range(CALLS):
            launch(write_zeros, (1, 1, 1), (x,), constants, tile.options)

    launch_triton()
    big = torch.empty(2 * COPY_BYTES, dtype=torch.uint8, device=device)
    a = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=torch.bfloat16)
    copy = time_until_done(lambda: big[:COPY_BYTES].copy_(big[COPY_BYTES:]), 10, device)
    product = time_until_done(lambda: a @ a, 10, device)
    return {
        "triton_launch_host_us": round(time_on_host(launch_triton, 5, device) / CALLS * 1e6, 3),
        "copy_tb_per_s": round(2 * COPY_BYTES / copy / 1e12, 3),
        "product_tflops": round(2 * PRODUCT_SIZE**3 / product / 1e12, 1),
    }


def describe_candidate(problem: StepProblem, name: str) -> dict[str, Any]:
    """Return the fields of a record that identify a method at a shape."""
    return {
        "op": "profile", "peer": name, "model": problem.model, "device": problem.device, "dtype": problem.dtype,
        "B": problem.batch, "T": problem.length,
    }  # fmt: skip


def profile_candidate(problem: StepProblem, name: str, candidate: Candidate) -> dict[str, Any]:
    """Return the record of one method at one shape."""
    head = describe_candidate(problem, name)
    if candidate.step is None or candidate.refusal is not None:
        return {**head, "refusal": candidate.refusal}
    try:
        for _ in range(NUM_WARMUP_STEPS):
            candidate.step()
        wall = time_until_done(candidate.step, NUM_TIMED_STEPS, problem.device)
        host = time_on_host(candidate.step, NUM_TIMED_STEPS // 2, problem.device)
        tables = _profile_steps(candidate.step, problem.device)
    except Exception as failure:  # the other methods still count
        return {**head, "refusal": format_exception(failure)}
    tflops = candidate.flops * problem.tokens / wall / 1e12
    times = {"wall_ms": round(wall * 1e3, 3), "host_ms": round(host * 1e3, 3), "tflops": round(tflops, 2)}
    return {**head, **times, **tables}


def _profile_steps(step: Callable[[], None], device: str) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU, *([] if device == "cpu" else [ProfilerActivity.CUDA])]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(NUM_PROFILED_STEPS):
            step()
        synchronize(device)
    kernels: dict[str, list[float]] = {}
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    total = sum(map(sum, kernels.values()))
    most = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]
    averages = sorted(profiler.key_averages(), key=lambda average: -average.self_cpu_time_total)[:NUM_HOST_OPS]
    return {
        "kernels_ms": round(total / NUM_PROFILED_STEPS / 1e3, 3),
        "busy_ms": round(_measure_union(spans) / NUM_PROFILED_STEPS / 1e3, 3),
        "launches": sum(map(len, kernels.values())) / NUM_PROFILED_STEPS,
        "kernels": [
            {
                "name": name[:110],
                "calls": len(taken) / NUM_PROFILED_STEPS,
                "us": round(statistics.median(taken), 2),
                "share": round(sum(taken) / total, 4),
            }
            for name, taken in most
        ],
        "host_ops": [
            {
                "name": average.key[:80],
                "calls": average.count / NUM_PROFILED_STEPS,
                "ms": round(average.self_cpu_time_total / NUM_PROFILED_STEPS / 1e3, 3),
            }
            for average in averages
        ],
    }


def _measure_union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def format_console_lines(record: dict[str, Any]) -> list[str]:
    if record["op"] == "machine":
        return [", ".join(f"{name} {value}" for name, value in record.items() if name != "op")]
    head = f"{record['model']:<6} T={record['T']:<6} B={record['B']:<3} {record['peer']:<11} "
    if record.get("wall_ms") is None:
        return [head + f"not measured: {record['refusal']}"]
    line = f"wall {record['wall_ms']:.2f} ms, host {record['host_ms']:.2f}, busy {record['busy_ms']:.2f}, "
    lines = [head + line + f"{record['launches']:.0f} kernels"]
    for kernel in record["kernels"][:10]:
        lines.append(
            f"    {kernel['share']:6.1%} {kernel['calls']:7.1f} × {kernel['us']:8.1f} µs  {kernel['name'][:80]}"
        )
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=parse_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--shapes", nargs="*", type=parse_shape, default=[], help="MODEL:LENGTH:BATCH …; by default no step"
    )
    parser.add_argument("--methods", nargs="+", choices=PEERS, default=["cdape", "kerple_log", "plain"])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--seconds", type=int_at_least(1), default=240, help="start no method after this time (240)")
    parser.add_argument("--json", type=parse_output_path, help="output file of the records")
    arguments = parser.parse_args()
    if any(batch is None for _, _, batch in arguments.shapes):
        parser.error("argument --shapes: a profile needs MODEL:LENGTH:BATCH")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    start_time = time.perf_counter()
    records: list[dict[str, Any]] = []

    def add(record: dict[str, Any]) -> None:
        records.append(record)
        print("\n".join(format_console_lines(record)), flush=True)
        if arguments.json is not None:
            write_record(arguments.json, {**collect_provenance(__file__, arguments.device), "records": records})

    add(measure_machine(arguments.device))
    for model, length, batch in arguments.shapes:
        problem = StepProblem(model, length, batch, arguments.dtype, arguments.device)
        for name in arguments.methods:
            if time.perf_counter() - start_time > arguments.seconds:
                add({**describe_candidate(problem, name), "refusal": "no time left"})
                continue
            add(profile_candidate(problem, name, build_candidate(problem, name)))
            if problem.cuda:
                torch.cuda.empty_cache()
    sys.exit(any(record.get("refusal") for record in records))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Time and memory of attention with a learned bias and with CDAPE, against their peers, in one process.

    python tools/bench_kernels.py --device cpu --op cdape --json docs/results/bench_cdape_cpu.json

Every peer first passes an error gate against float64, in the output and all gradients; one that fails it gets no speed.
Then rounds go through all peers in turn, so that a noisy machine disturbs them alike; medians and quartiles count.
Peak memory is what one forward and backward pass adds, measured in a process of its own on a CPU.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tools.kernel_peers import OPS, Attention, Problem, peers  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OURS = ("triton", "chunked")
"""The peer that ratios are taken to: the first that is there."""
JUDGES = ("eager", "chunked")
"""The peer whose error in the same type sets the gate: the first that is there (eager's maps do not fit long ones)."""
FLOORS = ("flash",)
"""Peers that compute less than the problem, to show what it costs: they have no error."""


def passes(problem: Problem, attention: Attention) -> list[Tensor]:
    """Output and all gradients of one forward and backward pass."""
    inputs = problem.inputs()
    output = attention(*inputs)
    wanted = [*inputs, *problem.parameters()]
    gradients = torch.autograd.grad(
        output, wanted, problem.output_gradient(), allow_unused=True, materialize_grads=True
    )  # a floor leaves parameters out
    if problem.op == "cdape" and problem.kernel_size > 1:
        output = output[:, :, : -(problem.kernel_size // 2)]
    return [output.detach(), *gradients]


def error(ours: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error of any tensor, relative to the largest value of that tensor.

    Conv2's constant is added to all logits of a row, so its true gradient is zero: every tensor's scale is at least a
    thousandth of the largest gradient's.
    """
    largest = max(float(x.abs().max()) for x in exact)
    return max(
        float((a.double() - b).abs().max()) / max(float(b.abs().max()), largest / 1000)
        for a, b in zip(ours, exact, strict=True)
    )


def gate(problem: Problem, found: dict[str, Attention]) -> dict[str, float | None]:
    """The error of every peer, None for floors. Raises SystemExit for one above twice the judge's in the same type."""
    exact_problem = problem.in_float64()
    exact = passes(exact_problem, peers(exact_problem)["chunked"])
    errors: dict[str, float | None] = {
        name: None if name in FLOORS else error(passes(problem, attention), exact) for name, attention in found.items()
    }
    judge = next(name for name in JUDGES if name in errors)
    allowed = 2 * (errors[judge] or 0.0) + torch.finfo(problem.dtype).eps
    for name, value in errors.items():
        if value is not None and not value <= allowed:
            raise SystemExit(f"error: {name} errs by {value:.2g}, {judge} by {errors[judge]:.2g}: no speed is reported")
    return errors


def clock(problem: Problem, attention: Attention, repeats: int) -> tuple[float, float]:
    """Milliseconds of a forward and of a backward pass."""
    inputs, seed = problem.inputs(), problem.output_gradient()
    wanted = [*inputs, *problem.parameters()]
    cuda = problem.device != "cpu"
    forward = backward = 0.0
    for _ in range(repeats):
        marks = [_mark(cuda)]
        output = attention(*inputs)
        marks.append(_mark(cuda))
        torch.autograd.grad(output, wanted, seed, allow_unused=True)
        marks.append(_mark(cuda))
        if cuda:
            torch.cuda.synchronize()
        forward += _between(marks[0], marks[1])
        backward += _between(marks[1], marks[2])
    return forward / repeats, backward / repeats


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    return 1e3 * (second - first) if isinstance(first, float) else first.elapsed_time(second)


def peak_memory(problem: Problem, name: str) -> float:
    """MB that one forward and backward pass adds to what was there."""
    if problem.device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        attention = peers(problem)[name]
        passes(problem, attention)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        passes(problem, attention)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    fields = {**asdict(problem), "dtype": str(problem.dtype).removeprefix("torch.")}
    command = [sys.executable, __file__, "--measure-memory", json.dumps({"problem": fields, "peer": name})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _measure_memory(what: dict[str, Any]) -> None:
    """In a process of its own: the growth of the resident set's peak, from a warm start on a tiny problem."""
    torch.set_num_threads(2)
    fields = {**what["problem"], "dtype": getattr(torch, what["problem"]["dtype"])}
    tiny = Problem(**{**fields, "length": 16})
    passes(tiny, peers(tiny)[what["peer"]])
    problem = Problem(**fields)
    attention = peers(problem)[what["peer"]]
    inputs, seed = problem.inputs(), problem.output_gradient()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    torch.autograd.grad(attention(*inputs), [*inputs, *problem.parameters()], seed, allow_unused=True)
    print((_status("VmHWM") - before) / 1e3)


def _status(field: str) -> float:
    """A field of /proc/self/status, in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def bench(problem: Problem, rounds: int, wanted: list[str] | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One record per peer."""
    found = {name: peer for name, peer in peers(problem).items() if not wanted or name in (*wanted, "chunked")}
    errors = gate(problem, found)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    repeats = 1 if problem.device == "cpu" else 10
    for round_ in range(rounds + 1):  # the first warms up
        for name, attention in found.items():
            taken = clock(problem, attention, repeats)
            if round_:
                times[name].append(taken)
    ours = next(name for name in OURS if name in found)
    records = []
    for name in found:
        parts = {"forward": [f for f, _ in times[name]], "backward": [b for _, b in times[name]]}
        parts["both"] = [f + b for f, b in times[name]]
        ratios = [t / sum(o) for t, o in zip(parts["both"], times[ours], strict=True)]
        record = {
            "op": problem.op, "peer": name, "device": problem.device,
            "dtype": str(problem.dtype).removeprefix("torch."), "B": problem.batch, "T": problem.length,
            "H": problem.heads, "d": problem.dim,
            **({"k": problem.kernel_size, "width": problem.width} if problem.op == "cdape" else {}),
            "ms": {part: [round(q, 4) for q in statistics.quantiles(values, n=4)] for part, values in parts.items()},
            "ratio": round(statistics.median(ratios), 3), "ratio_to": ours,
            "peak_memory_mb": round(peak_memory(problem, name), 1), "error": errors[name], "rounds": rounds,
        }  # fmt: skip
        records.append(record)
        say(line(record))
    return records


HEADINGS = ["op", "T", "B", "peer", "forward ms", "backward ms", "both ms", "times ours", "memory MB", "error"]


def cells(record: dict[str, Any]) -> list[str]:
    """A record as the cells of a table."""
    middle = [f"{record['ms'][part][1]:,.3g}" for part in ("forward", "backward", "both")]
    wrong = "" if record["error"] is None else f"{record['error']:.1e}"
    op = record["op"] + (f" k={record['k']}" if "k" in record else "")
    return [op, str(record["T"]), str(record["B"]), record["peer"], *middle, f"{record['ratio']:.2f}",
            f"{record['peak_memory_mb']:,.0f}", wrong]  # fmt: skip


def line(record: dict[str, Any]) -> str:
    """A record as a line of the console."""
    widths = (16, 6, 3, 18, 11, 12, 10, 11, 10, 8)
    return " ".join(cell.rjust(width) for cell, width in zip(cells(record), widths, strict=True))


def markdown(result: dict[str, Any]) -> str:
    """The records as a table, with where and how they were measured."""
    rows = [HEADINGS, ["---"] * len(HEADINGS), *map(cells, result["records"])]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{table}\n\n{result['date']}, {result['machine']}; {versions}; `{result['command']}`.\n"


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Time and memory over T, one curve per peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, what, value in (
        (axes[0], "forward + backward, ms", lambda r: r["ms"]["both"][1]),
        (axes[1], "peak memory, MB", lambda r: r["peak_memory_mb"]),
    ):
        for name in dict.fromkeys(record["peer"] for record in records):
            points = sorted((r["T"], value(r)) for r in records if r["peer"] == name)
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="T", title=what)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def problems(arguments: argparse.Namespace) -> list[Problem]:
    """The shapes to measure: those asked for, at a number of tokens that fits the device."""
    result = []
    for length in arguments.lengths:
        batch = arguments.batch or max(1, arguments.tokens // length)
        result.append(
            Problem(arguments.op, batch, arguments.heads, arguments.dim, length, arguments.width,
                    arguments.kernel_size, DTYPES[arguments.dtype], arguments.device)
        )  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--op", choices=OPS, default="cdape")
    parser.add_argument("--lengths", type=int, nargs="+", help="sequence lengths T")
    parser.add_argument("--batch", type=int, help="B; tokens/T if absent")
    parser.add_argument("--tokens", type=int, help="B·T where no batch is given")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--kernel-size", type=int, default=3)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--peers", nargs="+", help="only these (and chunked)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--measure-memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_memory:
        _measure_memory(json.loads(arguments.measure_memory))
        return
    cpu = arguments.device == "cpu"
    arguments.lengths = arguments.lengths or ([512, 2048] if cpu else [512, 2048, 8192])
    arguments.tokens = arguments.tokens or (1024 if cpu else 16384)
    arguments.dtype = arguments.dtype or ("fp32" if cpu else "bf16")
    print(" ".join(h.rjust(w) for h, w in zip(HEADINGS, (16, 6, 3, 18, 11, 12, 10, 11, 10, 8), strict=True)))
    records = []
    for problem in problems(arguments):
        records += bench(problem, arguments.rounds, arguments.peers, lambda text: print(text, flush=True))
    name = platform.machine() if cpu else torch.cuda.get_device_name()
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", "tools/bench_kernels.py", *sys.argv[1:]]),
        "machine": f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {package: version(package) for package in ("torch", "triton")},
        "records": records,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(result), encoding="utf-8")
    if arguments.plot:
        plot(records, arguments.plot)


if __name__ == "__main__":
    main()

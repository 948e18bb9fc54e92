#!/usr/bin/env python3
"""Time and memory of attention with a learned bias and with CDAPE, against their peers, in one process.

    python tools/bench_kernels.py --device cpu --op cdape --json docs/results/bench_cdape_cpu.json

Every peer first passes an error gate against float64, in the output and all gradients; one that fails it, or raises,
gets no speed, its record says why, and the exit code is 1. Records are written after each length.
Then rounds go through all peers in turn, so that a noisy machine disturbs them alike; medians and quartiles count.
Peak memory is what one forward and backward pass adds, measured in a process of its own on a CPU.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tools.arguments import Parser, at_least, device, output_file  # noqa: E402
from tools.kernel_peers import FLOORS, FROZEN, OPS, Attention, Problem, peers  # noqa: E402
from tools.stamp import stamp  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OURS = ("triton", "chunked")
"""The peer that ratios are taken to: the first that is there."""
ROUND_MS = 100.0
"""A GPU's peer takes up to ten passes per round while they fit into this."""
JUDGES = ("eager", "chunked")
"""The peer whose error in the same type sets the gate: the first that is there (eager's maps do not fit long ones)."""
JUDGED_UP_TO = 8192
"""Longer problems are judged at this length: float64 would take minutes, and has nothing new to say."""
PARTS = {"output, dq, dk, dv": slice(0, 4), "the parameters' gradients": slice(4, None)}
"""What the gate compares apart: sums over all scores round coarser than rows do, and would hide a wrong row."""
SLACK = dict(zip(PARTS, (1, 8), strict=True))
"""Roundings that are allowed beside twice the judge's error: of few sums over all scores the judge's may be lucky."""
UNGATED = {**dict.fromkeys(FLOORS, tuple(PARTS)), **dict.fromkeys(FROZEN, tuple(PARTS)[1:])}
"""What a peer does not compute."""


@dataclass(frozen=True)
class Verdict:
    """What the gate says of a peer."""

    errors: dict[str, float]
    """By part; none of floors and of peers that raised."""
    refusal: str | None = None
    """Why it gets no speed."""

    @property
    def error(self) -> float | None:
        """The largest; None if there is none, or none that is a number."""
        largest = max(self.errors.values(), default=float("inf"))
        return largest if largest < float("inf") else None


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


def errors(problem: Problem, ours: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """The largest error of a tensor in each part, relative to the largest value of that tensor; inf where one is NaN.

    Conv2's constant, the last of CDAPE's parameters, is added to all logits of a row, so its true gradient is zero and
    what it gets is rounding: it is measured against the gradient of Conv2's weight, from the same sums.
    """
    scales = [max(float(x.abs().max()), torch.finfo(torch.float64).tiny) for x in exact]
    if problem.op == "cdape":
        scales[-1] = scales[-2]
    wrong = [
        float((a.double() - b).abs().nan_to_num(nan=float("inf")).max()) / scale
        for a, b, scale in zip(ours, exact, scales, strict=True)
    ]
    return {name: max(wrong[part]) for name, part in PARTS.items()}


def gate(problem: Problem, found: dict[str, Attention]) -> dict[str, Verdict]:
    """The errors of every peer, and who gets no speed: a peer that raises, or in some part errs more than twice as much
    as the judge in the same type."""
    exact_problem = problem.in_float64()
    exact = passes(exact_problem, peers(exact_problem)["chunked"])
    verdicts = {name: _verdict(problem, name, attention, exact) for name, attention in found.items()}
    judge = next((name for name in JUDGES if name in verdicts and verdicts[name].error is not None), None)
    for name, verdict in verdicts.items():
        for part, value in verdict.errors.items():
            judged = verdicts[judge].errors[part] if judge else float("nan")  # without a judge nobody passes
            allowed = 2 * judged + SLACK[part] * torch.finfo(problem.dtype).eps
            if not value <= allowed or value == float("inf"):
                refusal = f"errs by {value:.2g} in {part}, {judge} by {judged:.2g}: no speed is reported"
                verdicts[name] = Verdict(verdict.errors, refusal)
    return verdicts


def _verdict(problem: Problem, name: str, attention: Attention, exact: list[Tensor]) -> Verdict:
    try:
        ours = passes(problem, attention)
    except Exception as failure:  # out of memory, or refused by a compiler: the other peers still count
        return Verdict({}, _in_a_line(failure))
    found = errors(problem, ours, exact)
    return Verdict({part: value for part, value in found.items() if part not in UNGATED.get(name, ())})


def _in_a_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"


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
    torch.compiler.reset()  # every length is compiled for itself, far from Dynamo's limit of recompilations
    judged = problem if problem.length <= JUDGED_UP_TO else replace(problem, length=JUDGED_UP_TO)
    verdicts = gate(judged, _chosen(judged, [*wanted, *JUDGES] if wanted else None))
    found = _chosen(problem, wanted)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found if verdicts[name].refusal is None}
    repeats = dict.fromkeys(times, 1)
    for round_ in range(rounds + 1):  # the first warms up
        for name in list(times):
            try:
                taken = clock(problem, found[name], repeats[name])
            except torch.OutOfMemoryError as failure:  # it was judged at a shorter length
                verdicts[name] = Verdict(verdicts[name].errors, _in_a_line(failure))
                del times[name]
                continue
            if round_:
                times[name].append(taken)
            elif problem.device != "cpu":
                repeats[name] = max(1, min(10, int(ROUND_MS / sum(taken))))
    ours = next((name for name in OURS if name in times), None)
    records = []
    for name in found:
        verdict = verdicts[name]
        record = {
            "op": problem.op, "peer": name, "device": problem.device,
            "dtype": str(problem.dtype).removeprefix("torch."), "B": problem.batch, "T": problem.length,
            "H": problem.heads, "d": problem.dim,
            **({"k": problem.kernel_size, "width": problem.width} if problem.op == "cdape" else {}),
            **(speed(times[name], times.get(ours)) if name in times else NO_SPEED), "ratio_to": ours,
            "peak_memory_mb": round(peak_memory(problem, name), 1) if name in times else None,
            "error": verdict.error, "judged_at": judged.length, "rounds": rounds,
            **({"refusal": verdict.refusal} if verdict.refusal else {}),
        }  # fmt: skip
        records.append(record)
        say(line(record))
    return records


def _chosen(problem: Problem, wanted: list[str] | None) -> dict[str, Attention]:
    return {name: peer for name, peer in peers(problem).items() if not wanted or name in wanted}


NO_SPEED = {"ms": None, "ratio": None}


def speed(times: list[tuple[float, float]], ours: list[tuple[float, float]] | None) -> dict[str, Any]:
    """Quartiles of the milliseconds of a peer's rounds, and the median of its rounds' ratios to ours, if that ran."""
    parts = {"forward": [f for f, _ in times], "backward": [b for _, b in times], "both": [f + b for f, b in times]}
    ratios = [both / sum(our) for both, our in zip(parts["both"], ours or (), strict=ours is not None)]
    return {
        "ms": {part: [round(q, 4) for q in statistics.quantiles(values, n=4)] for part, values in parts.items()},
        "ratio": round(statistics.median(ratios), 3) if ratios else None,
    }


PICTURES = (".png", ".svg", ".pdf")

HEADINGS = ["op", "T", "B", "peer", "forward ms", "backward ms", "both ms", "times ours", "memory MB", "error"]

WIDTHS = (16, 6, 3, 18, 11, 12, 10, 11, 10, 8)


def cells(record: dict[str, Any]) -> list[str]:
    """A record as the cells of a table; a dash where the gate allows no number, or there is none of ours to compare."""
    op = record["op"] + (f" k={record['k']}" if "k" in record else "")
    wrong = "" if record["error"] is None else f"{record['error']:.1e}"
    if record["ms"] is None:
        return [op, str(record["T"]), str(record["B"]), record["peer"], *["—"] * 5, wrong]
    ratio = "—" if record["ratio"] is None else f"{record['ratio']:.2f}"
    middle = [f"{record['ms'][part][1]:,.3g}" for part in ("forward", "backward", "both")]
    return [op, str(record["T"]), str(record["B"]), record["peer"], *middle, ratio,
            f"{record['peak_memory_mb']:,.0f}", wrong]  # fmt: skip


def line(record: dict[str, Any]) -> str:
    """A record as a line of the console."""
    return " ".join(cell.rjust(width) for cell, width in zip(cells(record), WIDTHS, strict=True))


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
        for name in dict.fromkeys(record["peer"] for record in records if record["ms"] is not None):
            points = sorted((r["T"], value(r)) for r in records if r["peer"] == name and r["ms"] is not None)
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


def parse() -> argparse.Namespace:
    """The command line, with what the device suggests where nothing is said."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--op", choices=OPS, default="cdape")
    parser.add_argument("--lengths", type=at_least(2), nargs="+", help="sequence lengths T")
    parser.add_argument("--batch", type=at_least(1), help="B; tokens/T if absent")
    parser.add_argument("--tokens", type=at_least(1), help="B·T where no batch is given")
    parser.add_argument("--heads", type=at_least(1), default=12)
    parser.add_argument("--dim", type=at_least(1), default=64)
    parser.add_argument("--width", type=at_least(1), default=32)
    parser.add_argument("--kernel-size", type=at_least(1), default=3, help="odd")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--peers", nargs="+", help="only these")
    parser.add_argument("--rounds", type=at_least(2), default=9)
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--markdown", type=output_file)
    parser.add_argument("--plot", type=output_file)
    parser.add_argument("--measure-memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cpu = arguments.device == "cpu"
    arguments.lengths = arguments.lengths or ([512, 2048] if cpu else [512, 2048, 8192])
    arguments.tokens = arguments.tokens or (1024 if cpu else 16384)
    arguments.dtype = arguments.dtype or ("fp32" if cpu else "bf16")
    if arguments.kernel_size % 2 == 0:
        parser.error(f"argument --kernel-size: must be odd, not {arguments.kernel_size}")
    size, shortest = arguments.kernel_size, min(arguments.lengths)
    if arguments.op == "cdape" and size // 2 >= shortest:
        parser.error(f"argument --kernel-size: {size} leaves no row to compare at length {shortest}")
    if arguments.plot and arguments.plot.suffix not in PICTURES:
        parser.error(f"argument --plot: {arguments.plot} must end in {', '.join(PICTURES)}")
    known = peers(problems(arguments)[0])
    if unknown := set(arguments.peers or ()) - set(known):
        parser.error(f"argument --peers: {', '.join(sorted(unknown))} is not here; choose from {', '.join(known)}")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.measure_memory:
        _measure_memory(json.loads(arguments.measure_memory))
        return
    result = {**stamp(__file__, arguments.device), "records": []}
    print(" ".join(heading.rjust(width) for heading, width in zip(HEADINGS, WIDTHS, strict=True)))
    for problem in problems(arguments):
        result["records"] += bench(problem, arguments.rounds, arguments.peers, lambda text: print(text, flush=True))
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if arguments.markdown:
            arguments.markdown.write_text(markdown(result), encoding="utf-8")
    if arguments.plot:
        plot(result["records"], arguments.plot)
    refused = [record for record in result["records"] if "refusal" in record]
    for record in refused:
        print(f"error: {record['peer']} at T = {record['T']}: {record['refusal']}", file=sys.stderr)
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    main()

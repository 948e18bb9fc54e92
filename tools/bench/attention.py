#!/usr/bin/env python3
"""Time and memory of attention with a learned bias and with CDAPE, against their peers, in one process.

    python tools/bench/attention.py --device cpu --op cdape --json docs/results/bench_cdape_cpu.json

Every peer first passes an error gate against float64, in the output and all gradients; one that fails it, or raises,
gets no speed, its record says why, and the exit code is 1. Then rounds go through all peers in turn, so that a noisy
machine disturbs them alike; medians and quartiles count. Peak memory is what one forward and backward pass adds,
measured in a process of its own on a CPU. `--gate-only` stops after the gate.

Records are written after each problem. Ctrl-C ends it with what the rounds so far have measured.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import Parser, at_least, device, output_file, tell_interrupts_in_a_line  # noqa: E402

if __name__ == "__main__":
    tell_interrupts_in_a_line()

import torch  # noqa: E402

from tools.bench.attention_peers import OPS, Attention, Problem, peers  # noqa: E402
from tools.bench.attention_tables import HEADINGS, PICTURES, in_columns, line, markdown, plot  # noqa: E402
from tools.bench.error_gate import Verdict, gate, in_a_line, products_in_full  # noqa: E402
from tools.bench.timing import Timing, clock, quartiles, resident_growth  # noqa: E402
from tools.records import stamp  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OURS = ("triton", "native", "chunked")
"""The peer that ratios are taken to: the first that is there."""
ROUND_MS = 100.0
"""A GPU's peer takes up to ten passes per round while they fit into this."""
JUDGED_UP_TO = {"cpu": 256, "cuda": 2048}
"""Longer problems are judged at this length: a dozen passes in float64 would take minutes, and have nothing new to
say. Both have several of every kernel's tiles."""
Times = dict[str, list[Timing]]


def bench(problem: Problem, rounds: int, wanted: list[str] | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One record per peer; no rounds leave it at the gate. Records of an interrupted problem say `cut`."""
    torch.compiler.reset()  # every problem is compiled for itself, far from Dynamo's limit of recompilations
    longest = JUDGED_UP_TO[problem.device]
    judged = problem if problem.length <= longest else replace(problem, length=longest)
    verdicts = gate(judged, _chosen(judged, wanted))
    found = _chosen(problem, wanted)
    times: Times = {name: [] for name in found if verdicts[name].refusal is None} if rounds else {}
    warm: Times = {name: [] for name in times}
    cut = False
    try:
        _take_rounds(problem, rounds, found, verdicts, warm, times)
    except KeyboardInterrupt:
        cut = True
        for name in times:  # a first pass is slow by what it sets up, and more than nothing
            times[name] = times[name] or warm[name]
    ours = next((name for name in OURS if times.get(name)), None)
    records = []
    for name in found:
        verdict = verdicts[name]
        record = {
            "op": problem.op, "peer": name, "device": problem.device,
            "dtype": str(problem.dtype).removeprefix("torch."), "B": problem.batch, "T": problem.length,
            "H": problem.heads, "d": problem.dim,
            **({"k": problem.kernel_size, "width": problem.width} if problem.op == "cdape" else {}),
            **(speed(times[name], times.get(ours)) if times.get(name) else NO_SPEED), "ratio_to": ours,
            "peak_memory_mb": _memory(problem, name, times.get(name), cut),
            "error": verdict.error, "judged_at": judged.length, "rounds": len(times.get(name, ())),
            **({"cut": True} if cut else {}),
            **({"refusal": verdict.refusal} if verdict.refusal else {}),
        }  # fmt: skip
        records.append(record)
        say(line(record))
    return records


def _take_rounds(
    problem: Problem, rounds: int, found: dict[str, Attention], verdicts: dict[str, Verdict], warm: Times, times: Times
) -> None:
    """Fill in the times; a peer that fails here is refused, and the others go on."""
    repeats = dict.fromkeys(times, 1)
    for round_ in range(rounds + 1 if rounds else 0):  # the first warms up
        for name in list(times):
            try:
                taken = clock(problem, found[name], repeats[name])
            except Exception as failure:  # out of memory, most likely: it was judged at a smaller size
                verdicts[name] = Verdict(verdicts[name].errors, in_a_line(failure))
                del times[name]
                continue
            (times if round_ else warm)[name].append(taken)
            if not round_ and problem.device != "cpu":
                repeats[name] = max(1, min(10, int(ROUND_MS / taken.both)))


def _memory(problem: Problem, name: str, taken: list[Timing] | None, cut: bool) -> float | None:
    if not taken:
        return None
    found = [timing.memory for timing in taken if timing.memory is not None]
    if not found and not cut:
        found = [resident_growth(problem, name)]
    return round(min(found), 1) if found else None


def _chosen(problem: Problem, wanted: list[str] | None) -> dict[str, Attention]:
    return {name: peer for name, peer in peers(problem).items() if not wanted or name in wanted}


NO_SPEED = {"ms": None, "ratio": None}


def speed(times: list[Timing], ours: list[Timing] | None) -> dict[str, Any]:
    """Quartiles of the milliseconds of a peer's rounds, and the median of its rounds' ratios to ours, if that ran."""
    pairs = zip(times, ours or (), strict=False)  # in a round that was cut, one has less
    ratios = [peer.both / our.both for peer, our in pairs]
    return {
        "ms": {part: quartiles([getattr(taken, part) for taken in times]) for part in ("forward", "backward", "both")},
        "ratio": quartiles(ratios)[1] if ratios else None,
    }


def problems(arguments: argparse.Namespace) -> list[Problem]:
    """The shapes to measure: those asked for, at a number of tokens that fits the device."""
    result = []
    for op, dtype, heads, length in product(arguments.op, arguments.dtype, arguments.heads, arguments.lengths):
        batch = arguments.batch or max(1, arguments.tokens // length)
        result.append(
            Problem(op, batch, heads, arguments.dim, length, arguments.width, arguments.kernel_size, DTYPES[dtype],
                    arguments.device)
        )  # fmt: skip
    return result


def parse() -> argparse.Namespace:
    """The command line, with what the device suggests where nothing is said."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--op", choices=OPS, nargs="+", default=["cdape"])
    parser.add_argument("--lengths", type=at_least(2), nargs="+", help="sequence lengths T")
    parser.add_argument("--batch", type=at_least(1), help="B; tokens/T if absent")
    parser.add_argument("--tokens", type=at_least(1), help="B·T where no batch is given")
    parser.add_argument("--heads", type=at_least(1), nargs="+", default=[12])
    parser.add_argument("--dim", type=at_least(1), default=64)
    parser.add_argument("--width", type=at_least(1), default=32)
    parser.add_argument("--kernel-size", type=at_least(1), default=3, help="odd")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+")
    parser.add_argument("--peers", nargs="+", help="only these")
    parser.add_argument("--rounds", type=at_least(2), default=9)
    parser.add_argument("--gate-only", action="store_true", help="errors, no times")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--markdown", type=output_file)
    parser.add_argument("--plot", type=output_file)
    arguments = parser.parse_args()
    cpu = arguments.device == "cpu"
    arguments.lengths = arguments.lengths or ([512, 2048] if cpu else [512, 2048, 8192])
    arguments.tokens = arguments.tokens or (1024 if cpu else 16384)
    arguments.dtype = arguments.dtype or ["fp32" if cpu else "bf16"]
    if arguments.kernel_size % 2 == 0:
        parser.error(f"argument --kernel-size: must be odd, not {arguments.kernel_size}")
    size, shortest = arguments.kernel_size, min(arguments.lengths)
    if "cdape" in arguments.op and size // 2 >= shortest:
        parser.error(f"argument --kernel-size: {size} leaves no row to compare at length {shortest}")
    if arguments.plot and arguments.plot.suffix not in PICTURES:
        parser.error(f"argument --plot: {arguments.plot} must end in {', '.join(PICTURES)}")
    if arguments.plot and arguments.gate_only:
        parser.error("argument --plot: there are no times to draw with --gate-only")
    known = dict.fromkeys(name for problem in problems(arguments) for name in peers(problem))
    if unknown := set(arguments.peers or ()) - set(known):
        parser.error(f"argument --peers: {', '.join(sorted(unknown))} is not here; choose from {', '.join(known)}")
    return arguments


def main() -> None:
    arguments = parse()
    products_in_full()
    result: dict[str, Any] = {**stamp(__file__, arguments.device), "records": []}
    rounds = 0 if arguments.gate_only else arguments.rounds
    print(in_columns(HEADINGS))
    for problem in problems(arguments):
        records = bench(problem, rounds, arguments.peers, lambda text: print(text, flush=True))
        result["records"] += records
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if arguments.markdown:
            arguments.markdown.write_text(markdown(result), encoding="utf-8")
        if any("cut" in record for record in records):
            raise KeyboardInterrupt
    if arguments.plot:
        plot(result["records"], arguments.plot)
    refused = [record for record in result["records"] if "refusal" in record]
    for record in refused:
        print(f"error: {record['peer']} at T = {record['T']}: {record['refusal']}", file=sys.stderr)
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    main()

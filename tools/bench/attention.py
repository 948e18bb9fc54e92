#!/usr/bin/env python3
"""Benchmark time and memory of attention with a learned bias and with CDAPE against its peers, in one process.

    python tools/bench/attention.py --device cpu --op cdape --json docs/results/bench_cdape_cpu.json

Every peer must first pass an error gate against float64, for the output and all gradients. A peer that fails the gate
or raises an error gets no time; its record states the reason, and the exit code is 1. Each round then runs every peer
once, so that noise of the machine affects all peers alike. The results are medians and quartiles. Peak memory is the
memory added by one forward and backward pass; on a CPU it is measured in a separate process. `--gate-only` stops after
the gate.

Records are written after each problem. Ctrl-C ends the current problem with the rounds measured so far.
"""

import argparse
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
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

from tools.bench.attention_peers import OPS, Attention, AttentionProblem, build_peers  # noqa: E402
from tools.bench.attention_tables import (  # noqa: E402
    COLUMN_HEADERS,
    PLOT_SUFFIXES,
    align_columns,
    format_console_line,
    plot_records,
    render_page,
)
from tools.bench.error_gate import GateResult, check_peers, disable_tf32, format_exception  # noqa: E402
from tools.bench.timing import Timing, compute_quartiles, measure_memory_growth, time_passes  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REFERENCE_PEERS = ("triton", "native", "chunked")
"""Peers to which ratios are computed, in order of preference."""
ROUND_MS = 100.0
"""Time budget of a peer per round on a GPU, in milliseconds, for up to ten passes."""
MAX_GATE_LENGTH = {"cpu": 256, "cuda": 512}
"""Maximum length for the gate; longer problems are judged at this length. A dozen passes in float64 would take minutes
(CDAPE at 2,048 tokens takes over 45 s on an H200) and reveal nothing new. Both lengths cover several tiles of every
kernel."""
MAX_GATE_SEQUENCES = 32
"""Maximum number of sequences into which the gate divides the rows of a longer problem."""
Times = dict[str, list[Timing]]


def benchmark_problem(
    problem: AttentionProblem, rounds: int, wanted: list[str] | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return one record per peer. With 0 rounds only the gate runs. Records of an interrupted problem contain `cut`."""
    torch.compiler.reset()  # each problem compiles separately, far from Dynamo's recompilation limit
    judged = shorten_problem(problem)
    verdicts: dict[str, GateResult] = {}
    found: dict[str, Attention] = {}
    times: Times = {}
    warm: Times = {}
    cut = False
    try:
        _check_problem(judged, wanted, verdicts)
        found = _select_peers(problem, wanted)
        times |= {name: [] for name in found if verdicts[name].refusal is None} if rounds else {}
        warm |= {name: [] for name in times}
        _time_rounds(problem, rounds, found, verdicts, warm, times)
    except KeyboardInterrupt:
        cut = True
    timed = [name for name in times if times[name]]
    ours = next((name for name in REFERENCE_PEERS if name in timed), None)
    for name in times:  # a first pass includes its setup: better than no time, but no basis for a ratio
        times[name] = times[name] or warm[name]
    records = []
    for name, verdict in verdicts.items():
        record = {
            "op": problem.op, "peer": name, "device": problem.device,
            "dtype": str(problem.dtype).removeprefix("torch."), "B": problem.batch, "T": problem.length,
            "H": problem.heads, "d": problem.dim,
            **({"k": problem.kernel_size, "width": problem.width} if problem.op == "cdape" else {}),
            **(summarize_times(times[name], times[ours] if ours and name in timed else None)
               if times.get(name) else NO_SPEED), "ratio_to": ours,
            "peak_memory_mb": _measure_memory(problem, name, times.get(name), cut),
            "error": verdict.error, "judged_at": judged.length, "rounds": len(times.get(name, ())),
            **({"judged_twice": True} if verdict.is_second_check else {}),
            **({"cut": True} if cut else {}),
            **({"refusal": verdict.refusal} if verdict.refusal else {}),
        }  # fmt: skip
        records.append(record)
        say(format_console_line(record))
    return records


def shorten_problem(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem that the gate judges: as many rows, in sequences that float64 can afford.

    The number of rows stays, up to a limit, since kernels are chosen by it: CDAPE's CUDA kernels need enough of them.
    """
    longest = MAX_GATE_LENGTH[problem.device]
    if problem.length <= longest:
        return problem
    sequences = min(problem.batch * problem.length // longest, MAX_GATE_SEQUENCES)
    return replace(problem, length=longest, batch=max(problem.batch, sequences))


def _check_problem(problem: AttentionProblem, wanted: list[str] | None, verdicts: dict[str, GateResult]) -> None:
    """Judge every peer, and fill in the verdicts. A peer slightly above the limit is judged again with other numbers.

    A run's own self-check does the same (`attention/check/trials.py`), because a gradient with few elements may exceed
    the limit by chance.
    """
    verdicts.update(check_peers(problem, _select_peers(problem, wanted)))
    if doubtful := [name for name, verdict in verdicts.items() if verdict.is_doubtful]:
        other = replace(problem, seed=problem.seed + 1)
        for name, verdict in check_peers(other, _select_peers(other, doubtful)):
            verdicts[name] = replace(verdict, is_second_check=True)


def _time_rounds(
    problem: AttentionProblem,
    rounds: int,
    found: dict[str, Attention],
    verdicts: dict[str, GateResult],
    warm: Times,
    times: Times,
) -> None:
    """Fill in the times. If a peer fails here, it is rejected and the others continue."""
    repeats = dict.fromkeys(times, 1)
    for round_ in range(rounds + 1 if rounds else 0):  # the first round warms up
        for name in list(times):
            try:
                taken = time_passes(problem, found[name], repeats[name])
            except Exception as failure:  # probably out of memory, because the gate used a smaller size
                verdicts[name] = GateResult(verdicts[name].errors, format_exception(failure))
                del times[name]
                continue
            (times if round_ else warm)[name].append(taken)
            if not round_ and problem.device != "cpu":
                repeats[name] = max(1, min(10, int(ROUND_MS / taken.both)))


def _measure_memory(problem: AttentionProblem, name: str, taken: list[Timing] | None, cut: bool) -> float | None:
    if not taken:
        return None
    found = [timing.memory for timing in taken if timing.memory is not None]
    if not found and not cut:
        found = [measure_memory_growth(problem, name)]
    return round(min(found), 1) if found else None


def _select_peers(problem: AttentionProblem, wanted: list[str] | None) -> dict[str, Attention]:
    return {name: peer for name, peer in build_peers(problem).items() if not wanted or name in wanted}


NO_SPEED = {"ms": None, "ratio": None}


def summarize_times(times: list[Timing], ours: list[Timing] | None) -> dict[str, Any]:
    """Return quartiles of a peer's times in milliseconds, and the median ratio to our times if available."""
    pairs = zip(times, ours or (), strict=False)  # an interrupted round leaves the lists unequal
    ratios = [peer.both / our.both for peer, our in pairs]
    return {
        "ms": {
            part: compute_quartiles([getattr(taken, part) for taken in times])
            for part in ("forward", "backward", "both")
        },
        "ratio": compute_quartiles(ratios)[1] if ratios else None,
    }


def list_problems(arguments: argparse.Namespace) -> list[AttentionProblem]:
    """List the problems to measure: the requested shapes, with a number of tokens that fits the device."""
    result = []
    for op, dtype, heads, length in product(arguments.op, arguments.dtype, arguments.heads, arguments.lengths):
        batch = arguments.batch or max(1, arguments.tokens // length)
        result.append(
            AttentionProblem(op, batch, heads, arguments.dim, length, arguments.width, arguments.kernel_size,
                DTYPES[dtype],
                    arguments.device)
        )  # fmt: skip
    return result


def parse_arguments() -> argparse.Namespace:
    """Parse the command line; defaults depend on the device."""
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=parse_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--op", choices=OPS, nargs="+", default=["cdape"])
    parser.add_argument("--lengths", type=int_at_least(2), nargs="+", help="sequence lengths T")
    parser.add_argument("--batch", type=int_at_least(1), help="B; by default tokens/T")
    parser.add_argument("--tokens", type=int_at_least(1), help="B·T if --batch is not given")
    parser.add_argument("--heads", type=int_at_least(1), nargs="+", default=[12])
    parser.add_argument("--dim", type=int_at_least(1), default=64)
    parser.add_argument("--width", type=int_at_least(1), default=32)
    parser.add_argument("--kernel-size", type=int_at_least(1), default=3, help="odd")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+")
    parser.add_argument("--peers", nargs="+", help="run only these peers")
    parser.add_argument("--rounds", type=int_at_least(2), default=9)
    parser.add_argument("--gate-only", action="store_true", help="check errors only, without timing")
    parser.add_argument("--json", type=parse_output_path)
    parser.add_argument("--markdown", type=parse_output_path)
    parser.add_argument("--plot", type=parse_output_path)
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
    if arguments.plot and arguments.plot.suffix not in PLOT_SUFFIXES:
        parser.error(f"argument --plot: {arguments.plot} must end in {', '.join(PLOT_SUFFIXES)}")
    if arguments.plot and arguments.gate_only:
        parser.error("argument --plot: there are no times to draw with --gate-only")
    known = dict.fromkeys(name for problem in list_problems(arguments) for name in build_peers(problem))
    if unknown := set(arguments.peers or ()) - set(known):
        parser.error(f"argument --peers: {', '.join(sorted(unknown))} not available; choose from {', '.join(known)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    disable_tf32()
    # PyTorch explains in ten lines why a kernel cannot compute a problem; the record contains the error.
    warnings.filterwarnings("ignore", module=r"tools\.bench\.attention_peers")
    result: dict[str, Any] = {**collect_provenance(__file__, arguments.device), "records": []}
    rounds = 0 if arguments.gate_only else arguments.rounds
    print(align_columns(COLUMN_HEADERS))
    for problem in list_problems(arguments):
        records = benchmark_problem(problem, rounds, arguments.peers, lambda text: print(text, flush=True))
        result["records"] += records
        if arguments.json:
            write_record(arguments.json, result)
        if arguments.markdown:
            arguments.markdown.write_text(render_page(result), encoding="utf-8")
        if any("cut" in record for record in records):
            raise KeyboardInterrupt
    if arguments.plot:
        plot_records(result["records"], arguments.plot)
    refused = [record for record in result["records"] if "refusal" in record]
    for record in refused:
        print(f"error: {record['peer']} at T = {record['T']}: {record['refusal']}", file=sys.stderr)
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    try:
        main()
    except SystemExit:  # everything is written, and the compiler's processes are slow to end
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise

#!/usr/bin/env python3
"""Compare the costs of all methods of a leaderboard on one CPU core: CPU time of a training step, and of scoring.

    python tools/bench/method_costs.py --json docs/results/zoo_costs.json

Runs of a leaderboard may come from several machines, so that their durations cannot be compared. This tool builds the
model of each method with the sweep's configuration and takes turns: each round runs some training steps of every method
and scores some windows of the largest length, in alternating order. Costs are medians and quartiles over rounds of the
ratio to the baseline in the same round. Other processes hardly affect CPU time, and affect all methods of a round
alike. The record is written after each round, so Ctrl-C keeps the rounds measured so far.
"""

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron.config.schema import Config  # noqa: E402
from megatron.data.corpus.prepare import prepare_corpus  # noqa: E402
from megatron.data.datasets import load_token_stream  # noqa: E402
from megatron.evaluation.eval_target import choose_lengths  # noqa: E402
from megatron.evaluation.perplexity import compute_window_losses  # noqa: E402
from megatron.options.data import CorpusOptions  # noqa: E402
from megatron.sweeps.spec import read_sweep  # noqa: E402
from megatron.utils.errors import UserError  # noqa: E402
from megatron.utils.formatting import suggest_names  # noqa: E402
from megatron.utils.signals import GracefulStop  # noqa: E402
from tools.bench.timing import compute_quartiles  # noqa: E402
from tools.bench.train_loop import start_trainer  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402


class MethodTimer:
    """Model of a method, whose training steps and scoring are timed.

    Args:
        config: configuration of a run of the leaderboard; nothing is saved.
        corpus: folder of the corpus.
        length: length of scored windows in tokens.
        targets: number of scored tokens of a window.
    """

    def __init__(self, config: Config, corpus: Path, length: int, targets: int) -> None:
        config = config.replace(
            train_data_paths=[str(corpus / "train_text_document")],
            valid_data_paths=[],
            test_data_paths=[],
            train_iters=1_000_000,  # no step is the last one
            log_interval=1_000_000,
            eval_interval=0,
            save=None,
            hang_timeout=None,
            device="cpu",
        )
        self.trainer = start_trainer(config)
        self.model, self.length, self.targets = self.trainer.run.engine.model, length, targets
        self.stream = load_token_stream(config.data, "train")

    def time_steps(self, steps: int, stop: GracefulStop) -> float:
        """Return the CPU seconds of a training step, the mean of several."""
        self.model.train()
        return _time(lambda: [self.trainer.train_step(stop) for _ in range(steps)]) / steps

    def time_scoring(self, windows: int) -> float | None:
        """Return the CPU seconds of scoring a window, the mean of several, or None if the model has a smaller limit."""
        if self.model.max_length is not None and self.model.max_length < self.length:
            return None
        self.model.eval()
        starts = np.linspace(0, len(self.stream) - self.length - 1, windows).astype(np.int64)
        seconds = _time(lambda: compute_window_losses(self.model, self.stream, starts, self.length, self.targets))
        return seconds / windows

    def close(self) -> None:
        self.trainer.run.close()


def _time(action: Callable[[], Any]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def compute_cost_ratios(times: dict[str, list[float]], baseline: str) -> dict[str, dict[str, Any]]:
    """Return the median CPU seconds of each method, and the quartiles of its ratio to the baseline per round."""
    summary: dict[str, dict[str, Any]] = {}
    for method, values in times.items():
        ratios = [value / base for value, base in zip(values, times[baseline], strict=True)]
        summary[method] = {"seconds": compute_quartiles(values, 6)[1], "ratio": compute_quartiles(ratios)}
    return summary


def compare_costs(arguments: argparse.Namespace) -> None:
    """Measure all methods in rounds; write the record after each round and print the costs after the last one."""
    sweep = read_sweep(arguments.configs)
    baseline, corpus_options = sweep.options.against, sweep.options.corpus
    if baseline is None or corpus_options is None:
        raise UserError(f"{' '.join(arguments.configs)}: sweep.against and sweep.corpus are missing")
    first = sweep.members[0]
    members = [member for member in sweep.members if member.benchmark is None and member.seed == first.seed]
    if arguments.methods:
        variants = [member.variant for member in members]
        for name in arguments.methods:
            if name not in variants:
                hint = suggest_names(name, variants) or f"choose from {', '.join(variants)}"
                raise UserError(f"--methods: {name!r} is not a variant of the sweep; {hint}")
        members = [member for member in members if member.variant in (*arguments.methods, baseline)]
    train_length = first.config.model.seq_length
    length = choose_lengths(first.evaluation, [train_length])[-1]
    targets = max(first.evaluation.targets or [train_length])
    record = {
        **collect_provenance(__file__, "cpu"),
        "baseline": baseline,
        "length": length,
        "steps": arguments.steps,
        "windows": arguments.windows,
    }
    times: dict[str, dict[str, list[float]]] = {"step": {}, "scoring": {}}
    with tempfile.TemporaryDirectory() as folder, GracefulStop() as stop:
        corpus = Path(folder) / "corpus"
        prepare_corpus(CorpusOptions(sources=list(corpus_options.sources)), corpus)
        timers = {member.variant: MethodTimer(member.config, corpus, length, targets) for member in members}
        for number in range(arguments.rounds + 1):  # the first round warms up
            for method in sorted(timers, reverse=bool(number % 2)):
                step = timers[method].time_steps(arguments.steps, stop)
                scoring = timers[method].time_scoring(arguments.windows)
                if stop.signal is not None:
                    sys.exit(128 + stop.signal)
                for name, seconds in (("step", step), ("scoring", scoring)):
                    if number and seconds is not None:
                        times[name].setdefault(method, []).append(seconds)
            print(f"round {number} of {arguments.rounds}", file=sys.stderr, flush=True)
            if number:
                record |= {
                    "rounds": number,
                    **{name: compute_cost_ratios(found, baseline) for name, found in times.items()},
                }
                if arguments.json is not None:
                    write_record(arguments.json, record)
        for timer in timers.values():
            timer.close()
    print(f"relative to {baseline}, medians and quartiles of {arguments.rounds} rounds")
    print(f"{'method':<28} {'training step':>24} {f'scoring at {length:,}':>24}")
    for method in timers:
        cells = [_format_ratio(record[name].get(method)) for name in times]
        print(f"{method:<28} {cells[0]:>24} {cells[1]:>24}")


def _format_ratio(cost: dict[str, Any] | None) -> str:
    if cost is None:
        return "–"
    low, median, high = cost["ratio"]
    return f"{median:.2f} ({low:.2f} … {high:.2f})"


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=["quickstart", "zoo"], help="files of the sweep")
    parser.add_argument("--methods", nargs="*", help="variants to measure; all if absent")
    parser.add_argument("--rounds", type=int_at_least(2), default=11)
    parser.add_argument("--steps", type=int_at_least(1), default=6, help="training steps of a method in a round")
    parser.add_argument("--windows", type=int_at_least(1), default=2, help="scored windows of a method in a round")
    parser.add_argument("--json", type=parse_output_path, help="output file of the record")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        compare_costs(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

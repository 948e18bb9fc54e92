"""Plan of a leaderboard: the runs of the complete board, and those that are missing.

Methods are ranked by benchmarks: the sweep's own training on a text, and the tasks of `sweep.benchmarks`. A method
whose runs are missing cannot be compared, so only complete benchmarks are ranked.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.records import Record
from megatron.reports.table_formats import TextTable

TEXT_BENCHMARK = "text"
"""Name of the benchmark of a sweep's own training."""


@dataclass(frozen=True)
class LeaderboardPlan:
    """Runs of a complete leaderboard: every method with every seed in every benchmark."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    benchmarks: tuple[str, ...] = ()
    """Names of the tasks, as in `sweep.benchmarks`."""

    @property
    def all_benchmarks(self) -> tuple[str, ...]:
        """Names of all benchmarks: the text, then the tasks."""
        return (TEXT_BENCHMARK, *self.benchmarks)

    @property
    def runs_per_benchmark(self) -> int:
        return len(self.methods) * len(self.seeds)

    def get_benchmark(self, record: Record) -> str | None:
        """Return the benchmark of a run's record, which its folder names; None for a trivial baseline."""
        if record.run is None:
            return None
        folder = PurePath(record.run).parent
        return folder.name if folder.name in self.benchmarks else TEXT_BENCHMARK

    def list_missing_runs(self, records: Iterable[Record]) -> dict[str, dict[str, list[int]]]:
        """List the runs without records.

        Returns:
            Benchmark → method → missing seeds. Complete benchmarks are omitted.
        """
        found = set()
        for record in records:
            if (benchmark := self.get_benchmark(record)) is not None:
                folder = PurePath(str(record.run)).parent
                found.add((benchmark, folder.name if benchmark == TEXT_BENCHMARK else folder.parent.name, record.seed))
        missing: dict[str, dict[str, list[int]]] = {}
        for benchmark in self.all_benchmarks:
            for method in self.methods:
                if seeds := [seed for seed in self.seeds if (benchmark, method, seed) not in found]:
                    missing.setdefault(benchmark, {})[method] = seeds
        return missing

    def find_table_benchmark(self, table: ComparisonTable) -> str | None:
        """Return the benchmark of a table, or None if it has records of trivial baselines alone."""
        return next(filter(None, map(self.get_benchmark, table.records)), None)


def describe_completeness(plan: LeaderboardPlan, missing: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Describe in a sentence which benchmarks are ranked, and which are not because runs are missing."""
    complete = [benchmark for benchmark in plan.all_benchmarks if benchmark not in missing]
    counts = {benchmark: plan.runs_per_benchmark - _count_runs(missing[benchmark]) for benchmark in missing}
    unfinished = ", ".join(
        f"{benchmark} ({count or 'none'} of {plan.runs_per_benchmark} runs)" for benchmark, count in counts.items()
    )
    if not complete:
        return f"No benchmark is complete, so no method has a rank: {unfinished}."
    return f"Ranked benchmarks: {', '.join(complete)}. Not ranked, because runs are missing: {unfinished}."


def build_missing_runs_table(
    plan: LeaderboardPlan, missing: Mapping[str, Mapping[str, Sequence[int]]]
) -> TextTable | None:
    """Build a table of the methods without all their runs, by benchmark, or return None if nothing is missing."""
    if not missing:
        return None
    rows = []
    for benchmark, methods in missing.items():
        absent = [method for method, seeds in methods.items() if len(seeds) == len(plan.seeds)]
        partial = [
            f"{method} ({', '.join(map(str, seeds))})" for method, seeds in methods.items() if method not in absent
        ]
        absent_text = "all methods" if len(absent) == len(plan.methods) else ", ".join(absent) or "–"
        runs = f"{_count_runs(methods)} of {plan.runs_per_benchmark}"
        rows.append((benchmark, (runs, absent_text, ", ".join(partial) or "–")))
    headers = ("missing runs", "methods without a run", "methods without some seeds")
    return TextTable("Missing runs", "benchmark", headers, tuple(rows))


def count_tied_methods(scores: Mapping[str, float]) -> int:
    """Count the methods whose score equals that of another method, to the precision of a float32 mean."""
    values = list(scores.values())
    return sum(sum(math.isclose(value, other, rel_tol=1e-7) for other in values) > 1 for value in values)


def _count_runs(methods: Mapping[str, Sequence[int]]) -> int:
    return sum(map(len, methods.values()))

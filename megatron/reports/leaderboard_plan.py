"""Plan of a leaderboard: the runs that it has when it is whole, and those that are missing.

A contest is the sweep's own training on a text, or one of its benchmarks. Ranks over a contest with missing runs would
compare methods that were measured with those that were not yet, so only whole contests are ranked.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.records import Record
from megatron.reports.table_formats import TextTable

TEXT_CONTEST = "text"
"""Name of the contest of a sweep's own training."""


@dataclass(frozen=True)
class LeaderboardPlan:
    """Runs of a whole leaderboard: every method with every seed in every contest."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    benchmarks: tuple[str, ...] = ()

    @property
    def contests(self) -> tuple[str, ...]:
        return (TEXT_CONTEST, *self.benchmarks)

    @property
    def runs_per_contest(self) -> int:
        return len(self.methods) * len(self.seeds)

    def get_contest(self, record: Record) -> str | None:
        """Return the contest of a run's record, which its folder names; None for a trivial baseline."""
        if record.run is None:
            return None
        folder = PurePath(record.run).parent
        return folder.name if folder.name in self.benchmarks else TEXT_CONTEST

    def list_missing_runs(self, records: Iterable[Record]) -> dict[str, dict[str, list[int]]]:
        """List the runs without records.

        Returns:
            Contest → method → missing seeds. Whole contests are left out.
        """
        found = set()
        for record in records:
            if (contest := self.get_contest(record)) is not None:
                folder = PurePath(str(record.run)).parent
                found.add((contest, folder.name if contest == TEXT_CONTEST else folder.parent.name, record.seed))
        missing: dict[str, dict[str, list[int]]] = {}
        for contest in self.contests:
            for method in self.methods:
                if seeds := [seed for seed in self.seeds if (contest, method, seed) not in found]:
                    missing.setdefault(contest, {})[method] = seeds
        return missing

    def find_table_contest(self, table: ComparisonTable) -> str | None:
        """Return the contest of a table, or None if it has records of trivial baselines alone."""
        return next(filter(None, map(self.get_contest, table.records)), None)


def describe_completeness(plan: LeaderboardPlan, missing: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Describe in a sentence which contests are ranked, and which are not because runs are missing."""
    whole = [contest for contest in plan.contests if contest not in missing]
    counts = {contest: plan.runs_per_contest - _count_runs(missing[contest]) for contest in missing}
    unfinished = ", ".join(
        f"{contest} ({count or 'none'} of {plan.runs_per_contest} runs)" for contest, count in counts.items()
    )
    if not whole:
        return f"No contest is complete, so no method has a rank: {unfinished}."
    return f"Ranked contests: {', '.join(whole)}. Not ranked, because runs are missing: {unfinished}."


def build_missing_runs_table(
    plan: LeaderboardPlan, missing: Mapping[str, Mapping[str, Sequence[int]]]
) -> TextTable | None:
    """Build a table of the methods without all their runs, by contest, or return None if nothing is missing."""
    if not missing:
        return None
    rows = []
    for contest, methods in missing.items():
        absent = [method for method, seeds in methods.items() if len(seeds) == len(plan.seeds)]
        partial = [
            f"{method} ({', '.join(map(str, seeds))})" for method, seeds in methods.items() if method not in absent
        ]
        absent_text = "all methods" if len(absent) == len(plan.methods) else ", ".join(absent) or "–"
        runs = f"{_count_runs(methods)} of {plan.runs_per_contest}"
        rows.append((contest, (runs, absent_text, ", ".join(partial) or "–")))
    headers = ("missing runs", "methods without a run", "methods without some seeds")
    return TextTable("Missing runs", "contest", headers, tuple(rows))


def count_tied_methods(scores: Mapping[str, float]) -> int:
    """Count the methods whose score equals that of another method, to the precision of a float32 mean."""
    values = list(scores.values())
    return sum(sum(math.isclose(value, other, rel_tol=1e-7) for other in values) > 1 for value in values)


def _count_runs(methods: Mapping[str, Sequence[int]]) -> int:
    return sum(map(len, methods.values()))

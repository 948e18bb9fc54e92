"""Contests: the criteria by which a leaderboard ranks methods.

Each table of perplexity over lengths is a contest at its largest length. Each task is a contest by its mean accuracy
beyond training, or by its effective length if it was evaluated by depth. In a contest, tied methods share the mean of
their ranks, and methods without a number are last. A kind of contest (text, tasks, needles) is the mean of its ranks.
Methods are sorted by the mean over kinds, so that many tasks have the weight of one text. Ranks cover the methods that
every contest evaluated. Other methods follow without a rank, sorted by the first contest.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.reports.axes import format_multiple
from megatron.reports.comparison_table import ComparisonTable, format_partial_seeds
from megatron.reports.metrics import Metric


@dataclass(frozen=True)
class RankedColumn:
    """One column of ranks."""

    kind: str
    """Either text, tasks, or needles."""
    title: str
    metric: Metric
    scores: Mapping[str, float]
    """Method → score; methods without a number are missing."""
    deviations: Mapping[str, float]
    """Standard deviations over seeds, for methods with several seeds."""
    methods: frozenset[str]
    """All evaluated methods, with or without a number."""
    floor: float | None = None
    """Score of the best trivial baseline."""
    partial_num_seeds: Mapping[str, int] = field(default_factory=dict)
    """Number of seeds of methods that have fewer seeds than others."""

    def is_above_floor(self, method: str) -> bool:
        """Return True if a method beats every trivial baseline, or if there is none."""
        get_key = self.metric.get_sort_key
        return self.floor is None or get_key(self.scores[method]) < get_key(self.floor)

    def format_score(self, method: str) -> str:
        score = self.scores.get(method)
        if score is None:
            return "–"
        deviation = self.deviations.get(method)
        text = (
            self.metric.format_value(score)
            if deviation is None
            else self.metric.format_value_with_deviation(score, deviation)
        )
        return text + format_partial_seeds(self.partial_num_seeds.get(method))

    def rank_methods(self, methods: Sequence[str]) -> dict[str, float]:
        """Rank methods from 1, the best. Ties share the mean of their ranks; methods without a score tie for last."""
        keys = {
            method: self.metric.get_sort_key(self.scores[method]) if method in self.scores else math.inf
            for method in methods
        }
        ordered = sorted(keys.values())
        return {method: ordered.index(key) + 1 + (ordered.count(key) - 1) / 2 for method, key in keys.items()}


def build_ranked_columns(tables: Sequence[ComparisonTable]) -> list[RankedColumn]:
    """Build the contests from tables, using one metric for each dataset."""
    ranked_columns = []
    for table in tables:
        name, dataset = table.metric.name, table.records[0].dataset
        if table.axis.name != "length" or len(set(table.methods) - set(table.trivial_baselines)) < 2:
            continue
        task = _name_task(table, tables)
        last = table.x_values[-1]
        if name == "perplexity" and len(table.x_values) > 1:
            title = f"perplexity at {format_multiple(last / table.train_length)}"
            ranked_columns.append(_build_ranked_column("text", title, table, last))
        elif name == "effective_length":
            ranked_columns.append(_build_ranked_column("needles", f"effective length, {task}", table, last))
        elif name == "mean_accuracy" and not _has_metric(tables, dataset, "effective_length"):
            ranked_columns.append(_build_ranked_column("tasks", f"{task}, % beyond training", table, last))
    return ranked_columns


def _name_task(table: ComparisonTable, tables: Sequence[ComparisonTable]) -> str:
    """Return the name of a task, with its options if another table has the same task with other options."""
    names = [(other.records[0].dataset or other.protocol).removeprefix("task ") for other in (table, *tables)]
    short = names[0].partition("(")[0]
    return names[0] if any(name.partition("(")[0] == short for name in set(names) - {names[0]}) else short


def _has_metric(tables: Sequence[ComparisonTable], dataset: str | None, name: str) -> bool:
    return any(table.metric.name == name and table.records[0].dataset == dataset for table in tables)


def _build_ranked_column(kind: str, title: str, table: ComparisonTable, x: float) -> RankedColumn:
    cells = {
        method: table.cells[method, x]
        for method in table.methods
        if (method, x) in table.cells and method not in table.trivial_baselines
    }
    floors = [table.cells[method, x].mean for method in table.trivial_baselines if (method, x) in table.cells]
    return RankedColumn(
        kind,
        title,
        table.metric,
        {method: cell.mean for method, cell in cells.items()},
        {method: cell.deviation for method, cell in cells.items() if cell.deviation is not None},
        frozenset(table.methods) - set(table.trivial_baselines),
        table.metric.select_best(floors) if floors else None,
        {method: cell.partial_num_seeds for method, cell in cells.items() if cell.partial_num_seeds is not None},
    )


def rank_methods(
    ranked_columns: Sequence[RankedColumn], methods: Sequence[str]
) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return all methods in leaderboard order, and mean ranks by kind for methods that every contest evaluated."""
    if not ranked_columns:  # there is only one method
        return list(methods), {}
    asked = [method for method in methods if all(method in ranked_column.methods for ranked_column in ranked_columns)]
    scores, get_key = ranked_columns[0].scores, ranked_columns[0].metric.get_sort_key
    others = sorted(
        set(methods) - set(asked),
        key=lambda method: (get_key(scores[method]) if method in scores else math.inf, method),
    )
    kinds = list(dict.fromkeys(ranked_column.kind for ranked_column in ranked_columns))
    ranks = [(ranked_column.kind, ranked_column.rank_methods(asked)) for ranked_column in ranked_columns]
    by_method = {
        method: {kind: statistics.fmean(each[method] for other, each in ranks if other == kind) for kind in kinds}
        for method in asked
    }
    return [*sorted(asked, key=lambda method: statistics.fmean(by_method[method].values())), *others], by_method

"""Benchmarks by which a leaderboard ranks methods: their ranks, the planned runs, and the runs that are missing.

The benchmarks are the sweep's own training on a text, and the tasks of `sweep.benchmarks`. A method whose runs are
missing cannot be compared, so only complete benchmarks are ranked. A run that diverged is not missing: it is a result
without a score.

A table of perplexity over lengths is a benchmark at its largest length. A task is a benchmark by its mean accuracy
beyond training, or by its effective length if it has no such mean (a passkey). In a benchmark, tied methods share the
mean of their ranks, and methods without a result are last. Ranks are averaged within each kind of benchmark (text,
tasks, needles). Methods are sorted by the mean over kinds, so that many tasks have the weight of one text. Ranks cover
the methods that every benchmark evaluated. Other methods, and further evaluations of the same trained models, follow
without a rank, sorted by the first benchmark.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import numpy as np

from megatron.reports.axes import format_multiple
from megatron.reports.comparison_table import ComparisonTable, format_partial_seeds
from megatron.reports.metrics import Metric
from megatron.reports.records import Record
from megatron.reports.run_records import RunFailure
from megatron.reports.significance import get_seed_variances
from megatron.reports.table_formats import TextTable
from megatron.reports.uncertainty import SeedVariance

NUM_RANK_DRAWS = 2000
RANK_SEED = 20_261_128
"""Fixed seed, so that the same records give the same intervals on every machine."""
TEXT_BENCHMARK = "text"
"""Name of the benchmark of a sweep's own training."""


@dataclass(frozen=True)
class RankedBenchmark:
    """One benchmark of a leaderboard, which ranks methods by their scores."""

    kind: str
    """Either text, tasks, or needles."""
    title: str
    metric: Metric
    scores: Mapping[str, float]
    """Method → score; methods without a result are missing."""
    deviations: Mapping[str, float]
    """Standard deviations over seeds, for methods with several seeds."""
    methods: frozenset[str]
    """All evaluated methods, with or without a result."""
    baseline_score: float | None = None
    """Score of the best trivial baseline."""
    partial_num_seeds: Mapping[str, int] = field(default_factory=dict)
    """Number of seeds of methods that have fewer seeds than others."""
    mean_variances: Mapping[str, SeedVariance] = field(default_factory=dict)
    """Variance of the score's mean over seeds (of its logarithm for ratios), for methods with several seeds."""

    def beats_baselines(self, method: str) -> bool:
        """Return True if a method beats every trivial baseline, or if there is none."""
        get_key = self.metric.get_sort_key
        return self.baseline_score is None or get_key(self.scores[method]) < get_key(self.baseline_score)

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

    def draw_ranks(self, methods: Sequence[str], generator: np.random.Generator, num_draws: int) -> np.ndarray:
        """Draw ranks [draws, methods], given each mean's uncertainty over its seeds (a t distribution)."""
        from scipy import stats  # imports slowly (about one second)

        keys = np.full((num_draws, len(methods)), math.inf)
        is_ratio = self.metric.comparison == "ratio"
        for index, method in enumerate(methods):
            if method not in self.scores:
                continue
            score = math.log(self.scores[method]) if is_ratio else self.scores[method]
            draws = np.full(num_draws, score)
            if (variance := self.mean_variances.get(method)) is not None:
                draws += math.sqrt(variance.variance) * generator.standard_t(variance.degrees_of_freedom, num_draws)
            keys[:, index] = draws if self.metric.better == "lower" else -draws
        return stats.rankdata(keys, axis=1)


def build_ranked_benchmarks(tables: Sequence[ComparisonTable]) -> list[RankedBenchmark]:
    """Build the benchmarks from tables, using one metric for each dataset."""
    ranked_benchmarks = []
    for table in tables:
        name, dataset = table.metric.name, table.records[0].dataset
        if table.axis.name != "length" or len(set(table.methods) - set(table.trivial_baselines)) < 2:
            continue
        task = _get_task_name(table, tables)
        last = table.x_values[-1]
        if name == "perplexity" and len(table.x_values) > 1:
            title = f"perplexity at {format_multiple(last / table.train_length)}"
            ranked_benchmarks.append(_build_ranked_benchmark("text", title, table, last))
        elif name == "mean_accuracy":
            kind = "needles" if table.protocol == "depths" else "tasks"
            ranked_benchmarks.append(_build_ranked_benchmark(kind, f"{task}, % beyond training", table, last))
        elif name == "effective_length" and not any(_ranks_by_accuracy(other, dataset) for other in tables):
            ranked_benchmarks.append(_build_ranked_benchmark("needles", f"effective length, {task}", table, last))
    return ranked_benchmarks


def _get_task_name(table: ComparisonTable, tables: Sequence[ComparisonTable]) -> str:
    """Return the name of a task, with its options if another table has the same task with other options."""
    names = [(other.records[0].dataset or other.protocol).removeprefix("task ") for other in (table, *tables)]
    short = names[0].partition("(")[0]
    return names[0] if any(name.partition("(")[0] == short for name in set(names) - {names[0]}) else short


def _ranks_by_accuracy(table: ComparisonTable, dataset: str | None) -> bool:
    """Return True if a table has the mean accuracies of two methods on a dataset. They distinguish methods best."""
    methods = set(table.methods) - set(table.trivial_baselines)
    return table.metric.name == "mean_accuracy" and table.records[0].dataset == dataset and len(methods) > 1


def _build_ranked_benchmark(kind: str, title: str, table: ComparisonTable, x: float) -> RankedBenchmark:
    cells = {
        method: table.cells[method, x]
        for method in table.methods
        if (method, x) in table.cells and method not in table.trivial_baselines
    }
    floors = [table.cells[method, x].mean for method in table.trivial_baselines if (method, x) in table.cells]
    return RankedBenchmark(
        kind,
        title,
        table.metric,
        {method: cell.mean for method, cell in cells.items()},
        {method: cell.deviation for method, cell in cells.items() if cell.deviation is not None},
        frozenset(table.methods) - set(table.trivial_baselines),
        table.metric.select_best(floors) if floors else None,
        {method: cell.partial_num_seeds for method, cell in cells.items() if cell.partial_num_seeds is not None},
        {
            method: SeedVariance(variance.variance / cells[method].num_seeds, variance.degrees_of_freedom)
            for method, variance in get_seed_variances(table, x).items()
            if method in cells
        },
    )


def rank_methods(
    ranked_benchmarks: Sequence[RankedBenchmark], methods: Sequence[str], unranked: Collection[str] = ()
) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return all methods in leaderboard order, and mean ranks by kind for methods that every benchmark evaluated.

    Args:
        ranked_benchmarks: the benchmarks.
        methods: methods of all benchmarks.
        unranked: methods without a rank, which follow the ranked ones.
    """
    if not ranked_benchmarks:  # there is only one method
        return list(methods), {}
    asked = [
        method
        for method in methods
        if method not in unranked and all(method in ranked_benchmark.methods for ranked_benchmark in ranked_benchmarks)
    ]
    scores, get_key = ranked_benchmarks[0].scores, ranked_benchmarks[0].metric.get_sort_key
    others = sorted(
        set(methods) - set(asked),
        key=lambda method: (get_key(scores[method]) if method in scores else math.inf, method),
    )
    kinds = list(dict.fromkeys(ranked_benchmark.kind for ranked_benchmark in ranked_benchmarks))
    ranks = [(ranked_benchmark.kind, ranked_benchmark.rank_methods(asked)) for ranked_benchmark in ranked_benchmarks]
    by_method = {
        method: {kind: statistics.fmean(each[method] for other, each in ranks if other == kind) for kind in kinds}
        for method in asked
    }
    return [*sorted(asked, key=lambda method: statistics.fmean(by_method[method].values())), *others], by_method


@dataclass(frozen=True)
class MethodRank:
    """Rank of a method in the leaderboard, from 1, with its 95% interval from the uncertainty of means over seeds."""

    value: int
    interval: tuple[int, int] | None
    """None if no benchmark has several seeds of the method."""

    def __str__(self) -> str:
        if self.interval is None or self.interval == (self.value, self.value):
            return str(self.value)
        return f"{self.value} ({self.interval[0]}–{self.interval[1]})"


def estimate_ranks(
    ranked_benchmarks: Sequence[RankedBenchmark], mean_ranks: Mapping[str, Mapping[str, float]]
) -> dict[str, MethodRank]:
    """Compute the rank of each ranked method, and its interval, from drawn scores of all benchmarks.

    Args:
        mean_ranks: mean ranks by kind, as returned by `rank_methods`.
    """
    from scipy import stats  # imports slowly (about one second)

    methods = list(mean_ranks)
    if not methods:
        return {}
    generator = np.random.Generator(np.random.PCG64(RANK_SEED))
    kinds = list(dict.fromkeys(column.kind for column in ranked_benchmarks))
    draws: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
    for column in ranked_benchmarks:
        draws[column.kind].append(column.draw_ranks(methods, generator, NUM_RANK_DRAWS))
    overall = np.mean([np.mean(each, axis=0) for each in draws.values()], axis=0)
    places = stats.rankdata(overall, method="min", axis=1)
    means = {method: statistics.fmean(by_kind.values()) for method, by_kind in mean_ranks.items()}
    ranks = {}
    for index, method in enumerate(methods):
        low, high = np.quantile(places[:, index], (0.025, 0.975), method="nearest")
        value = 1 + sum(other < means[method] for other in means.values())
        has_seeds = any(method in column.mean_variances for column in ranked_benchmarks)
        ranks[method] = MethodRank(value, (min(value, int(low)), max(value, int(high))) if has_seeds else None)
    return ranks


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

    def get_benchmark(self, record: Record | RunFailure) -> str | None:
        """Return the benchmark of a run, which its folder names; None for a trivial baseline or an unknown folder."""
        if record.run is None:
            return None
        folder = PurePath(record.run).parent
        return folder.name if folder.name in self.benchmarks else TEXT_BENCHMARK

    def list_missing_runs(self, results: Iterable[Record | RunFailure]) -> dict[str, dict[str, list[int]]]:
        """List the runs without a result.

        Args:
            results: records of finished runs, and failures of runs that diverged.

        Returns:
            Benchmark → method → missing seeds. Complete benchmarks are omitted.
        """
        found = set()
        for result in results:
            if (benchmark := self.get_benchmark(result)) is not None:
                folder = PurePath(str(result.run)).parent
                found.add((benchmark, folder.name if benchmark == TEXT_BENCHMARK else folder.parent.name, result.seed))
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
    """Describe in a sentence which benchmarks are ranked, and which are not because results are missing."""
    complete = [benchmark for benchmark in plan.all_benchmarks if benchmark not in missing]
    counts = {benchmark: plan.runs_per_benchmark - _count_runs(missing[benchmark]) for benchmark in missing}
    unfinished = ", ".join(
        f"{benchmark} ({count} of {plan.runs_per_benchmark} runs)" for benchmark, count in counts.items()
    )
    if not complete:
        return f"No benchmark is complete, so no method has a rank: {unfinished}."
    return f"Ranked benchmarks: {', '.join(complete)}. Not ranked, because results are missing here: {unfinished}."


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


def find_reevaluated_methods(tables: Sequence[ComparisonTable]) -> dict[str, str]:
    """Find methods all of whose runs belong to an earlier method: further evaluations of the same trained models.

    Returns:
        Method → earlier method whose trained models it evaluates.
    """
    runs: dict[str, set[str]] = {}
    for table in tables:
        for record in table.records:
            if record.run is not None:
                runs.setdefault(record.method, set()).add(record.run)
    reevaluated: dict[str, str] = {}
    for index, (method, own) in enumerate(runs.items()):
        trained = next((other for other in list(runs)[:index] if other not in reevaluated and own <= runs[other]), None)
        if trained is not None:
            reevaluated[method] = trained
    return reevaluated

"""Leaderboard: a table of ranked methods, the effect of added components, and the costs of methods."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.reports.axes import format_multiple
from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.leaderboard_benchmarks import (
    LeaderboardPlan,
    build_missing_runs_table,
    build_ranked_benchmarks,
    count_tied_methods,
    describe_completeness,
    estimate_ranks,
    find_reevaluated_methods,
    rank_methods,
)
from megatron.reports.metrics import format_percent
from megatron.reports.significance import (
    SIGNIFICANCE_LEVEL,
    MethodComparison,
    compare_pairs,
    correct_together,
    format_p_value,
    get_seed_variances,
    list_pairs_with_best,
)
from megatron.reports.table_formats import TextTable
from megatron.reports.uncertainty import find_detectable_difference

TEST_POWER = 0.8
"""Probability with which a stated detectable change is found."""
MIN_SECONDS = 1e-9
"""Shortest time that counts as measured, in seconds. Shorter times are not compared."""


def find_text_table(tables: Sequence[ComparisonTable]) -> ComparisonTable | None:
    """Return the table of perplexities over lengths with the most methods."""
    candidates = [
        table
        for table in tables
        if table.metric.name == "perplexity" and table.axis.name == "length" and len(table.x_values) > 1
    ]
    return max(candidates, key=lambda table: len(table.methods), default=None)


_HOLM_NOTE = (
    f"A difference is significant if p is below {SIGNIFICANCE_LEVEL:.0%} after Holm's correction for all tests of this "
    "page: those of added components, and those of all pairs of methods at the largest length. All pairs count, "
    "because the best method is selected by its result."
)


@dataclass(frozen=True)
class Ablation:
    """Two methods that differ in one component."""

    name: str
    """Name of the added component, a processor or a temperature."""
    method: str
    base: str


@dataclass(frozen=True)
class Leaderboard:
    """Configuration of a leaderboard.

    Args:
        baseline: method that costs are relative to.
        ablations: pairs of methods to compare.
        num_shown: number of best methods in figures.
        plan: runs of the complete leaderboard; if None, no run counts as missing.
    """

    baseline: str
    ablations: tuple[Ablation, ...] = ()
    num_shown: int = 6
    plan: LeaderboardPlan | None = None


class LeaderboardReport:
    """Contents of a leaderboard, computed from tables.

    Args:
        leaderboard: configuration with baseline and ablations.
        tables: tables of all records.
    """

    def __init__(self, leaderboard: Leaderboard, tables: Sequence[ComparisonTable]) -> None:
        self.leaderboard = leaderboard
        plan = leaderboard.plan
        self.missing = {} if plan is None else plan.list_missing_runs(r for table in tables for r in table.results)
        """Benchmark → method → seeds without a result; empty if nothing is missing."""
        unfinished = [table for table in tables if plan and plan.find_table_benchmark(table) in self.missing]
        self.ranked_benchmarks = build_ranked_benchmarks([table for table in tables if table not in unfinished])
        self.unranked_benchmarks = build_ranked_benchmarks(unfinished)
        """Columns of benchmarks with missing runs."""
        baselines = {method for table in tables for method in table.trivial_baselines}
        methods = [m for m in dict.fromkeys(m for table in tables for m in table.methods) if m not in baselines]
        self.reevaluated = find_reevaluated_methods(tables)
        """Methods that are further evaluations of the trained models of another → that method; they are not ranked."""
        ranked = self.ranked_benchmarks or self.unranked_benchmarks
        self.ranking, ranks = rank_methods(ranked, methods, self.reevaluated)
        self.ranks = ranks if self.ranked_benchmarks else {}
        self.text = find_text_table(tables)
        self.costs = {} if self.text is None else measure_costs(self.text, leaderboard.baseline)
        self.ablations: dict[float, dict[Ablation, MethodComparison]] = {}
        """Length → comparison of each ablation's methods."""
        self.against_best: dict[str, MethodComparison] = {}
        """Comparisons with the best method at the largest length."""
        self.num_tests: dict[str, int] = {}
        """Number of tests of ablations, which are planned, and of pairs of methods."""
        if self.text is None:
            return
        text, last = self.text, self.text.x_values[-1]
        planned = compare_pairs(
            text,
            (
                (ablation.method, ablation.base, x)
                for x in dict.fromkeys((text.train_length, last))
                for ablation in leaderboard.ablations
            ),
        )
        pairs = compare_pairs(text, list_pairs_with_best(text, last, self.reevaluated))
        planned_found, pairs_found = correct_together(list(planned.values()), list(pairs.values()))
        planned = dict(zip(planned, planned_found, strict=True))
        for x in (text.train_length, last):
            self.ablations[x] = {
                ablation: planned[pair]
                for ablation in leaderboard.ablations
                if (pair := (ablation.method, ablation.base, x)) in planned
            }
        self.against_best = {
            method: comparison
            for (method, other, _), comparison in zip(pairs, pairs_found, strict=True)
            if other == self.best_text_method
        }
        self.num_tests = {"planned": _count_tests(planned_found), "pairs": _count_tests(pairs_found)}

    def find_detectable_change(self, x: float) -> float | None:
        """Compute the smallest change that the page's tests of pairs detect with probability `TEST_POWER`.

        The methods compared have the median variance of those with the most seeds.

        Returns:
            A relative change, 0.1 for 10%; None if nothing is tested, or if only tenfold differences are detectable.
        """
        text = self.text
        assert text is not None
        variances = get_seed_variances(text, x)
        usual = [own for method, own in variances.items() if text.cells[method, x].num_seeds == text.max_seeds]
        num_tests = self.num_tests["pairs"] * sum(count > 0 for count in self.num_tests.values())
        if not usual or not num_tests:
            return None
        middle = sorted(usual, key=lambda own: own.variance)[len(usual) // 2]
        if middle.degrees_of_freedom < 2:  # two seeds: the t distribution has no variance
            return None
        size = find_detectable_difference(middle, text.max_seeds, SIGNIFICANCE_LEVEL / num_tests, TEST_POWER)
        return math.expm1(size) if size <= math.log(10) else None

    @property
    def largest(self) -> str:
        """Largest length as a multiple of the training length, for example 32×."""
        assert self.text is not None
        return format_multiple(self.text.x_values[-1] / self.text.train_length)

    @property
    def best_text_method(self) -> str | None:
        """Method with the lowest perplexity at the largest length."""
        assert self.text is not None
        last = self.text.x_values[-1]
        cells = {m: cell.mean for (m, x), cell in self.text.cells.items() if x == last and m not in self.reevaluated}
        return min(cells, key=cells.__getitem__) if cells else None

    @property
    def trained_methods(self) -> list[str]:
        """Methods with their own trained models, in the order of the leaderboard."""
        return [method for method in self.ranking if method not in self.reevaluated]

    def list_shown_methods(self) -> list[str]:
        """Return the methods in figures: the best-ranked ones and the baseline."""
        drawn = self.ranking[: self.leaderboard.num_shown]
        baseline = self.leaderboard.baseline
        return [*drawn, baseline] if baseline in self.ranking and baseline not in drawn else drawn

    def build_tables(self) -> list[TextTable]:
        tables = [self._build_board()] if self.ranked_benchmarks or self.unranked_benchmarks else []
        if self.leaderboard.plan is not None:
            missing_table = build_missing_runs_table(self.leaderboard.plan, self.missing)
            tables += [] if missing_table is None else [missing_table]
        if any(self.ablations.values()):
            tables.append(self._build_ablations_table())
        if self.costs:
            tables.append(self._build_costs_table())
        return tables

    def _build_board(self) -> TextTable:
        headers, text, notes = ["rank"], self.text, []
        columns = [*self.ranked_benchmarks, *self.unranked_benchmarks]
        if text is not None:
            headers.append("perplexity at 1×")
        headers += [column.title for column in self.ranked_benchmarks]
        headers += [f"{column.title} (incomplete)" for column in self.unranked_benchmarks]
        if text is not None:
            headers += [f"change to {self.largest}", f"from the best at {self.largest}"]
        has_times = any(cost.step is not None for cost in self.costs.values())
        if has_times:
            headers.append("training step")
        places, rows = estimate_ranks(self.ranked_benchmarks, self.ranks), []
        for method in self.ranking:
            cells = [str(places.get(method, "–"))]
            if text is not None:
                cell = text.cells.get((method, text.train_length))
                cells.append("–" if cell is None else str(replace(cell, is_best=False)))
            cells += [column.format_score(method) for column in columns]
            if text is not None:
                change = text.compute_change(method, text.train_length, text.x_values[-1])
                cells.append("–" if change is None else format_percent(change.mean - 1, min_decimals=1))
                cells.append(self._describe_distance(method))
            if has_times:
                cost = self.costs.get(method)
                cells.append(_format_ratio(None if cost is None else cost.step))
            rows.append((method, tuple(cells)))
        notes.append(
            "Mean rank: ranks are averaged within each kind of benchmark (text, needles, other tasks), then over "
            "kinds; a method without a result ranks last in a benchmark."
        )
        if any(place.interval is not None for place in places.values()):
            notes.append(
                "The interval of a rank follows from the uncertainty of each mean over its seeds; the result of a "
                "single seed is treated as exact."
            )
        if self.ranks and len(self.ranks) < len(self.trained_methods):
            notes.append(
                f"Ranks cover the {len(self.ranks)} methods that every benchmark evaluated; the others follow, sorted "
                f"by {self.ranked_benchmarks[0].title}."
            )
        for trained in dict.fromkeys(self.reevaluated.values()):
            evaluated = [method for method in self.ranking if self.reevaluated.get(method) == trained]
            notes.append(
                f"Not ranked, because they evaluate the trained models of {trained} with other options: "
                f"{', '.join(evaluated)}."
            )
        if text is not None:
            notes.append(_HOLM_NOTE)
        for column in self.ranked_benchmarks:
            if tied := count_tied_methods({m: column.scores[m] for m in self.ranks if m in column.scores}):
                notes.append(f"Ties in {column.title}: {tied} of {len(column.scores)} methods share their score.")
        if any(column.partial_num_seeds for column in columns):
            notes.append(
                "n is the number of seeds of a method that has fewer seeds than others; it also applies to its "
                "differences."
            )
        lead = tuple(self._describe_columns())
        return TextTable("Leaderboard", "method", tuple(headers), tuple(rows), tuple(notes), lead)

    def _describe_columns(self) -> Iterator[str]:
        """Yield the sentences above the table, which explain its columns."""
        if self.missing and self.leaderboard.plan is not None:
            yield describe_completeness(self.leaderboard.plan, self.missing)
        has_intervals = any(column.mean_variances for column in self.ranked_benchmarks)
        interval = "; parentheses contain the 95% interval of a rank over seeds" if has_intervals else ""
        if self.ranked_benchmarks:
            yield f"Methods are sorted by their mean rank over the benchmarks, the best first{interval}."
        if self.text is not None:
            yield (
                f"Perplexity is measured at the training length (1×, {self.text.train_length:,} tokens) and at "
                f"{self.largest}; lower is better."
            )
        shown = (*self.ranked_benchmarks, *self.unranked_benchmarks)
        beyond = [column for column in shown if column.metric.name == "mean_accuracy"]
        if beyond:
            yield (
                "Tasks are scored by the mean accuracy over all lengths beyond training, in percent; higher is better."
            )
        if self.text is not None:
            yield (
                f"“From the best” is the difference in perplexity from {self.best_text_method} at {self.largest}, in "
                "parentheses if it is not significant over seeds."
            )
        if any(column.deviations for column in shown):
            yield "± is the standard deviation over seeds."

    def _describe_distance(self, method: str) -> str:
        if method == self.best_text_method:
            return "best"
        comparison = self.against_best.get(method)
        if comparison is None:
            return "–"
        text = format_percent(comparison.change - 1, min_decimals=1)
        return text if comparison.verdict in ("better", "worse") else f"({text})"

    def _build_ablations_table(self) -> TextTable:
        lengths = list(self.ablations)
        assert self.text is not None
        rows = []
        for ablation in self.leaderboard.ablations:
            found = [self.ablations[length].get(ablation) for length in lengths]
            cells = ["–" if comparison is None else _describe_ablation(comparison) for comparison in found]
            cells += [_format_ratio(self._compare_costs(ablation, field)) for field in ("step", "scoring")]
            rows.append((f"{ablation.name} on {ablation.base}", tuple(cells)))
        return TextTable(
            "Effect of processors and temperatures: perplexity relative to the method without them",
            "added component",
            (
                *(f"{format_multiple(length / self.text.train_length)} ({length:,.0f})" for length in lengths),
                "training step",
                f"scoring at {self.largest}",
            ),
            tuple(rows),
            (
                f"p: paired two-sided t-test over the seeds that both methods have. {_HOLM_NOTE}",
                'With few seeds only large and consistent differences are significant: "not significant" does not mean '
                "equal.",
                *(
                    ["Intervals: 95%, over blocks of the text, for two models with the same seed, not for methods."]
                    if any(c.text_interval is not None for length in lengths for c in self.ablations[length].values())
                    else []
                ),
            ),
        )

    def _compare_costs(self, ablation: Ablation, field: str) -> float | None:
        """Return the cost of a method relative to that without the component, or None if either is unknown."""
        own, base = (
            getattr(self.costs[name], field) if name in self.costs else None
            for name in (ablation.method, ablation.base)
        )
        return own / base if own is not None and base else None

    def _build_costs_table(self) -> TextTable:
        def format_memory(value: float | None) -> str:
            return "–" if value is None else f"{value:.2f}"

        has_ratios = any(cost.step is not None or cost.scoring is not None for cost in self.costs.values())
        rows = []
        for method in self.ranking:
            cost = self.costs.get(method)
            if cost is None:
                continue
            parameters = "–" if cost.parameters is None else f"{cost.parameters:,}"
            cells = (_format_ratio(cost.step), _format_ratio(cost.scoring)) if has_ratios else ()
            memory = (format_memory(cost.train_memory), format_memory(cost.scoring_memory))
            rows.append((method, (parameters, *cells, *memory)))
        baseline = self.leaderboard.baseline
        assert self.text is not None
        times = (
            "Times are CPU seconds"
            if has_cpu_times(self.text)
            else "Times are wall-clock seconds of runs that may have shared a machine"
        )
        return TextTable(
            f"Costs of methods, relative to {baseline}" if has_ratios else "Costs of methods",
            "method",
            (
                "parameters",
                *(("training step", f"scoring at {self.largest}") if has_ratios else ()),
                "training memory (GiB)",
                f"scoring memory at {self.largest} (GiB)",
            ),
            tuple(rows),
            (
                f"{times} (medians over steps and seeds), relative to {baseline}."
                if has_ratios
                else f"Times are omitted, because they are relative to {baseline}, whose times are unknown.",
                "Memory is the peak of one process, including Python and PyTorch.",
            ),
        )


def _count_tests(comparisons: Sequence[MethodComparison]) -> int:
    return sum(comparison.is_tested for comparison in comparisons)


def _format_ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _describe_ablation(comparison: MethodComparison) -> str:
    """Format a comparison as a cell: -11.1%, p 0.027, Holm 1, 3 seeds: not significant."""
    text = format_percent(comparison.change - 1, min_decimals=1)
    if comparison.is_tested:
        p_values = f"p {format_p_value(comparison.p)}, Holm {format_p_value(comparison.holm_p)}"
        return f"{text}, {p_values}, {comparison.num_seeds} seeds: {comparison.verdict}"
    if comparison.text_interval is not None:
        bounds = [format_percent(bound - 1, min_decimals=1) for bound in comparison.text_interval]
        text += f" [{', '.join(bounds)}]"
    return f"{text}, one seed: {comparison.verdict}"


@dataclass(frozen=True)
class MethodCost:
    """Costs of a method relative to the baseline; memory in GiB. None if unknown."""

    parameters: int | None
    step: float | None
    scoring: float | None
    """Duration of scoring at the largest length, relative to the baseline."""
    train_memory: float | None
    scoring_memory: float | None

    @property
    def has_times(self) -> bool:
        return self.step is not None and self.scoring is not None


def measure_costs(table: ComparisonTable, baseline: str) -> dict[str, MethodCost]:
    """Compute the costs of the methods in a table of perplexities.

    Models on CPUs are compared by CPU time, which other processes hardly affect; models on a GPU by wall time.
    """
    last, prefix = table.x_values[-1], "cpu_" if has_cpu_times(table) else ""

    def get_median(method: str, field: str, *, at_last: bool = False) -> float | None:
        values = [
            value
            for record in table.records
            if record.method == method and (not at_last or record.x_value == last)
            and (value := getattr(record, field)) is not None
        ]  # fmt: skip
        return statistics.median(values) if values else None

    def compare(method: str, field: str, *, at_last: bool = False) -> float | None:
        value = get_median(method, field, at_last=at_last)
        base = get_median(baseline, field, at_last=at_last)
        return None if value is None or base is None or base < MIN_SECONDS else value / base

    costs = {}
    for method in table.methods:
        parameters = get_median(method, "parameters")
        costs[method] = MethodCost(
            None if parameters is None else round(parameters),
            compare(method, f"step_{prefix}seconds"),
            compare(method, f"{prefix}seconds", at_last=True),
            get_median(method, "train_memory_gib"),
            get_median(method, "memory_gib", at_last=True),
        )
    return costs


def has_cpu_times(table: ComparisonTable) -> bool:
    """Return True if all records of models are from CPUs and include CPU times."""
    records = [record for record in table.records if not record.is_trivial_baseline]
    return all(
        record.device == "cpu" and record.step_cpu_seconds is not None and record.cpu_seconds is not None
        for record in records
    )

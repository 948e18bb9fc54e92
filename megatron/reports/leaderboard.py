"""Many methods in one table with ranks, what a component adds to each, and what each costs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.contests import build_contests, rank_methods
from megatron.reports.method_comparison import (
    TextComparison,
    compare_texts,
    find_text_table,
    has_cpu_times,
    measure_costs,
)
from megatron.reports.metrics import format_number, format_percent
from megatron.reports.table_formats import TextTable
from megatron.reports.x_axes import format_multiple


@dataclass(frozen=True)
class Ablation:
    """Two methods that differ in one thing alone."""

    name: str
    """What is added: a processor or a temperature."""
    method: str
    base: str


@dataclass(frozen=True)
class Leaderboard:
    """What a report says of many methods at once.

    Args:
        baseline: the method that costs are told against.
        ablations: pairs of methods that are compared.
        num_shown: the best methods that pictures show.
    """

    baseline: str
    ablations: tuple[Ablation, ...] = ()
    num_shown: int = 6


class LeaderboardReport:
    """What is shown of a leaderboard.

    Args:
        leaderboard: whose baseline and ablations they are.
        tables: of all records.
    """

    def __init__(self, leaderboard: Leaderboard, tables: Sequence[ComparisonTable]) -> None:
        self.leaderboard = leaderboard
        self.contests = build_contests(tables)
        baselines = {method for table in tables for method in table.trivial_baselines}
        methods = [m for m in dict.fromkeys(m for table in tables for m in table.methods) if m not in baselines]
        self.ranking, self.ranks = rank_methods(self.contests, methods)
        self.text = find_text_table(tables)
        self.costs = {} if self.text is None else measure_costs(self.text, leaderboard.baseline)
        self.ablations: dict[float, list[TextComparison]] = {}
        self.against_best: dict[str, TextComparison] = {}
        if self.text is None:
            return
        pairs = [(ablation.method, ablation.base) for ablation in leaderboard.ablations]
        for x in (self.text.train_length, self.text.x_values[-1]):
            self.ablations[x] = compare_texts(self.text, pairs, x)
        if (best := self.best_text_method) is not None:
            others = [(method, best) for method in methods if method != best]
            compared = compare_texts(self.text, others, self.text.x_values[-1])
            self.against_best = {comparison.method: comparison for comparison in compared}

    @property
    def largest(self) -> str:
        """The largest length as sentences name it: 32×."""
        assert self.text is not None
        return format_multiple(self.text.x_values[-1] / self.text.train_length)

    @property
    def best_text_method(self) -> str | None:
        """The method with the least perplexity at the largest length."""
        assert self.text is not None
        cells = {m: cell.mean for (m, x), cell in self.text.cells.items() if x == self.text.x_values[-1]}
        return min(cells, key=cells.__getitem__) if cells else None

    def list_shown_methods(self) -> list[str]:
        """Those that pictures show: the first of the ranking, and the baseline."""
        drawn = self.ranking[: self.leaderboard.num_shown]
        baseline = self.leaderboard.baseline
        return [*drawn, baseline] if baseline in self.ranking and baseline not in drawn else drawn

    def build_tables(self) -> list[TextTable]:
        tables = [self._build_board()] if self.contests else []
        if any(self.ablations.values()):
            tables.append(self._build_ablations_table())
        if self.costs:
            tables.append(self._build_costs_table())
        return tables

    def _build_board(self) -> TextTable:
        kinds = list(dict.fromkeys(contest.kind for contest in self.contests))
        rank_headers = ["rank", *(f"rank in {kind}" for kind in kinds if len(kinds) > 1)]
        headers = [*rank_headers]
        text, notes = self.text, []
        if text is not None:
            headers.append("perplexity at 1×")
        headers += [contest.title for contest in self.contests]
        if text is not None:
            headers += [f"change to {self.largest}", f"from the best at {self.largest}"]
        rows = []
        for method in self.ranking:
            ranks = self.ranks.get(method)
            cells = ["–"] * len(rank_headers)
            if ranks is not None:
                means = [statistics.fmean(ranks.values()), *(ranks[kind] for kind in kinds)]
                cells = [format_number(mean).removesuffix(".00") for mean in means[: len(rank_headers)]]
            if text is not None:
                cell = text.cells.get((method, text.train_length))
                cells.append("–" if cell is None else str(replace(cell, is_best=False)))
            cells += [contest.format_score(method) for contest in self.contests]
            if text is not None:
                change = text.compute_change(method, text.train_length, text.x_values[-1])
                cells.append("–" if change is None else format_percent(change.mean - 1, min_decimals=1))
                cells.append(self._describe_distance(method))
            rows.append((method, tuple(cells)))
        notes.append(
            "Sorted by the mean over kinds of the mean rank in each kind; 1 is the best, and what has no number is "
            "last."
        )
        if len(self.ranks) < len(self.ranking):
            notes.append(
                f"Ranks are among the {len(self.ranks)} methods that every contest asked; the others follow, by "
                f"{self.contests[0].title}."
            )
        if text is not None:
            notes.append(
                f"From the best: perplexity over that of {self.best_text_method}, on the same text and seeds; in "
                "brackets where it may be chance: Holm's p over all methods is not below 5%, or seeds disagree."
            )
        if any(contest.deviations for contest in self.contests):
            notes.append("± is the standard deviation over seeds, of methods that have several.")
        if any(contest.partial_num_seeds for contest in self.contests):
            notes.append(
                "Where n stands, a method has so many seeds and others have more; its change and distance rest on them."
            )
        return TextTable("Leaderboard", "method", tuple(headers), tuple(rows), tuple(notes))

    def _describe_distance(self, method: str) -> str:
        if method == self.best_text_method:
            return "best"
        comparison = self.against_best.get(method)
        if comparison is None:
            return "–"
        text = format_percent(comparison.change - 1, min_decimals=1)
        return f"({text})" if comparison.verdict == "no difference" else text

    def _build_ablations_table(self) -> TextTable:
        lengths = list(self.ablations)
        assert self.text is not None
        found = {(length, c.method, c.base): c for length in lengths for c in self.ablations[length]}
        rows = []
        for ablation in self.leaderboard.ablations:
            cells = [str(found.get((length, ablation.method, ablation.base), "–")) for length in lengths]
            rows.append((f"{ablation.name} on {ablation.base}", tuple(cells)))
        return TextTable(
            "What processors and temperatures change: perplexity over that of the method without",
            "what is added",
            tuple(f"{format_multiple(length / self.text.train_length)} ({length:,.0f})" for length in lengths),
            tuple(rows),
            (
                "In brackets the 95% interval by a paired bootstrap over blocks of the same text; p of a paired t-test "
                "over blocks, Holm-corrected for the ablations of a column.",
                "How many seeds have the sign of the mean stands behind it; better and worse need p below 5% and all "
                "seeds of one sign.",
            ),
        )

    def _build_costs_table(self) -> TextTable:
        def format_ratio(value: float | None) -> str:
            return "–" if value is None else f"{value:.2f}×"

        def format_memory(value: float | None) -> str:
            return "–" if value is None else f"{value:.2f}"

        rows = []
        for method in self.ranking:
            cost = self.costs.get(method)
            if cost is None:
                continue
            parameters = "–" if cost.parameters is None else f"{cost.parameters:,}"
            cells = (format_ratio(cost.step), format_ratio(cost.scoring))
            memory = (format_memory(cost.train_memory), format_memory(cost.scoring_memory))
            rows.append((method, (parameters, *cells, *memory)))
        baseline = self.leaderboard.baseline
        assert self.text is not None
        times = (
            "Times are seconds of processors"
            if has_cpu_times(self.text)
            else "Times are seconds, where several runs shared a machine,"
        )
        return TextTable(
            f"What methods cost, against {baseline}",
            "method",
            (
                "parameters",
                "training step",
                f"reading {self.largest}",
                "GiB in training",
                f"GiB reading {self.largest}",
            ),
            tuple(rows),
            (
                f"{times} on the machine named below: medians over steps and seeds, over those of {baseline}.",
                "Memory is the largest of a process, with Python and PyTorch in it.",
            ),
        )

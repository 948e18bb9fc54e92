"""Many methods in one table with ranks, and three questions answered in words that are made of the numbers.

**Contests.** Each table of perplexity over lengths is one, at its largest length; each task is one, by its mean
accuracy beyond training or, where it was asked by depth, by its effective length. In a contest methods are ranked,
equal ones share the mean of their ranks, and one without a number is last. A kind of contest (text, tasks, needles) is
the mean of its ranks; the table is sorted by the mean over kinds, so that many tasks count no more than one text. Ranks
are among the methods that every contest asked; the others follow without a rank, by the first contest.

**Differences.** Two methods are compared on the same blocks of text, by the seeds that both have:

    d_b      the mean over seeds of the difference of their nll per token in block b
    change   exp of the mean of d_b: the geometric mean over seeds of the ratio of their perplexities
    p        of a paired two-sided t-test of d_b against 0 over blocks; Holm's correction over all that are tested
    beyond chance   the corrected p is below 5%, and every seed says the same

The test says what another text would change. What another training would is told by the seeds alone: a difference of
one seed is marked as such.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.reports.bootstrap import compute_percentile_interval, draw_bootstrap_means
from megatron.reports.comparison_table import ComparisonTable, pair_by_seed
from megatron.reports.metrics import Metric, format_number, format_percent
from megatron.reports.records import Record
from megatron.reports.significance import SIGNIFICANCE_LEVEL, apply_holm_correction, format_p_value
from megatron.reports.table_formats import TextTable
from megatron.reports.x_axes import format_multiple

HOLDS_WITHIN = 1.05
"""Perplexity at the largest length over that at the training length, up to which a method is said to hold."""
VERDICT_WORDS = {
    "better": "lowers perplexity",
    "worse": "raises it",
    "no difference": "makes no difference beyond chance",
}
"""What the component of an ablation does, in a sentence."""
MAX_NAMED = 8
"""Methods that a sentence names; more are counted."""


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


@dataclass(frozen=True)
class Contest:
    """One column of ranks."""

    kind: str
    """text, tasks or needles."""
    title: str
    metric: Metric
    scores: Mapping[str, float]
    """Method → what it is ranked by; methods without a number are missing."""
    deviations: Mapping[str, float]
    """Over seeds, of methods with several."""
    methods: frozenset[str]
    """That were asked, with a number or without."""
    floor: float | None = None
    """What the best predictor that learned nothing reaches."""

    def is_above_floor(self, method: str) -> bool:
        """Is a method better than what learned nothing? So is every one where nothing is known of that."""
        get_key = self.metric.get_sort_key
        return self.floor is None or get_key(self.scores[method]) < get_key(self.floor)

    def format_score(self, method: str) -> str:
        score = self.scores.get(method)
        if score is None:
            return "–"
        deviation = self.deviations.get(method)
        if deviation is None:
            return self.metric.format_value(score)
        return self.metric.format_value_with_deviation(score, deviation)

    def rank_methods(self, methods: Sequence[str]) -> dict[str, float]:
        """From 1, the best. Equal scores share the mean of their ranks; methods without one share the last."""
        keys = {
            method: self.metric.get_sort_key(self.scores[method]) if method in self.scores else math.inf
            for method in methods
        }
        ordered = sorted(keys.values())
        return {method: ordered.index(key) + 1 + (ordered.count(key) - 1) / 2 for method, key in keys.items()}


@dataclass(frozen=True)
class TextComparison:
    """Of two methods at one length of one text."""

    method: str
    base: str
    length: int
    change: float
    interval: tuple[float, float]
    """95%, by a paired bootstrap over blocks."""
    seed_changes: tuple[float, ...]
    p: float
    holm_p: float = math.nan

    @property
    def verdict(self) -> str:
        """better, worse, or no difference: beyond chance, and alike for every seed."""
        if self.holm_p < SIGNIFICANCE_LEVEL:
            if all(change < 1 for change in self.seed_changes):
                return "better"
            if all(change > 1 for change in self.seed_changes):
                return "worse"
        return "no difference"

    def __str__(self) -> str:
        percent = [format_percent(bound - 1, min_decimals=1) for bound in self.interval]
        agreeing = sum((change < 1) == (self.change < 1) for change in self.seed_changes)
        seeds = "one seed" if len(self.seed_changes) == 1 else f"{agreeing} of {len(self.seed_changes)} seeds"
        change = format_percent(self.change - 1, min_decimals=1)
        return f"{change} [{', '.join(percent)}], p {format_p_value(self.holm_p)}, {seeds}: {self.verdict}"


def compare_texts(table: ComparisonTable, pairs: Sequence[tuple[str, str]], length: float) -> list[TextComparison]:
    """Compare pairs of methods, each with its base, at one length; Holm's correction is over all of them.

    Pairs without a seed in common, or without sums of the same blocks, are left out.
    """
    by_method: dict[str, list[Record]] = {}
    for record in table.records:
        if record.x_value == length and not record.is_trivial_baseline:
            by_method.setdefault(record.method, []).append(record)
    found = []
    for method, base in pairs:
        seeds = [
            pair
            for pair in pair_by_seed(by_method.get(method, ()), by_method.get(base, ()))
            if pair[0].tokens_per_block is not None and pair[0].tokens_per_block == pair[1].tokens_per_block
        ]
        if seeds and len(seeds[0][0].block_sums or ()) > 1:
            found.append(_compare_blocks(method, base, round(length), seeds))
    corrected = apply_holm_correction([comparison.p for comparison in found])
    return [replace(comparison, holm_p=p) for comparison, p in zip(found, corrected, strict=True)]


def _compare_blocks(method: str, base: str, length: int, pairs: Sequence[tuple[Record, Record]]) -> TextComparison:
    from scipy import stats  # takes a second to import

    counts = np.array(pairs[0][0].tokens_per_block, dtype=np.int64)
    differences = np.array(
        [np.array(one.block_sums) - np.array(other.block_sums) for one, other in pairs]
    )  # [seeds, blocks]
    means = differences.mean(axis=0) / counts
    seed_changes = tuple(math.exp(total / counts.sum()) for total in differences.sum(axis=1))
    draws = draw_bootstrap_means(differences.mean(axis=0)[None], counts)
    assert draws is not None  # there are two blocks
    low, high = compute_percentile_interval(draws[0])
    p = 1.0 if np.ptp(means) == 0 and means[0] == 0 else float(stats.ttest_1samp(means, 0.0).pvalue)
    change = math.exp(differences.mean(axis=0).sum() / counts.sum())
    return TextComparison(method, base, length, change, (math.exp(low), math.exp(high)), seed_changes, p)


def build_contests(tables: Sequence[ComparisonTable]) -> list[Contest]:
    """The contests of tables: of a dataset's metrics the one that says most."""
    contests = []
    for table in tables:
        name, dataset = table.metric.name, table.records[0].dataset
        if table.axis.name != "length" or len(set(table.methods) - set(table.trivial_baselines)) < 2:
            continue
        task = _name_task(table, tables)
        last = table.x_values[-1]
        if name == "perplexity" and len(table.x_values) > 1:
            title = f"perplexity at {format_multiple(last / table.train_length)}"
            contests.append(_build_contest("text", title, table, last))
        elif name == "effective_length":
            contests.append(_build_contest("needles", f"effective length, {task}", table, last))
        elif name == "mean_accuracy" and not _has_metric(tables, dataset, "effective_length"):
            contests.append(_build_contest("tasks", f"{task}, % beyond training", table, last))
    return contests


def _name_task(table: ComparisonTable, tables: Sequence[ComparisonTable]) -> str:
    """A task's name, with its options where another table's differs in nothing else."""
    names = [(other.records[0].dataset or other.protocol).removeprefix("task ") for other in (table, *tables)]
    short = names[0].partition("(")[0]
    return names[0] if any(name.partition("(")[0] == short for name in set(names) - {names[0]}) else short


def _has_metric(tables: Sequence[ComparisonTable], dataset: str | None, name: str) -> bool:
    return any(table.metric.name == name and table.records[0].dataset == dataset for table in tables)


def _build_contest(kind: str, title: str, table: ComparisonTable, x: float) -> Contest:
    cells = {
        method: table.cells[method, x]
        for method in table.methods
        if (method, x) in table.cells and method not in table.trivial_baselines
    }
    floors = [table.cells[method, x].mean for method in table.trivial_baselines if (method, x) in table.cells]
    return Contest(
        kind,
        title,
        table.metric,
        {method: cell.mean for method, cell in cells.items()},
        {method: cell.deviation for method, cell in cells.items() if cell.deviation is not None},
        frozenset(table.methods) - set(table.trivial_baselines),
        table.metric.select_best(floors) if floors else None,
    )


def rank_methods(contests: Sequence[Contest], methods: Sequence[str]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """All methods in the order of the leaderboard, and of those that every contest asked the mean rank by kind."""
    if not contests:  # one method alone
        return list(methods), {}
    asked = [method for method in methods if all(method in contest.methods for contest in contests)]
    scores, get_key = contests[0].scores, contests[0].metric.get_sort_key
    others = sorted(
        set(methods) - set(asked),
        key=lambda method: (get_key(scores[method]) if method in scores else math.inf, method),
    )
    kinds = list(dict.fromkeys(contest.kind for contest in contests))
    ranks = [(contest.kind, contest.rank_methods(asked)) for contest in contests]
    by_method = {
        method: {kind: statistics.fmean(each[method] for other, each in ranks if other == kind) for kind in kinds}
        for method in asked
    }
    return [*sorted(asked, key=lambda method: statistics.fmean(by_method[method].values())), *others], by_method


@dataclass(frozen=True)
class MethodCost:
    """What a method costs, over what the baseline costs; memory in GiB. None is not known."""

    parameters: int | None
    step: float | None
    scoring: float | None
    """Seconds of scoring at the largest length."""
    train_memory: float | None
    scoring_memory: float | None

    @property
    def has_times(self) -> bool:
        return self.step is not None and self.scoring is not None


def measure_costs(table: ComparisonTable, baseline: str) -> dict[str, MethodCost]:
    """The costs of the methods of a table of perplexities.

    A model on CPUs is charged the seconds of its processors, which runs beside it hardly change; on a GPU, seconds.
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
        return None if value is None or not base else value / base

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
    """Do all its records tell the seconds of processors, of models that ran on nothing else?"""
    records = [record for record in table.records if not record.is_trivial_baseline]
    return all(
        record.device == "cpu" and record.step_cpu_seconds is not None and record.cpu_seconds is not None
        for record in records
    )


def find_text_table(tables: Sequence[ComparisonTable]) -> ComparisonTable | None:
    """The table of perplexities over lengths that has most methods."""
    candidates = [
        table
        for table in tables
        if table.metric.name == "perplexity" and table.axis.name == "length" and len(table.x_values) > 1
    ]
    return max(candidates, key=lambda table: len(table.methods), default=None)


@dataclass(frozen=True)
class Answer:
    """A question and what the numbers say."""

    question: str
    sentences: tuple[str, ...]


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

    # The tables.

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
                cells.append("–" if cell is None else str(replace(cell, is_best=False, partial_num_seeds=None)))
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
        found = {(length, comparison.method): comparison for length in lengths for comparison in self.ablations[length]}
        rows = []
        for ablation in self.leaderboard.ablations:
            cells = [str(found.get((length, ablation.method), "–")) for length in lengths]
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

    # The answers.

    def build_answers(self) -> list[Answer]:
        if self.text is None:
            return []
        names = list(dict.fromkeys(ablation.name for ablation in self.leaderboard.ablations))
        return [
            Answer(f"Which method holds at {self.largest}?", tuple(self._tell_who_holds())),
            *(Answer(f"Does {name} add something to others?", tuple(self._tell_what_adds(name))) for name in names),
            Answer("What does it cost?", tuple(self._tell_costs(names))),
        ]

    def _tell_who_holds(self) -> Iterator[str]:
        text = self.text
        assert text is not None
        last = text.x_values[-1]
        changes = {
            method: change.mean
            for method in self.ranking
            if (change := text.compute_change(method, text.train_length, last)) is not None
        }
        best = self.best_text_method
        if best is None or not changes:
            yield f"No method has a number at {self.largest}."
            return
        holding = [method for method in changes if changes[method] <= HOLDS_WITHIN]
        holding.sort(key=lambda method: text.cells[method, last].mean)
        limit = format_percent(HOLDS_WITHIN - 1)
        yield (
            f"Of {len(changes)} methods {len(holding)} hold: their perplexity at {self.largest} is at most {limit} "
            f"above that at the training length ({_name_methods(holding)})."
        )
        lost = sorted((method for method in changes if method not in holding), key=changes.__getitem__)
        if lost:
            worst = lost[-1]
            yield (
                f"The others rise, least {lost[0]} ({format_percent(changes[lost[0]] - 1)}) and most {worst} "
                f"({format_percent(changes[worst] - 1)})."
            )
        equal = [method for method, c in self.against_best.items() if c.verdict == "no difference"]
        equal.sort(key=lambda method: text.cells[method, last].mean)
        value = text.metric.format_value(text.cells[best, last].mean)
        if not self.against_best:
            told = "whether others are as good within chance is not known"
        elif not equal:
            told = "no other method is as good within chance"
        else:
            told = f"{len(equal)} {'is' if len(equal) == 1 else 'are'} not worse beyond chance ({_name_methods(equal)})"
        yield f"The least perplexity at {self.largest} is that of {best}, {value}; {told}."
        missing = [m for m in self.ranking if (m, last) not in text.cells and m in text.methods]
        if missing:
            yield f"Without a number there: {_name_methods(missing)}."
        for contest in self.contests:
            if contest.kind != "text" and contest.scores:
                yield _tell_winner(contest)

    def _tell_what_adds(self, name: str) -> Iterator[str]:
        text = self.text
        assert text is not None
        bases = {(a.method, a.base) for a in self.leaderboard.ablations if a.name == name}
        for length, comparisons in self.ablations.items():
            own = [c for c in comparisons if (c.method, c.base) in bases]
            where = format_multiple(length / text.train_length)
            if not own:
                yield f"At {where} no pair of methods with {name} and without could be compared."
                continue
            parts = []
            for verdict, words in VERDICT_WORDS.items():
                some = sorted((c for c in own if c.verdict == verdict), key=lambda c: c.change)
                named = [f"{c.base} {format_percent(c.change - 1, min_decimals=1)}" for c in some]
                if some:
                    parts.append(f"{words} on {len(some)} of {len(own)} ({_name_methods(named)})")
            yield f"At {where} {name} {', '.join(parts)}."
        single = sum(len(c.seed_changes) == 1 for c in self.ablations[text.x_values[-1]] if (c.method, c.base) in bases)
        if single:
            yield f"{single} of these pairs rest on one seed, so another training may say otherwise."

    def _tell_costs(self, names: Sequence[str]) -> Iterator[str]:
        text, baseline = self.text, self.leaderboard.baseline
        assert text is not None
        best = self.best_text_method
        if best is not None and best in self.costs and best != baseline:
            yield f"Against {baseline}, {best}, the best at {self.largest}, takes {self._describe_cost(best)}."
        for name in names:
            pairs = [a for a in self.leaderboard.ablations if a.name == name]
            steps = self._compare_costs(pairs, "step")
            scoring = self._compare_costs(pairs, "scoring")
            if steps and scoring:
                yield (
                    f"{name} makes a training step {statistics.median(steps):.2f} times as long as the same method "
                    f"without it ({min(steps):.2f} to {max(steps):.2f}), and reading {self.largest} "
                    f"{statistics.median(scoring):.2f} times ({min(scoring):.2f} to {max(scoring):.2f})."
                )
        if best is None or not self.against_best or not self.costs[best].has_times:
            return
        cheap = self._find_cheap()
        if cheap:
            yield (
                f"Not worse than the best beyond chance, and at most 10% slower than {baseline} in training and in "
                f"reading {self.largest}: {_name_methods(cheap)}."
            )
        else:
            yield (
                f"No method that is not worse than the best beyond chance is at most 10% slower than {baseline} in "
                f"training and in reading {self.largest}."
            )

    def _find_cheap(self) -> list[str]:
        equal = [method for method, c in self.against_best.items() if c.verdict == "no difference"]
        return [
            method
            for method in (self.best_text_method, *equal)
            if method is not None
            and (cost := self.costs.get(method)) is not None
            and (cost.step or math.inf) <= 1.1
            and (cost.scoring or math.inf) <= 1.1
        ]

    def _describe_cost(self, method: str) -> str:
        cost, base = self.costs[method], self.costs.get(self.leaderboard.baseline)
        parts = []
        if cost.step is not None:
            parts.append(f"{cost.step:.2f} times the training step")
        if cost.scoring is not None:
            parts.append(f"{cost.scoring:.2f} times the time to read {self.largest}")
        if cost.parameters is not None and base is not None and base.parameters:
            share = cost.parameters / base.parameters - 1
            kind = "as many" if not share else f"{abs(share):.1%} {'more' if share > 0 else 'fewer'}"
            parts.append(f"{kind} parameters")
        return ", ".join(parts) or "an unknown share"

    def _compare_costs(self, pairs: Sequence[Ablation], field: str) -> list[float]:
        ratios = []
        for ablation in pairs:
            if ablation.method in self.costs and ablation.base in self.costs:
                own, base = (getattr(self.costs[name], field) for name in (ablation.method, ablation.base))
                if own is not None and base:
                    ratios.append(own / base)
        return ratios


def _tell_winner(contest: Contest) -> str:
    """Who is best in a task, and how many have learned something of it."""
    order = sorted(contest.scores, key=lambda method: contest.metric.get_sort_key(contest.scores[method]))
    top = [method for method in order if contest.scores[method] == contest.scores[order[0]]]
    text = f"In {contest.title}, the best is {_name_methods(top)} with {contest.format_score(order[0])}"
    if contest.floor is None:
        return f"{text}."
    learned = [method for method in order if contest.is_above_floor(method)]
    floor = contest.metric.format_value(contest.floor)
    return f"{text}; {len(learned)} of {len(order)} are above {floor}, which is reached without learning anything."


def _name_methods(names: Sequence[str]) -> str:
    """In a sentence: a, b and c, or the first ones and how many more."""
    if not names:
        return "none"
    if len(names) > MAX_NAMED:
        return f"{', '.join(names[:MAX_NAMED])} and {len(names) - MAX_NAMED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))

"""Comparison tables: which records share a table, and the contents of its cells.

Records of different metrics, axes, protocols, training lengths, or target tokens are never put into one table, because
their numbers are not comparable (`verdict_tables.py` compares training lengths where possible). With several seeds a
cell is their arithmetic mean ± sample standard deviation. The last column is the change from the shortest length to the
largest, with its bootstrap interval and a verdict in one word.

Changes have one definition everywhere (tables, pages, extrapolation criterion, comparisons of methods):

    one seed         the ratio of two values of that seed, or their difference if the metric has no ratios
    several seeds    the geometric mean of these ratios, or the mean of these differences, over the seeds that have
                     both values; a seed with only one of the two does not count
    deviation        the standard deviation of the same kind; for ratios it is a factor, written ×/÷

Ratios of perplexities are exponentials of differences of nll, and are averaged as such. The result does not depend on
whether seeds or lengths are averaged first, a change and its reverse cancel, and significance tests on logarithms test
the same number. Cells remain arithmetic means, as papers print them. If seeds differ much, the ratio of two cells
differs from the change.

Not every cell has every seed. A cell with fewer seeds than the table's maximum shows its n. A change or a comparison
shows its number of pairs. `verdict_tables.py` lists missing results. Trivial baselines have no seeds, and are never
marked as best.
"""

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron.reports import axes
from megatron.reports.axes import RecordAxis, format_multiple
from megatron.reports.method_rows import (
    describe_missing_training_digests,
    describe_unequal_training,
    disambiguate_methods,
    get_table_key,
    quote_method,
)
from megatron.reports.metrics import Metric
from megatron.reports.records import Record
from megatron.reports.run_records import RunFailure

MAX_DENSE_COLUMNS = 10
"""Maximum number of columns of a table over a dense axis."""
PROTOCOL_NOTES = {
    "last": "Protocol last scores the end of each window: the same tokens at every length, with increasing context.",
    "nonoverlapping": "Protocol nonoverlapping scores every token of a window, so early tokens have little context.",
    "overlapping": "Protocol overlapping scores every token with at least the minimum context.",
    "strided": "Protocol strided scores the end of each window, so every token has almost a full window of context.",
}
"""Meaning of each protocol of texts, in one sentence; `report_sentences.py` has the details."""


@dataclass(frozen=True)
class Cell:
    """Mean over seeds of one method at one x value, with the sample standard deviation of several seeds."""

    metric: Metric
    mean: float
    deviation: float | None
    is_best: bool
    interval: tuple[float, float] | None = None  # 95% interval of a single run
    num_seeds: int = 1
    partial_num_seeds: int | None = None  # number of seeds, if other cells of the table have more

    @property
    def mean_text(self) -> str:
        """Mean without deviation, with as many digits as the interval needs."""
        return self.metric.format_value(self.mean, _get_half_width(self.interval))

    @property
    def interval_texts(self) -> tuple[str, ...]:
        """Both ends of the interval; empty if there is none."""
        return tuple(self.metric.format_value(bound, _get_half_width(self.interval)) for bound in self.interval or ())

    def __str__(self) -> str:
        text = (
            self.mean_text
            if self.deviation is None
            else self.metric.format_value_with_deviation(self.mean, self.deviation)
        )
        return text + format_partial_seeds(self.partial_num_seeds) + "*" * self.is_best


@dataclass(frozen=True)
class Change:
    """Change of one method between two lengths, over the seeds that have both."""

    metric: Metric
    mean: float  # geometric mean of ratios, or arithmetic mean of differences
    deviation: float | None  # over seeds, of the same kind; a factor for ratios
    interval: tuple[float, float] | None  # 95% interval of a single run
    verdict: str | None  # rises, falls, or holds; for several seeds their common verdict, else mixed
    num_seeds: int = 1
    partial_num_seeds: int | None = None  # number of seeds, if cells of the table have more

    @property
    def half_width(self) -> float | None:
        """Uncertainty of the change: half the width of its interval, or of the range of most seeds."""
        if self.deviation is None:
            return _get_half_width(self.interval)
        return self.metric.compute_change_half_width(self.mean, self.deviation)

    @property
    def is_negligible(self) -> bool:
        """True if the change holds although its interval excludes no change, because it is negligible."""
        if self.verdict != "holds" or self.interval is None:
            return False
        return not self.interval[0] <= self.metric.neutral_change <= self.interval[1]

    def format_relative(self, change: float) -> str:
        """Format the mean, or an end of the interval, as a distance from no change.

        Examples are -2.8%, +134.4%, +14,492,739%, or -12.30 if the metric has no ratios. All places use the same
        rounding.
        """
        return self.metric.format_relative_change(change, self.half_width, min_decimals=int(abs(change) < 10))

    def __str__(self) -> str:
        if self.deviation is not None:
            text = self.metric.format_change_with_deviation(self.mean, self.deviation)
        else:
            text = self.metric.format_change(self.mean, self.half_width)
            text += "" if self.interval is None else f" {self.metric.format_change_interval(*self.interval)}"
        return (
            text + ("" if self.verdict is None else f" {self.verdict}") + format_partial_seeds(self.partial_num_seeds)
        )


@dataclass(frozen=True)
class ComparisonTable:
    """Table of comparable records."""

    metric: Metric
    protocol: str
    train_length: int
    records: tuple[Record, ...]
    axis: RecordAxis
    methods: tuple[str, ...]  # in the order of the records
    x_values: tuple[float, ...]  # x values of the columns, ascending; only some of the values of a dense axis
    cells: dict[tuple[str, float], Cell]
    changes: dict[str, Change] = field(default_factory=dict)  # method → change over lengths, if known
    max_lengths: dict[str, int] = field(default_factory=dict)  # method → maximum length, if limited
    text: str | None = None  # name of the text, if other tables have other texts
    targets: int | None = None  # scored tokens per window, if other tables have other numbers
    failures: tuple[RunFailure, ...] = ()  # failed runs that belong to this table
    trivial_baselines: tuple[str, ...] = ()  # methods that are trivial baselines

    @cached_property
    def max_seeds(self) -> int:
        """Largest number of seeds of any cell."""
        return _count_max_seeds(self.records)

    def get_length_at_multiple(self, multiple: float) -> float:
        """Return the x value of a table over lengths at a multiple of the training length."""
        # 100 · (110 / 100) is 110.00000000000001 in float64.
        return round(self.train_length * multiple, 6)

    def get_partial_num_seeds(self, num_seeds: int) -> int | None:
        """Return a number of seeds if it must be shown because other cells have more, else None."""
        return num_seeds if num_seeds < self.max_seeds else None

    def compute_change(self, method: str, base_x: float, x: float) -> Change | None:
        """Compute the change of a method from one x value to another, over the seeds that have both, or return None.

        The interval is known for a single seed whose record has the interval of this change.
        """
        method_records = [record for record in self.records if record.method == method]
        last, first = ([record for record in method_records if record.x_value == record_x] for record_x in (x, base_x))
        pairs = pair_by_seed(last, first)
        changes = [
            (
                self.metric.compute_change(last_record.value, first.value),
                last_record.change_interval if last_record.change_from == base_x else None,
            )
            for last_record, first in pairs
        ]
        return _aggregate_changes(self.metric, changes, self.max_seeds) if changes else None

    @property
    def results(self) -> tuple[Record | RunFailure, ...]:
        """Records and failed runs."""
        return (*self.records, *self.failures)

    @property
    def protocol_description(self) -> str:
        """Description of the scored tokens, for titles."""
        return f"protocol {self.protocol}" + ("" if self.targets is None else f", {self.targets:,} tokens per window")

    @property
    def title(self) -> str:
        """Title of the table, in one line."""
        text = "" if self.text is None else f", text {self.text}"
        window = self.records[0].length
        axis_text = "" if self.axis.name == "length" else f" by {self.axis.inline_name}, windows of {window:,} tokens"
        return (
            f"{self.metric.title_with_unit}{axis_text}, trained at {self.train_length:,} tokens, "
            f"{self.protocol_description}{text}"
        )

    @property
    def notes(self) -> list[str]:
        """Notes on the scored tokens and on how to read the cells, one sentence each."""
        tokens = sorted({record.tokens for record in self.records})
        token_text = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
        column_phrase = "in total" if self.metric.length_summary else self.axis.column_phrase
        notes = [f"{token_text} tokens scored {column_phrase}; {self.metric.better} is better."]
        if self.protocol in PROTOCOL_NOTES and self.axis.name == "length":
            notes.append(PROTOCOL_NOTES[self.protocol])
        if self.max_seeds > 1:
            has_partial_cells = any(cell.partial_num_seeds is not None for cell in self.cells.values())
            exception = ", or of n seeds where shown" if has_partial_cells else ""
            notes.append(f"Cells are mean ± standard deviation of {self.max_seeds} seeds{exception}.")
            if self.metric.shows_best_seed:
                at_last = "" if self.metric.length_summary else f" at {self.axis.format_value(self.x_values[-1])}"
                notes.append(f"Best seed{at_last}: {', '.join(self._format_best_seeds())}.")
        if any(cell.is_best for cell in self.cells.values()):
            notes.append("* best in its column.")
        metric = self.metric
        relative_bounds = [
            metric.compute_change(bound, cell.mean) for cell in self.cells.values() for bound in cell.interval or ()
        ]
        if relative_bounds:
            low, high = map(metric.format_relative_change, (min(relative_bounds), max(relative_bounds)))
            notes.append(f"95% bootstrap intervals of individual cells are within {low} and {high}.")
        if self.changes:
            value_name = metric.inline_title
            change_note = (
                f"Change: {value_name} at {self.x_values[-1]:,} {metric.change_operator} that at "
                f"{self.x_values[0]:,} tokens"
            )
            if self.max_seeds > 1:
                change_note += f", computed per seed: {metric.change_mean_description} over the seeds with both"
            verdicts = {change.verdict for change in self.changes.values()}
            if verdicts != {None}:
                interval_note = (
                    " [95% bootstrap interval]." if self.max_seeds == 1 else "; all seeds share the verdict."
                )
                if "mixed" in verdicts:
                    interval_note = "; all seeds share the verdict, except mixed ones."
                notes += [f"{change_note}{interval_note}", f"{metric.verdict_rule}."]
            else:
                notes.append(f"{change_note}; its uncertainty is unknown.")
        about_training = describe_missing_training_digests(self.records), describe_unequal_training(self.records)
        notes += filter(None, about_training)
        return [*notes, *dict.fromkeys(record.remark for record in self.records if record.remark is not None)]

    def _format_best_seeds(self) -> list[str]:
        """Return the best value at the last x value, for each method with several seeds."""
        values_by_method: dict[str, list[float]] = {}
        for record in self.records:
            if record.x_value == self.x_values[-1]:
                values_by_method.setdefault(record.method, []).append(record.value)
        format_value, select_best = self.metric.format_value, self.metric.select_best
        return [
            f"{quote_method(method)} {format_value(select_best(values))}"
            for method, values in values_by_method.items()
            if len(values) > 1
        ]

    def get_column_headers(self) -> list[tuple[str, str]]:
        """Return both header lines of every column: multiple of the training length, and tokens."""
        if self.metric.length_summary:
            return [self.metric.length_summary] * len(self.x_values)
        return [self.axis.get_column_headers(x, self.train_length) for x in self.x_values]

    def get_change_header(self) -> tuple[str, str]:
        """Return both header lines of the change column."""
        first, last = (format_multiple(length / self.train_length) for length in (self.x_values[0], self.x_values[-1]))
        return "change", f"{first} to {last}"

    def get_missing_text(self, method: str, x: float) -> str:
        """Return the text for a missing value.

        It is the method's maximum length or a failure if that is the reason, else a dash.
        """
        if self.ends_before(method, x):
            return f"max {self.max_lengths[method]:,}"
        return "failed" if any(failure.method == method for failure in self.failures) else "–"

    def ends_before(self, method: str, x: float) -> bool:
        """Return True if a method's maximum length is below an x value."""
        max_length = self.max_lengths.get(method)
        return max_length is not None and self.axis.in_tokens and max_length < x


def format_partial_seeds(partial_num_seeds: int | None) -> str:
    """Format the number of seeds of a cell that has fewer seeds than others."""
    return "" if partial_num_seeds is None else f" (n {partial_num_seeds})"


def pair_by_seed(records: Iterable[Record], other_records: Iterable[Record]) -> list[tuple[Record, Record]]:
    """Pair records of the same seed, sorted by seed; unpaired records are dropped.

    Args:
        records, other_records: records of one method at one x value each, with one run per seed.
    """
    others_by_seed = {record.seed: record for record in other_records}
    pairs = [(record, others_by_seed[record.seed]) for record in records if record.seed in others_by_seed]
    return sorted(pairs, key=lambda pair: pair[0].seed)


def build_comparison_tables(records: Sequence[Record], failures: Sequence[RunFailure] = ()) -> list[ComparisonTable]:
    """Group records into tables of comparable numbers.

    There is one table for each metric, axis (and window length, for axes other than length), protocol, training length,
    and set of targets.

    Args:
        records: records of all tables. A record replaces an earlier one of the same method, x value, seed, and run.
        failures: runs without records. A method that has none at all gets a row that says so.
    """
    records = disambiguate_methods(records)
    records_by_key: dict[Hashable, list[Record]] = {}
    for record in records:
        records_by_key.setdefault(get_table_key(record), []).append(record)
    has_several_texts = len({record.dataset for record in records}) > 1
    targets_by_protocol: dict[str, set[int | None]] = {}
    for record in records:
        targets_by_protocol.setdefault(record.protocol, set()).add(record.targets_per_window)
    measured_methods = {record.method for record in records}
    return [
        _build_comparison_table(
            table_records,
            [failure for failure in failures if _belongs_to_table(failure, table_records, measured_methods)],
            show_text=has_several_texts,
            show_targets=len(targets_by_protocol[table_records[0].protocol]) > 1,
        )
        for table_records in records_by_key.values()
    ]


def select_curve_tables(tables: Sequence[ComparisonTable]) -> list[ComparisonTable]:
    """Select tables that can be drawn as curves.

    If all tables summarize several lengths in one number, return them all.
    """
    return [table for table in tables if table.metric.length_summary is None] or list(tables)


def _belongs_to_table(failure: RunFailure, table_records: Sequence[Record], measured_methods: set[str]) -> bool:
    """Return True if a failed run belongs to the table of these records, given the methods of all tables."""
    if failure.train_length not in (None, table_records[0].train_length):
        return False
    if failure.dataset not in (None, table_records[0].dataset):
        return False
    return failure.method not in measured_methods or any(record.method == failure.method for record in table_records)


def _build_comparison_table(
    records: Sequence[Record], failures: Sequence[RunFailure], *, show_text: bool = False, show_targets: bool = False
) -> ComparisonTable:
    latest = {(record.method, record.x_value, record.seed, record.run): record for record in records}
    records_by_cell: dict[tuple[str, float], list[Record]] = {}
    for record in latest.values():
        records_by_cell.setdefault((record.method, record.x_value), []).append(record)
    axis = axes.get_record_axis(records[0].axis)
    x_values = tuple(sorted({record.x_value for record in records}))
    if axis.is_dense:
        x_values = _choose_octaves(x_values, records[0].train_length)
    metric = records[0].metric_info
    means = {x: statistics.fmean(item.value for item in cell_records) for x, cell_records in records_by_cell.items()}
    trivial_baselines = {record.method for record in records if record.is_trivial_baseline}
    competing_means = {
        x: [mean for (method, cell_x), mean in means.items() if cell_x == x and method not in trivial_baselines]
        for x in x_values
    }
    best = {x: metric.find_best(values) for x, values in competing_means.items()}
    max_seeds = _count_max_seeds(latest.values())
    cells = {
        (method, x): Cell(
            metric=metric,
            mean=means[method, x],
            deviation=_get_deviation([item.value for item in cell_records]),
            is_best=method not in trivial_baselines and means[method, x] == best[x],
            interval=cell_records[0].bootstrap_interval if len(cell_records) == 1 else None,
            num_seeds=len(cell_records),
            partial_num_seeds=len(cell_records)
            if len(cell_records) < max_seeds and method not in trivial_baselines
            else None,
        )
        for (method, x), cell_records in records_by_cell.items()
        if x in x_values
    }
    # Changes refer to another length, so tables over other axes have no change column.
    changes = {}
    for (method, x), cell_records in records_by_cell.items():
        seed_changes = [
            (item.change, item.change_interval)
            for item in cell_records
            if (axis.name, x, item.change_from) == ("length", x_values[-1], x_values[0]) and item.change is not None
        ]
        if seed_changes:
            changes[method] = _aggregate_changes(metric, seed_changes, 1 if method in trivial_baselines else max_seeds)
    return ComparisonTable(
        metric=metric,
        protocol=records[0].protocol,
        train_length=records[0].train_length,
        records=tuple(latest.values()),
        methods=tuple(dict.fromkeys([record.method for record in records] + [item.method for item in failures])),
        axis=axis,
        x_values=x_values,
        cells=cells,
        changes=changes,
        max_lengths={record.method: record.max_length for record in latest.values() if record.max_length is not None},
        text=records[0].dataset if show_text else None,
        targets=records[0].targets_per_window if show_targets else None,
        failures=tuple(failures),
        trivial_baselines=tuple(dict.fromkeys(record.method for record in records if record.is_trivial_baseline)),
    )


def _choose_octaves(x_positions: Sequence[float], train_length: int) -> tuple[float, ...]:
    """Choose columns among many x values.

    They are those nearest to the training length, its halves, and its doubles, and the last one.
    """
    octaves = [train_length * 2.0**power for power in range(-40, 41)]
    inside = [octave for octave in octaves if x_positions[0] <= octave <= x_positions[-1]]
    nearest = {min(x_positions, key=lambda place: abs(place - octave)) for octave in inside}
    return tuple(sorted({*nearest, x_positions[-1]})[-MAX_DENSE_COLUMNS:])


def _aggregate_changes(
    metric: Metric, seed_changes: Sequence[tuple[float, tuple[float, float] | None]], max_seeds: int
) -> Change:
    """Aggregate the changes of several seeds, each with its interval if known."""
    values = [value for value, _ in seed_changes]
    verdicts = {
        None if interval is None else metric.classify_change(value, *interval) for value, interval in seed_changes
    }
    return Change(
        metric=metric,
        mean=metric.average_changes(values),
        deviation=metric.compute_change_deviation(values),
        interval=seed_changes[0][1] if len(seed_changes) == 1 else None,
        verdict=None if None in verdicts else verdicts.pop() if len(verdicts) == 1 else "mixed",
        num_seeds=len(seed_changes),
        partial_num_seeds=len(seed_changes) if len(seed_changes) < max_seeds else None,
    )


def _count_max_seeds(records: Iterable[Record]) -> int:
    counts: dict[tuple[str, float], int] = {}
    for record in records:
        counts[record.method, record.x_value] = counts.get((record.method, record.x_value), 0) + 1
    return max(counts.values())


def _get_half_width(interval: tuple[float, float] | None) -> float | None:
    return None if interval is None else (interval[1] - interval[0]) / 2


def _get_deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None

"""Which records may stand in one table, and what stands in its cells.

Records of different metrics, axes, protocols, training lengths or target tokens are never put into one table, because
their numbers cannot be compared (`verdict_tables.py` says where those of several training lengths can). With several
seeds a cell is their arithmetic mean ± sample standard deviation. The last column is the change from the shortest
length to the largest with its bootstrap interval, and in a word what that says.

What a change is, everywhere (tables, pages, the criterion of extrapolation, comparisons of methods):

    one seed         the ratio of two values of that seed, or their difference where the metric has no ratios
    several seeds    the geometric mean of these ratios, or the mean of these differences, over the seeds that have
                     both values; a seed that has one of the two alone says nothing of a change
    their spread     the standard deviation of the same kind: of ratios a factor, written ×/÷

Ratios of perplexities are averaged as what they are, exponentials of differences of nll. So it makes no difference
whether seeds or lengths are averaged first, a change there and back is none, and the number is the one that tests of
significance on logarithms are about. Cells stay arithmetic means, as papers print them: where seeds differ much, the
ratio of two cells is another number than the change.

Not every cell has every seed. A cell that has fewer than the fullest of its table says its n, a change or a comparison
says over how many pairs it was taken, and `verdict_tables.py` lists what is not there. Predictors that learned nothing
have no seeds, and never compete for the mark of the best.
"""

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron.reports import x_axes
from megatron.reports.failures import RunFailure
from megatron.reports.method_rows import disambiguate_methods, get_table_key, list_unproven_methods
from megatron.reports.metrics import Metric
from megatron.reports.records import Record
from megatron.reports.x_axes import XAxis, format_multiple

MAX_NAMED_METHODS = 4
"""Methods that a note names."""
MAX_NAMED_PLACES = 10
"""Columns of a table over a dense axis."""


@dataclass(frozen=True)
class Cell:
    """One method at one place: mean over seeds, and their sample standard deviation where there are several."""

    metric: Metric
    mean: float
    deviation: float | None
    is_best: bool
    interval: tuple[float, float] | None = None  # 95%, of a single run
    num_seeds: int = 1
    partial_num_seeds: int | None = None  # that number, where other cells of the table have more

    @property
    def mean_text(self) -> str:
        """The mean alone, with digits enough for the interval."""
        return self.metric.format_value(self.mean, _get_half_width(self.interval))

    @property
    def interval_texts(self) -> tuple[str, ...]:
        """The two ends of the interval; nothing if there is none."""
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
    """From one length to another, of one method, over the seeds that have both."""

    metric: Metric
    mean: float  # geometric, of ratios; arithmetic, of differences
    deviation: float | None  # over seeds, of the same kind: a factor, of ratios
    interval: tuple[float, float] | None  # 95%, of a single run
    verdict: str | None  # rises, falls, holds; of several seeds the one they share, else mixed
    num_seeds: int = 1
    partial_num_seeds: int | None = None  # that number, where cells of the table have more

    @property
    def half_width(self) -> float | None:
        """How sure it is: half of the width of its interval, or of what seeds mostly lie in."""
        if self.deviation is None:
            return _get_half_width(self.interval)
        return self.metric.compute_change_half_width(self.mean, self.deviation)

    def format_relative(self, change: float) -> str:
        """The mean, or an end of the interval, as a distance from no change, rounded alike wherever it is told: -2.8%,
        +134.4%, +14,492,739%, or -12.30 where the metric has no ratios."""
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
    """A table of comparable records."""

    metric: Metric
    protocol: str
    train_length: int
    records: tuple[Record, ...]
    axis: XAxis
    methods: tuple[str, ...]  # in the order of the records
    x_values: tuple[float, ...]  # on the axis, ascending; of a dense axis those that the table names
    cells: dict[tuple[str, float], Cell]
    changes: dict[str, Change] = field(default_factory=dict)  # method → change; those that are known, over lengths
    max_lengths: dict[str, int] = field(default_factory=dict)  # method → positions that it knows, where they end
    text: str | None = None  # what was scored, if there are tables of other texts beside this one
    targets: int | None = None  # scored in each window, if there are tables of other numbers beside this one
    failures: tuple[RunFailure, ...] = ()  # runs that would stand here, and gave no result
    trivial_baselines: tuple[str, ...] = ()  # methods that learned nothing

    @cached_property
    def max_seeds(self) -> int:
        """The largest number of runs behind a cell; they differ in their seed."""
        return _count_max_seeds(self.records)

    def get_partial_num_seeds(self, num_seeds: int) -> int | None:
        """A number of seeds, if it has to be said: the table's fullest cells have more."""
        return num_seeds if num_seeds < self.max_seeds else None

    def compute_change(self, method: str, base_x: float, x: float) -> Change | None:
        """How a method differs at one place from itself at another, over the seeds that have both; None without any.

        Its interval is known of one seed, where its record has one of the change from there.
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
    def protocol_description(self) -> str:
        """Which tokens were scored, as titles say it."""
        return f"protocol {self.protocol}" + ("" if self.targets is None else f", {self.targets:,} tokens of a window")

    @property
    def title(self) -> str:
        """What the table shows, in one line."""
        text = "" if self.text is None else f", text {self.text}"
        window = self.records[0].length
        axis_text = "" if self.axis.name == "length" else f" by {self.axis.inline_name}, windows of {window:,} tokens"
        return (
            f"{self.metric.title_with_unit}{axis_text}, trained at {self.train_length:,} tokens, "
            f"{self.protocol_description}{text}"
        )

    @property
    def notes(self) -> list[str]:
        """What was counted and how to read the cells, a sentence each."""
        tokens = sorted({record.tokens for record in self.records})
        token_text = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
        column_phrase = "in all" if self.metric.length_summary else self.axis.column_phrase
        notes = [f"{token_text} tokens scored {column_phrase}; {self.metric.better} is better."]
        if self.max_seeds > 1:
            has_partial_cells = any(cell.partial_num_seeds is not None for cell in self.cells.values())
            exception = ", those with an n of so many" if has_partial_cells else ""
            notes.append(f"Cells are mean ± standard deviation of {self.max_seeds} seeds{exception}.")
            if self.metric.shows_best_seed:
                at_last = "" if self.metric.length_summary else f" at {self.axis.format_value(self.x_values[-1])}"
                notes.append(f"The best of them{at_last}: {', '.join(self._format_best_seeds())}.")
        if any(cell.is_best for cell in self.cells.values()):
            notes.append("* best of its column.")
        metric = self.metric
        relative_bounds = [
            metric.compute_change(bound, cell.mean) for cell in self.cells.values() for bound in cell.interval or ()
        ]
        if relative_bounds:
            low, high = map(metric.format_relative_change, (min(relative_bounds), max(relative_bounds)))
            notes.append(f"95% bootstrap intervals of single cells are within {low} and {high}.")
        if self.changes:
            value_name = metric.inline_title
            change_note = (
                f"Change is {value_name} at {self.x_values[-1]:,} {metric.change_operator} that at "
                f"{self.x_values[0]:,} tokens"
            )
            if self.max_seeds > 1:
                change_note += f", each seed's own: their {metric.change_mean_description} over the seeds with both"
            if any(change.verdict is not None for change in self.changes.values()):
                interval_note = (
                    " [95% bootstrap interval]." if self.max_seeds == 1 else "; its verdict is that of every seed."
                )
                notes += [f"{change_note}{interval_note}", f"A change {metric.verdict_rule}."]
            else:
                notes.append(f"{change_note}; how sure it is, is not known.")
        if unproven := list_unproven_methods(self.records):
            notes.append(
                f"The results of {', '.join(unproven[:MAX_NAMED_METHODS])}"
                f"{' and others' * (len(unproven) > MAX_NAMED_METHODS)} do not record what was trained: runs of one "
                "name and number of steps count as seeds of one method."
            )
        return [*notes, *dict.fromkeys(record.remark for record in self.records if record.remark is not None)]

    def _format_best_seeds(self) -> list[str]:
        """Of each method with several seeds, the best value at the last place."""
        values_by_method: dict[str, list[float]] = {}
        for record in self.records:
            if record.x_value == self.x_values[-1]:
                values_by_method.setdefault(record.method, []).append(record.value)
        format_value, select_best = self.metric.format_value, self.metric.select_best
        return [
            f"{method} {format_value(select_best(values))}"
            for method, values in values_by_method.items()
            if len(values) > 1
        ]

    def get_column_headers(self) -> list[tuple[str, str]]:
        """The two heads of every column: multiple of the training length, tokens."""
        if self.metric.length_summary:
            return [self.metric.length_summary] * len(self.x_values)
        return [self.axis.get_column_headers(x, self.train_length) for x in self.x_values]

    def get_change_header(self) -> tuple[str, str]:
        """The two heads of the column of changes."""
        first, last = (format_multiple(length / self.train_length) for length in (self.x_values[0], self.x_values[-1]))
        return "change", f"{first} to {last}"

    def get_missing_text(self, method: str, x: float) -> str:
        """What stands where a method has no number: its largest length or a failure if that is why, else a dash."""
        if self.ends_before(method, x):
            return f"max {self.max_lengths[method]:,}"
        return "failed" if any(failure.method == method for failure in self.failures) else "–"

    def ends_before(self, method: str, x: float) -> bool:
        """Do a method's positions end before a place?"""
        max_length = self.max_lengths.get(method)
        return max_length is not None and self.axis.in_tokens and max_length < x


def format_partial_seeds(partial_num_seeds: int | None) -> str:
    """How a cell says that it rests on fewer seeds than others."""
    return "" if partial_num_seeds is None else f" (n {partial_num_seeds})"


def pair_by_seed(records: Iterable[Record], other_records: Iterable[Record]) -> list[tuple[Record, Record]]:
    """Records of the same seed, by seed: what only one side has is left out.

    Args:
        records, other_records: of one method at one place each, of which each seed has one run.
    """
    others_by_seed = {record.seed: record for record in other_records}
    pairs = [(record, others_by_seed[record.seed]) for record in records if record.seed in others_by_seed]
    return sorted(pairs, key=lambda pair: pair[0].seed)


def build_comparison_tables(records: Sequence[Record], failures: Sequence[RunFailure] = ()) -> list[ComparisonTable]:
    """Sort records into tables whose numbers may be compared: one per metric, axis (with its length, if
    that is another), protocol, training length and targets.

    Args:
        records: of all tables. One that repeats an earlier one (same method, place, seed and run) replaces it.
        failures: runs that gave no records; a method that has none at all gets a row that says so.
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
    """Those that make a curve: not one number that sums up lengths, unless there is nothing else."""
    return [table for table in tables if table.metric.length_summary is None] or list(tables)


def _belongs_to_table(failure: RunFailure, table_records: Sequence[Record], measured_methods: set[str]) -> bool:
    """Would a failed run stand in the table of these records, where `measured_methods` are the methods of all
    tables?"""
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
    axis = x_axes.get_x_axis(records[0].axis)
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
    # One method alone is not the best of anything.
    has_competition = len({record.method for record in records} - trivial_baselines) > 1
    max_seeds = _count_max_seeds(latest.values())
    cells = {
        (method, x): Cell(
            metric=metric,
            mean=means[method, x],
            deviation=_get_deviation([item.value for item in cell_records]),
            is_best=has_competition
            and method not in trivial_baselines
            and means[method, x] == metric.select_best(competing_means[x]),
            interval=cell_records[0].bootstrap_interval if len(cell_records) == 1 else None,
            num_seeds=len(cell_records),
            partial_num_seeds=len(cell_records)
            if len(cell_records) < max_seeds and method not in trivial_baselines
            else None,
        )
        for (method, x), cell_records in records_by_cell.items()
        if x in x_values
    }
    # A change is from another length: a table over places inside windows has no column for it.
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


def _choose_octaves(places: Sequence[float], train_length: int) -> tuple[float, ...]:
    """Of many places, the last ones that are nearest to a training length, its halves and its doubles, and the last."""
    octaves = [train_length * 2.0**power for power in range(-40, 41)]
    inside = [octave for octave in octaves if places[0] <= octave <= places[-1]]
    nearest = {min(places, key=lambda place: abs(place - octave)) for octave in inside}
    return tuple(sorted({*nearest, places[-1]})[-MAX_NAMED_PLACES:])


def _aggregate_changes(
    metric: Metric, seed_changes: Sequence[tuple[float, tuple[float, float] | None]], max_seeds: int
) -> Change:
    """Of the changes of several seeds, each with its interval if that is known."""
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

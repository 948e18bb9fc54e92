"""Which records may stand in one table, and what stands in its cells.

Records of different metrics, axes, protocols, training lengths or target tokens are never put into one table, because
their numbers cannot be compared (`across.py` says where those of several training lengths can). With several seeds a
cell is their arithmetic mean ± sample standard deviation. The last column is the change from the shortest length to
the largest with its bootstrap interval, and in a word what that says.

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
says over how many pairs it was taken, and `missing.py` lists what is not there. Predictors that learned nothing have no
seeds, and never compete for the mark of the best.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron.reports import axes
from megatron.reports.axes import Axis, multiple
from megatron.reports.failures import Failure
from megatron.reports.metrics import Metric
from megatron.reports.records import Record


@dataclass(frozen=True)
class Cell:
    """One method at one place: mean over seeds, and their sample standard deviation where there are several."""

    metric: Metric
    mean: float
    deviation: float | None
    best: bool
    interval: tuple[float, float] | None = None  # 95%, of a single run
    seeds: int = 1
    few: int | None = None  # that number, where other cells of the table have more

    @property
    def number(self) -> str:
        """The mean alone, with digits enough for the interval."""
        return self.metric.shown(self.mean, _half_width(self.interval))

    @property
    def ends(self) -> tuple[str, ...]:
        """The two ends of the interval; nothing if there is none."""
        return tuple(self.metric.shown(end, _half_width(self.interval)) for end in self.interval or ())

    def __str__(self) -> str:
        text = self.number if self.deviation is None else self.metric.shown_with(self.mean, self.deviation)
        return text + count_note(self.few) + "*" * self.best


@dataclass(frozen=True)
class Change:
    """From one length to another, of one method, over the seeds that have both."""

    metric: Metric
    mean: float  # geometric, of ratios; arithmetic, of differences
    deviation: float | None  # over seeds, of the same kind: a factor, of ratios
    interval: tuple[float, float] | None  # 95%, of a single run
    verdict: str | None  # rises, falls, holds; of several seeds the one they share, else mixed
    seeds: int = 1
    few: int | None = None  # that number, where cells of the table have more

    @property
    def spread(self) -> float | None:
        """How sure it is: half of the width of its interval, or of what seeds mostly lie in."""
        if self.deviation is None:
            return _half_width(self.interval)
        return self.metric.change_spread(self.mean, self.deviation)

    def __str__(self) -> str:
        if self.deviation is not None:
            text = self.metric.shown_change_with(self.mean, self.deviation)
        else:
            text = self.metric.shown_change(self.mean, self.spread)
            text += "" if self.interval is None else f" {self.metric.shown_interval(*self.interval)}"
        return text + ("" if self.verdict is None else f" {self.verdict}") + count_note(self.few)


@dataclass(frozen=True)
class Layout:
    """A table of comparable records."""

    metric: Metric
    protocol: str
    train_length: int
    records: tuple[Record, ...]
    axis: Axis
    methods: tuple[str, ...]  # in the order of the records
    places: tuple[float, ...]  # on the axis, ascending
    cells: dict[tuple[str, float], Cell]
    changes: dict[str, Change] = field(default_factory=dict)  # method → change; those that are known, over lengths
    limits: dict[str, int] = field(default_factory=dict)  # method → positions that it knows, where they end
    text: str | None = None  # what was scored, if there are tables of other texts beside this one
    targets: int | None = None  # scored in each window, if there are tables of other numbers beside this one
    failures: tuple[Failure, ...] = ()  # runs that would stand here, and gave no result
    floors: tuple[str, ...] = ()  # methods that learned nothing

    @property
    def repeats(self) -> int:
        """The largest number of runs behind a cell; they differ in their seed."""
        return _repeats(self.records)

    def few(self, count: int) -> int | None:
        """A number of seeds, if it has to be said: the table's fullest cells have more."""
        return count if count < self.repeats else None

    def change(self, method: str, base: float, place: float) -> Change | None:
        """How a method differs at one place from itself at another, over the seeds that have both; None without any.

        Its interval is known of one seed, where its record has one of the change from there.
        """
        own = [record for record in self.records if record.method == method]
        there, first = ([record for record in own if record.at == at] for at in (place, base))
        pairs = paired(there, first, same_run=True)
        told = [
            (self.metric.change(later.value, first.value), later.change_interval if later.change_from == base else None)
            for later, first in pairs
        ]
        return _change(self.metric, told, self.repeats) if told else None

    @property
    def how(self) -> str:
        """Which tokens were scored, as titles say it."""
        return f"protocol {self.protocol}" + ("" if self.targets is None else f", {self.targets:,} tokens of a window")

    @property
    def title(self) -> str:
        """What the table shows, in one line."""
        text = "" if self.text is None else f", text {self.text}"
        window = self.records[0].length
        over = "" if self.axis.name == "length" else f" by {self.axis.name}, windows of {window:,} tokens"
        return f"{self.metric.heading}{over}, trained at {self.train_length:,} tokens, {self.how}{text}"

    @property
    def notes(self) -> list[str]:
        """What was counted and how to read the cells, a sentence each."""
        tokens = sorted({record.tokens for record in self.records})
        counted = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
        each = "in all" if self.metric.over_lengths else self.axis.each
        notes = [f"{counted} tokens scored {each}; {self.metric.better} is better."]
        if self.repeats > 1:
            few = any(cell.few is not None for cell in self.cells.values())
            but = ", those with an n of so many" if few else ""
            notes.append(f"Cells are mean ± standard deviation of {self.repeats} seeds{but}.")
            if self.metric.tells_best:
                at = "" if self.metric.over_lengths else f" at {self.axis.shown(self.places[-1])}"
                notes.append(f"The best of them{at}: {', '.join(self._best_seeds())}.")
        if any(cell.best for cell in self.cells.values()):
            notes.append("* best of its column.")
        metric = self.metric
        ends = [metric.change(end, cell.mean) for cell in self.cells.values() for end in cell.interval or ()]
        if ends:
            low, high = map(metric.shown_distance, (min(ends), max(ends)))
            notes.append(f"95% bootstrap intervals of single cells are within {low} and {high}.")
        if self.changes:
            what = metric.word
            line = f"Change is {what} at {self.places[-1]:,} {metric.relation} that at {self.places[0]:,} tokens"
            if self.repeats > 1:
                line += f", each seed's own: their {metric.averaged} over the seeds with both"
            if any(change.verdict is not None for change in self.changes.values()):
                known = " [95% bootstrap interval]." if self.repeats == 1 else "; its verdict is that of every seed."
                notes += [f"{line}{known}", f"A change {metric.rule}."]
            else:
                notes.append(f"{line}; how sure it is, is not known.")
        return [*notes, *dict.fromkeys(record.remark for record in self.records if record.remark is not None)]

    def _best_seeds(self) -> list[str]:
        """Of each method with several seeds, the best value at the last place."""
        found: dict[str, list[float]] = {}
        for record in self.records:
            if record.at == self.places[-1]:
                found.setdefault(record.method, []).append(record.value)
        shown, best = self.metric.shown, self.metric.best
        return [f"{method} {shown(best(values))}" for method, values in found.items() if len(values) > 1]

    def heads(self) -> list[tuple[str, str]]:
        """The two heads of every column: multiple of the training length, tokens."""
        if self.metric.over_lengths:
            return [("mean", "beyond training")] * len(self.places)
        return [self.axis.heads(place, self.train_length) for place in self.places]

    def change_head(self) -> tuple[str, str]:
        """The two heads of the column of changes."""
        first, last = (multiple(length / self.train_length) for length in (self.places[0], self.places[-1]))
        return "change", f"{first} to {last}"

    def missing(self, method: str, place: float) -> str:
        """What stands where a method has no number: its largest length or a failure if that is why, else a dash."""
        if self.ends_before(method, place):
            return f"max {self.limits[method]:,}"
        return "failed" if any(each.method == method for each in self.failures) else "–"

    def ends_before(self, method: str, place: float) -> bool:
        """Do a method's positions end before a place?"""
        limit = self.limits.get(method)
        return limit is not None and self.axis.tokens and limit < place


def count_note(few: int | None) -> str:
    """How a cell says that it rests on fewer seeds than others."""
    return "" if few is None else f" (n {few})"


def paired(ours: Iterable[Record], theirs: Iterable[Record], *, same_run: bool = False) -> list[tuple[Record, Record]]:
    """Records of the same seed, by seed: what only one side has is left out.

    Args:
        ours, theirs: of one method at one place each.
        same_run: both are of the same method, and are paired only if they are of the same run.
    """

    def identity(record: Record) -> tuple[int, str | None]:
        return record.seed, record.run if same_run else None

    found = {identity(record): record for record in theirs}
    pairs = [(record, found[identity(record)]) for record in ours if identity(record) in found]
    return sorted(pairs, key=lambda pair: pair[0].seed)


def layouts(records: Sequence[Record], failures: Sequence[Failure] = ()) -> list[Layout]:
    """Sort records into tables whose numbers may be compared: one per metric, axis (with its length, if
    that is another), protocol, training length and targets.

    Args:
        records: of all tables. One that repeats an earlier one (same method, place, seed and run) replaces it.
        failures: runs that gave no records; a method that has none at all gets a row that says so.
    """
    groups: dict[tuple[str, str, int | None, str, int, str | None], list[Record]] = {}
    for record in records:
        length = None if record.place is None else record.length
        kind = (record.metric, record.axis, length, record.protocol, record.train_length, record.target_digest)
        groups.setdefault(kind, []).append(record)
    several = len({record.dataset for record in records}) > 1
    numbers: dict[str, set[int | None]] = {}
    for record in records:
        numbers.setdefault(record.protocol, set()).add(record.chosen_targets)
    known = {record.method for record in records}
    return [
        _layout(
            group,
            [each for each in failures if _belongs(each, group, known)],
            name_text=several,
            name_targets=len(numbers[group[0].protocol]) > 1,
        )
        for group in groups.values()
    ]


def _belongs(failure: Failure, group: Sequence[Record], known: set[str]) -> bool:
    """Would a failed run stand in the table of these records, where `known` are the methods of all tables?"""
    if failure.train_length not in (None, group[0].train_length):
        return False
    return failure.method not in known or any(record.method == failure.method for record in group)


def _layout(
    records: Sequence[Record], failures: Sequence[Failure], *, name_text: bool = False, name_targets: bool = False
) -> Layout:
    latest = {(record.method, record.at, record.seed, record.run): record for record in records}
    found: dict[tuple[str, float], list[Record]] = {}
    for record in latest.values():
        found.setdefault((record.method, record.at), []).append(record)
    places = tuple(sorted({record.at for record in records}))
    metric = records[0].measure
    means = {place: statistics.fmean(each.value for each in same) for place, same in found.items()}
    floors = {record.method for record in records if record.is_floor}
    competing = {place: [mean for (method, at), mean in means.items() if at == place and method not in floors]
                 for place in places}  # fmt: skip
    # One method alone is not the best of anything.
    several = len({record.method for record in records} - floors) > 1
    repeats = _repeats(latest.values())
    cells = {
        (method, place): Cell(
            metric=metric,
            mean=means[method, place],
            deviation=_deviation([each.value for each in same]),
            best=several and method not in floors and means[method, place] == metric.best(competing[place]),
            interval=same[0].bootstrapped if len(same) == 1 else None,
            seeds=len(same),
            few=len(same) if len(same) < repeats and method not in floors else None,
        )
        for (method, place), same in found.items()
    }
    axis = axes.find(records[0].axis)
    # A change is from another length: a table over places inside windows has no column for it.
    changes = {}
    for (method, place), same in found.items():
        told = [
            (each.change, each.change_interval)
            for each in same
            if (axis.name, place, each.change_from) == ("length", places[-1], places[0]) and each.change is not None
        ]
        if told:
            changes[method] = _change(metric, told, 1 if method in floors else repeats)
    return Layout(
        metric=metric,
        protocol=records[0].protocol,
        train_length=records[0].train_length,
        records=tuple(latest.values()),
        methods=tuple(dict.fromkeys([record.method for record in records] + [each.method for each in failures])),
        axis=axis,
        places=places,
        cells=cells,
        changes=changes,
        limits={record.method: record.max_length for record in latest.values() if record.max_length is not None},
        text=records[0].dataset if name_text else None,
        targets=records[0].chosen_targets if name_targets else None,
        failures=tuple(failures),
        floors=tuple(dict.fromkeys(record.method for record in records if record.is_floor)),
    )


def _change(metric: Metric, told: Sequence[tuple[float, tuple[float, float] | None]], repeats: int) -> Change:
    """Of the changes of several seeds, each with its interval if that is known."""
    values = [value for value, _ in told]
    verdicts = {None if interval is None else metric.verdict(value, *interval) for value, interval in told}
    return Change(
        metric=metric,
        mean=metric.mean_change(values),
        deviation=metric.change_deviation(values),
        interval=told[0][1] if len(told) == 1 else None,
        verdict=None if None in verdicts else verdicts.pop() if len(verdicts) == 1 else "mixed",
        seeds=len(told),
        few=len(told) if len(told) < repeats else None,
    )


def _repeats(records: Iterable[Record]) -> int:
    counts: dict[tuple[str, float], int] = {}
    for record in records:
        counts[record.method, record.at] = counts.get((record.method, record.at), 0) + 1
    return max(counts.values())


def _half_width(interval: tuple[float, float] | None) -> float | None:
    return None if interval is None else (interval[1] - interval[0]) / 2


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None

"""Which records may stand in one table, and what stands in its cells.

Records of different metrics, axes, protocols, training lengths or target tokens are never put into one table, because
their numbers cannot be compared (`across.py` says where those of several training lengths can). With several seeds a
cell is their mean ± sample standard deviation. The last column is the change from the shortest length to the largest
with its bootstrap interval, and in a word what that says.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.reports import axes
from megatron.reports.axes import Axis, multiple
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

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {self.metric.shown(self.deviation)}"
        return self.metric.shown(self.mean) + spread + "*" * self.best


@dataclass(frozen=True)
class Change:
    """From the shortest length to the largest, of one method: mean and deviation over seeds."""

    metric: Metric
    mean: float
    deviation: float | None
    interval: tuple[float, float] | None  # 95%, of a single run
    verdict: str | None  # rises, falls, holds; of several seeds the one they share, else mixed

    def __str__(self) -> str:
        text = self.metric.shown_change(self.mean)
        if self.deviation is not None:
            text += f" ± {self.metric.shown_spread(self.deviation)}"
        elif self.interval is not None:
            text += f" [{', '.join(map(self.metric.shown_change, self.interval))}]"
        return text + ("" if self.verdict is None else f" {self.verdict}")


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

    @property
    def repeats(self) -> int:
        """The largest number of runs behind a cell; they differ in their seed."""
        counts: dict[tuple[str, float], int] = {}
        for record in self.records:
            counts[record.method, record.at] = counts.get((record.method, record.at), 0) + 1
        return max(counts.values())

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
            notes.append(f"Cells are mean ± standard deviation of {self.repeats} seeds.")
            if self.metric.tells_best:
                at = "" if self.metric.over_lengths else f" at {self.axis.shown(self.places[-1])}"
                notes.append(f"The best of them{at}: {', '.join(self._best_seeds())}.")
        if any(cell.best for cell in self.cells.values()):
            notes.append("* best of its column.")
        metric = self.metric
        ends = [metric.change(end, cell.mean) for cell in self.cells.values() for end in cell.interval or ()]
        if ends:
            low, high = metric.shown_distance(min(ends)), metric.shown_distance(max(ends))
            notes.append(f"95% bootstrap intervals of single cells are within {low} and {high}.")
        if self.changes:
            what = metric.word
            line = f"Change is {what} at {self.places[-1]:,} {metric.relation} that at {self.places[0]:,} tokens"
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
        """What stands where a method has no number: its largest length if that is why, else a dash."""
        limit = self.limits.get(method)
        return f"max {limit:,}" if limit is not None and self.axis.tokens and limit < place else "–"


def layouts(records: Sequence[Record]) -> list[Layout]:
    """Sort records into tables whose numbers may be compared: one per metric, axis (with its length, if
    that is another), protocol, training length and targets.

    A record that repeats an earlier one (same method, place, seed and run) replaces it.
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
    return [
        _layout(group, name_text=several, name_targets=len(numbers[group[0].protocol]) > 1) for group in groups.values()
    ]


def _layout(records: Sequence[Record], *, name_text: bool = False, name_targets: bool = False) -> Layout:
    latest = {(record.method, record.at, record.seed, record.run): record for record in records}
    found: dict[tuple[str, float], list[Record]] = {}
    for record in latest.values():
        found.setdefault((record.method, record.at), []).append(record)
    places = tuple(sorted({record.at for record in records}))
    metric = records[0].measure
    means = {place: statistics.fmean(each.value for each in same) for place, same in found.items()}
    best = {place: metric.best(mean for (_, where), mean in means.items() if where == place) for place in places}
    # One method alone is not the best of anything.
    several = len({record.method for record in records}) > 1
    cells = {
        (method, place): Cell(
            metric=metric,
            mean=means[method, place],
            deviation=_deviation([each.value for each in same]),
            best=several and means[method, place] == best[place],
            interval=same[0].bootstrapped if len(same) == 1 else None,
        )
        for (method, place), same in found.items()
    }
    axis = axes.find(records[0].axis)
    # A change is from another length: a table over places inside windows has no column for it.
    changes = {
        method: _change_over_seeds(same)
        for (method, place), same in found.items()
        if (axis.name, place) == ("length", places[-1])
        and all(each.change is not None and each.change_from == places[0] for each in same)
    }
    return Layout(
        metric=metric,
        protocol=records[0].protocol,
        train_length=records[0].train_length,
        records=tuple(latest.values()),
        methods=tuple(dict.fromkeys(record.method for record in records)),
        axis=axis,
        places=places,
        cells=cells,
        changes=changes,
        limits={record.method: record.max_length for record in latest.values() if record.max_length is not None},
        text=records[0].dataset if name_text else None,
        targets=records[0].chosen_targets if name_targets else None,
    )


def _change_over_seeds(records: Sequence[Record]) -> Change:
    values = [record.change for record in records if record.change is not None]
    verdicts = {record.verdict for record in records}
    only = records[0] if len(records) == 1 else None
    interval = None
    if only is not None and only.change_low is not None and only.change_high is not None:
        interval = (only.change_low, only.change_high)
    return Change(
        metric=records[0].measure,
        mean=statistics.fmean(values),
        deviation=_deviation(values),
        interval=interval,
        verdict=verdicts.pop() if len(verdicts) == 1 else None if None in verdicts else "mixed",
    )


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None

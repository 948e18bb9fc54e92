"""Is one method better than another, or may the difference be chance?

Two methods are compared on the same targets, in pairs, so that what makes a text or a seed hard for both cancels:

    over seeds     a paired two-sided t-test, the pairs are the runs of a seed: on the values, as KERPLE's tables 3 and
                   9 (2205.09921), and on their logarithms where those are the means (a perplexity that explodes is
                   skewed, its nll is not)
    one seed       a paired bootstrap over blocks of text, the same blocks drawn for both: says what another text might
                   change, and nothing of another training

Many tests find something by chance. Holm's correction (Holm 1979, A simple sequentially rejective multiple test
procedure) is over all tests of a table and metric's scale, and stands beside the raw value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.errors import UserError
from megatron.reports.axes import in_one_line
from megatron.reports.bootstrap import quantiles, resampled
from megatron.reports.grids import Grid
from megatron.reports.layout import Layout, count_note, paired
from megatron.reports.metrics import Metric, bounded_exp
from megatron.reports.records import Record
from megatron.suggest import choose_from

LEVEL = 0.05
DAGGER = "†"


@dataclass(frozen=True)
class TTest:
    """A paired two-sided t-test over seeds."""

    t: float
    p: float
    holm: float = math.nan
    """Corrected for all tests of the table."""


@dataclass(frozen=True)
class Comparison:
    """One method against another at one place."""

    metric: Metric
    method: str
    place: float
    seeds: int
    """That both have there."""
    change: float
    """How the method differs from the other: over seeds the geometric mean of ratios, or the mean of differences."""
    few: int | None = None
    """`seeds`, where other comparisons of the table are over more."""
    interval: tuple[float, float] | None = None
    """Of the change, 95%, by bootstrap; for one seed."""
    values: TTest | None = None
    logarithms: TTest | None = None

    @property
    def significant(self) -> bool:
        """Beyond chance at 5%, uncorrected: both tests agree, or the interval leaves no change out."""
        if self.interval is not None:
            return not self.interval[0] <= self.metric.neutral <= self.interval[1]
        tests = [test for test in (self.values, self.logarithms) if test is not None]
        return bool(tests) and all(test.p < LEVEL for test in tests)

    @property
    def verdict(self) -> str:
        """better, worse, or not significant."""
        if not self.significant:
            return "not significant"
        return "better" if self.metric.rank(self.change) < self.metric.rank(self.metric.neutral) else "worse"

    def __str__(self) -> str:
        """A cell: the change, what is known of it, and KERPLE's † where the method is worse beyond chance."""
        known, spread = "one seed", None
        if self.interval is not None:
            known, spread = self.metric.shown_interval(*self.interval), (self.interval[1] - self.interval[0]) / 2
        test = self.logarithms or self.values
        if test is not None:
            known = f"p {_p(test.p)}, Holm {_p(test.holm)}"
        dagger = DAGGER if self.verdict == "worse" else ""
        return f"{self.metric.shown_change(self.change, spread)} {known}{count_note(self.few)}{dagger}"


def compare(layout: Layout, against: str) -> list[Comparison]:
    """Compare every method of a table with one of them, at every place where both have runs of the same seed.

    Predictors that learned nothing have no seeds, and are left out.

    Args:
        layout: the table.
        against: the method that the others are compared with.

    Returns:
        By method, then place. Over one seed an interval, if the records keep the sums of their blocks; over more,
        tests.

    Raises:
        UserError: the table has no such method.
    """
    if against not in layout.methods:
        raise UserError(
            f"--against {against}: no such method in {layout.title}; {choose_from(against, layout.methods)}"
        )
    runs: dict[tuple[str, float], list[Record]] = {}
    for record in layout.records:
        if not record.is_floor:
            runs.setdefault((record.method, record.at), []).append(record)
    found = []
    for method in layout.methods:
        for place in layout.places:
            pairs = paired(runs.get((method, place), ()), runs.get((against, place), ()))
            if method != against and pairs:
                ours, theirs = zip(*pairs, strict=True)
                found.append(_compared(layout.metric, ours, theirs))
    most = max((each.seeds for each in found), default=0)
    return _corrected([replace(each, few=each.seeds if each.seeds < most else None) for each in found])


def _compared(metric: Metric, ours: Sequence[Record], theirs: Sequence[Record]) -> Comparison:
    """One method against another at one place, by records of the same seeds in the same order."""
    a, b = (np.array([record.value for record in records]) for records in (ours, theirs))
    ratio = metric.compared == "ratio"
    change = metric.mean_change([metric.change(one, other) for one, other in zip(a.tolist(), b.tolist(), strict=True)])
    base = Comparison(metric, ours[0].method, ours[0].at, len(ours), change)
    if len(ours) == 1:
        return replace(base, interval=over_blocks(ours[0], theirs[0]) if ratio else None)
    return replace(base, values=_t_test(a, b), logarithms=_t_test(np.log(a), np.log(b)) if ratio else None)


def over_blocks(ours: Record, theirs: Record) -> tuple[float, float] | None:
    """The 95% interval of the ratio of two perplexities on the same blocks, by a paired bootstrap.

    None if the records do not keep the sums of their blocks, or there are fewer than two.
    """
    counts = ours.block_counts
    if counts is None or counts != theirs.block_counts or ours.target_digest != theirs.target_digest:
        return None
    draws = resampled(np.array([ours.block_sums, theirs.block_sums]), np.array(counts))
    if draws is None:
        return None
    low, high = quantiles(draws[0] - draws[1])
    return bounded_exp(low), bounded_exp(high)


def _t_test(a: np.ndarray, b: np.ndarray) -> TTest:
    """Of pairs [seeds]. Equal differences are no chance at all (or none to speak of): p is 0, or 1 where all are 0."""
    differences = a - b
    if np.ptp(differences) <= 1e-12 * max(1.0, float(np.abs(a).max())):
        none = abs(float(differences.mean())) <= 1e-12 * max(1.0, float(np.abs(a).max()))
        return TTest(0.0 if none else math.copysign(math.inf, float(differences.mean())), 1.0 if none else 0.0)
    from scipy import stats  # takes a second to import

    result = stats.ttest_rel(a, b)
    return TTest(float(result.statistic), float(result.pvalue))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's corrected p values, in the order given: the k-th smallest of n times n − k + 1, never falling."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, values[index] * (len(values) - rank)))
        found[index] = highest
    return found


def _corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """With Holm's correction, over all tests on values and, apart, over all on logarithms."""
    found = list(comparisons)
    for name in ("values", "logarithms"):
        tested = [(index, test) for index, each in enumerate(found) if (test := getattr(each, name)) is not None]
        for (index, test), corrected in zip(tested, holm([test.p for _, test in tested]), strict=True):
            found[index] = replace(found[index], **{name: replace(test, holm=corrected)})
    return found


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def grid(layout: Layout, against: str) -> Grid:
    """The comparisons of a table. Raises UserError as `compare`."""
    found = {(each.method, each.place): each for each in compare(layout, against)}
    methods = [method for method in layout.methods if method != against and method not in layout.floors]
    seeds = max((each.seeds for each in found.values()), default=0)
    kind = "ratio to" if layout.metric.compared == "ratio" else "difference from"
    over = f": the {layout.metric.mean_name} over the seeds that both have" if seeds > 1 else ""
    notes = [f"The {kind} {against}{over}."]
    if any(each.few is not None for each in found.values()):
        notes.append(f"{seeds} seeds are paired, where there is no n.")
    intervals = any(each.interval is not None for each in found.values())
    tests = any(each.values is not None for each in found.values())
    if intervals:
        notes.append("Intervals: 95%, paired bootstrap over blocks of the text; another training may differ more.")
    if tests:
        scale = "logarithms" if layout.metric.compared == "ratio" else "values"
        notes.append(
            f"p: paired two-sided t-test over {seeds} seeds, of {scale}; Holm: corrected for all tests of this table."
        )
    both = " of values and of logarithms" if layout.metric.compared == "ratio" and seeds > 1 else ""
    if intervals or tests:
        notes.append(f"{DAGGER} worse than {against} beyond chance: 5%{both}, uncorrected as in KERPLE's tables.")
    else:
        notes.append(
            "What could be chance is not known: it takes several seeds in common, or sums of blocks beside one."
        )
    return Grid(
        title=f"{layout.title}: compared with {against}",
        corner="method",
        heads=tuple(in_one_line(*heads) for heads in layout.heads()),
        rows=tuple(
            (
                method,
                tuple(
                    str(found.get((method, place)) or _unpaired(layout, (method, against), place))
                    for place in layout.places
                ),
            )
            for method in methods
        ),
        notes=tuple(notes),
    )


def _unpaired(layout: Layout, methods: Sequence[str], place: float) -> str:
    """What stands where two methods are not compared: why one of them has no number, or that they share no seed."""
    absent = [method for method in methods if (method, place) not in layout.cells]
    return layout.missing(absent[0], place) if absent else "no seed in common"

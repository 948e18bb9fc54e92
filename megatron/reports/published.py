"""Somebody else's table beside ours, and whether both put the methods into the same order.

Single numbers are not comparable: corpora, tokenizers, sizes and protocols differ. What can be compared is the order of
methods at a multiple of the training length. Agreement is Kendall's τ-b (Kendall 1938, A new measure of rank
correlation): the share of pairs that both order alike, minus the share that they order differently; 1 is the same
order, 0 none, −1 the reverse. Ours are means over the seeds that all compared methods share, so that no method is
ahead by the seeds it has. The interval is a bootstrap over what our numbers are made of, with theirs as printed: over
those seeds where there are several, else over blocks of the text.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.reports.axes import multiple
from megatron.reports.bootstrap import RESAMPLES, SEED, quantiles, resampled
from megatron.reports.grids import Grid
from megatron.reports.layout import Layout, count_note
from megatron.reports.records import Record

FEW = RESAMPLES // 10
"""Resamples of τ, each of which is a ranking: enough for two digits."""


@dataclass(frozen=True)
class Published:
    """A table as it was printed."""

    source: str
    train_length: int
    metric: str
    lengths: tuple[int, ...]
    rows: Mapping[str, Sequence[float | None]]
    """Method → values at those lengths."""


@dataclass(frozen=True)
class Agreement:
    """Of the order of methods at one multiple of the training lengths."""

    multiple: float
    methods: tuple[str, ...]
    tau: float
    interval: tuple[float, float] | None
    seeds: int
    """That all of them share there."""


def grids(published: Published, layouts: Sequence[Layout]) -> list[Grid]:
    """Their table, with ours beside it at the same multiples of the training length, for each of ours that fits."""
    fitting = [
        layout
        for layout in layouts
        if layout.metric.name == published.metric
        and layout.axis.name == "length"
        and not published.rows.keys().isdisjoint(layout.methods)
    ]
    return [_grid(published, layout) for layout in fitting]


def agreement(published: Published, layout: Layout) -> list[Agreement]:
    """How far both orders agree, at every multiple that both have, over methods that both have there.

    A multiple at which our methods share no seed is left out.
    """
    found = []
    for column, length in enumerate(published.lengths):
        times = length / published.train_length
        place = layout.train_length * times
        theirs = {
            method: value
            for method, values in published.rows.items()
            if (value := values[column]) is not None and (method, place) in layout.cells
        }
        if len(theirs) < 2:
            continue
        methods = tuple(theirs)
        runs = _of_shared_seeds(layout, methods, place)
        if not runs[0]:
            continue
        tau = kendall(list(theirs.values()), [statistics.fmean(run.value for run in same) for same in runs])
        draws = _draws(runs)
        interval = None
        if draws is not None:
            interval = quantiles(np.array([kendall(list(theirs.values()), list(draw)) for draw in draws.T]))
        found.append(Agreement(times, methods, tau, interval, len(runs[0])))
    return found


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's τ-b of two rankings of the same things; 0 where one of them has all tied."""
    from scipy import stats  # takes a second to import

    tau = float(stats.kendalltau(one, other).statistic)
    return 0.0 if math.isnan(tau) else tau


def _of_shared_seeds(layout: Layout, methods: Sequence[str], place: float) -> list[list[Record]]:
    """Of each method its records at a place, of the seeds that all of them have there, in the order of the seeds."""
    runs: list[dict[int, Record]] = []
    for method in methods:
        same = (record for record in layout.records if (record.method, record.at) == (method, place))
        runs.append({record.seed: record for record in same})
    seeds = sorted(set.intersection(*(set(each) for each in runs)))
    return [[each[seed] for seed in seeds] for each in runs]


def _draws(runs: Sequence[Sequence[Record]]) -> np.ndarray | None:
    """Values [methods, resamples] as they might have come out, of records [methods, seeds]; None if not known."""
    seeds = len(runs[0])
    if seeds > 1:
        values = np.array([[each.value for each in same] for same in runs])
        drawn = np.random.Generator(np.random.PCG64(SEED)).integers(seeds, size=(FEW, seeds))
        return values[:, drawn].mean(axis=2)
    alone = [same[0] for same in runs]
    counts = alone[0].block_counts
    if counts is None or any(record.block_counts != counts for record in alone):
        return None
    return resampled(np.array([record.block_sums for record in alone]), np.array(counts), resamples=FEW)


def _grid(published: Published, layout: Layout) -> Grid:
    metric = layout.metric
    agreed = {each.multiple: each for each in agreement(published, layout)}
    multiples = [length / published.train_length for length in published.lengths]
    rows = []
    for method, values in published.rows.items():
        cells = []
        for times, value in zip(multiples, values, strict=True):
            cell = layout.cells.get((method, layout.train_length * times))
            theirs = "–" if value is None else metric.shown(value)
            place = layout.train_length * times
            ours = str(cell).rstrip("*") if cell is not None else "–"
            if cell is None and method in layout.methods and place in layout.places:
                ours = layout.missing(method, place)
            cells.append(f"{theirs} | {ours}")
        rows.append((method, tuple(cells)))
    order = []
    for times in multiples:
        known = agreed.get(times)
        text = "–" if known is None else f"{known.tau:+.2f}"
        if known is not None and known.interval is not None:
            text += f" [{known.interval[0]:+.2f}, {known.interval[1]:+.2f}]"
        order.append(text + count_note(None if known is None else layout.few(known.seeds)))
    rows.append(("order agreement τ", tuple(order)))
    return Grid(
        title=f"Theirs | ours: {published.source}; ours: {layout.title}",
        corner="method",
        heads=tuple(
            f"{multiple(times)} ({length:,} | {layout.train_length * times:,.0f})"
            for times, length in zip(multiples, published.lengths, strict=True)
        ),
        rows=tuple(rows),
        notes=(
            "Single numbers are not comparable; orders of methods are.",
            "τ is Kendall's, 1 for the same order and −1 for the reverse; its 95% interval is a bootstrap over our "
            "seeds, or over blocks of our text where there is one seed.",
            *(["It takes the seeds that all our methods share at a length."] if layout.repeats > 1 else []),
        ),
    )

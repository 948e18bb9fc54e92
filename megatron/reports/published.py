"""Somebody else's table beside ours, and whether both put the methods into the same order.

Single numbers are not comparable: corpora, tokenizers, sizes and protocols differ. What can be compared is the order of
methods at a multiple of the training length. Agreement is Kendall's τ-b (Kendall 1938, A new measure of rank
correlation): the share of pairs that both order alike, minus the share that they order differently; 1 is the same
order, 0 none, −1 the reverse. Its interval is a bootstrap over what our numbers are made of, with theirs as printed:
over seeds where all methods share several, else over blocks of the text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.reports.bootstrap import RESAMPLES, SEED, quantiles, resampled
from megatron.reports.grids import Grid
from megatron.reports.layout import Layout, multiple
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
    """How far both orders agree, at every multiple that both have, over methods that both have there."""
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
        ours = [layout.cells[method, place].mean for method in methods]
        tau = kendall(list(theirs.values()), ours)
        draws = _draws(layout, methods, place)
        interval = None
        if draws is not None:
            interval = quantiles(np.array([kendall(list(theirs.values()), list(draw)) for draw in draws.T]))
        found.append(Agreement(times, methods, tau, interval))
    return found


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's τ-b of two rankings of the same things; 0 where one of them has all tied."""
    from scipy import stats  # takes a second to import

    tau = float(stats.kendalltau(one, other).statistic)
    return 0.0 if math.isnan(tau) else tau


def _draws(layout: Layout, methods: Sequence[str], place: float) -> np.ndarray | None:
    """Our values [methods, resamples] as they might have come out; None if that is not known."""
    runs: list[dict[int, Record]] = []
    for method in methods:
        same = (record for record in layout.records if (record.method, record.at) == (method, place))
        runs.append({record.seed: record for record in same})
    seeds = sorted(set.intersection(*(set(each) for each in runs)))
    if len(seeds) > 1:
        values = np.array([[each[seed].value for seed in seeds] for each in runs])
        drawn = np.random.Generator(np.random.PCG64(SEED)).integers(len(seeds), size=(FEW, len(seeds)))
        return values[:, drawn].mean(axis=2)
    alone = [next(iter(each.values())) for each in runs]
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
            cells.append(f"{theirs} | {'–' if cell is None else str(cell).rstrip('*')}")
        rows.append((method, tuple(cells)))
    order = []
    for times in multiples:
        known = agreed.get(times)
        text = "–" if known is None else f"{known.tau:+.2f}"
        if known is not None and known.interval is not None:
            text += f" [{known.interval[0]:+.2f}, {known.interval[1]:+.2f}]"
        order.append(text)
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
        ),
    )

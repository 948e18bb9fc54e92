"""Charts of curves: of a comparison table, or of functions of a number. `charts.py` defines how they are drawn.

The chart of a table shows a metric over lengths or positions, with one curve for each method. A curve is the mean over
seeds; its bars or bands span the seeds, or are the interval of a single seed. Functions have an optional band, for
example the median and the spread over heads.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron.reports.axes import ChartScale, choose_linear_ticks, choose_scales, format_multiple, join_headers
from megatron.reports.charts import (
    CHARACTER_WIDTH,
    MAX_DRAWN_CURVES,
    NARROW_WIDTH,
    WIDE_WIDTH,
    Chart,
    ChartPoint,
    ChartPosition,
    ChartSeries,
    ChartTick,
)
from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.metrics import format_number
from megatron.reports.records import Record

MAX_DENSE_POINTS = 160
"""Maximum number of points of a curve on a dense axis."""
EDGE_MARGIN = 0.03
"""Margin left of the first x and right of the last x in charts with markers and bars, as a fraction of the width.

It keeps bars inside the plot and off the axis labels.
"""

MAX_NUMBER = 1e300
"""Substitute for infinity, which JSON cannot represent."""
AXIS_SCALES: dict[str, Callable[[float], float]] = {"linear": float, "log": math.log, "log1p": math.log1p}


def build_curve_chart(
    table: ComparisonTable, name: str, alt_text: str, shown_methods: Sequence[str] | None = None
) -> Chart:
    """Build a chart of a metric over the axis of a table, with a curve for each method.

    Args:
        table: source of the values.
        name: name of the chart.
        alt_text: description in words.
        shown_methods: methods to color, in order; trivial baselines are always colored. If None, the best methods at
            the last x, up to the number of colors.
    """
    curves = {method: get_curve(table, method) for method in table.methods}
    measured = [method for method in table.methods if curves[method][0]]
    order = _order_methods(table, measured, curves, shown_methods)
    x_values = _downsample(sorted({x for method in measured for x in curves[method][0]}), table)
    positions = _locate_x_values(x_values, table)
    index_by_x = {x: index for index, x in enumerate(x_values)}
    series = []
    for index, (method, is_colored) in enumerate(order):
        points = [
            ChartPoint(index_by_x[x], mean, _format_point(table, method, x, mean), bar)
            for x, mean, bar in zip(*curves[method], strict=True)
            if x in index_by_x
        ]
        series.append(ChartSeries(method, tuple(points), is_colored, index))
    has_intervals = any(point.interval for each in series for point in each.points)
    note = f"{'Bands' if table.axis.is_dense else 'Bars'}: {get_bar_meaning(table)}."
    if not table.axis.is_dense and len(series) > 1:
        note += " Curves are offset horizontally so that their bars do not overlap."
    return Chart(
        name,
        table.title,
        alt_text,
        _format_x_title(table),
        table.metric.axis_label,
        tuple(
            ChartPosition(share, join_headers(*table.axis.get_column_headers(x, table.train_length)))
            for x, share in zip(x_values, positions, strict=True)
        ),
        _choose_x_ticks(x_values, positions, table),
        choose_scales(*_list_limits(series), table.metric),
        tuple(series),
        "dense" if table.axis.is_dense else "curves",
        note if has_intervals else "",
        _locate_train_length(x_values, table),
        missing=tuple(f"{method} ({table.get_missing_text(method, table.x_values[-1])})"
                      for method in table.methods if method not in measured),
    )  # fmt: skip


def get_bar_meaning(table: ComparisonTable) -> str:
    """Return the meaning of the bars or bands of a table's curves."""
    return "range over seeds" if table.max_seeds > 1 else "95% interval over windows"


def get_curve(table: ComparisonTable, method: str) -> tuple[list[float], list[float], list[tuple[float, float] | None]]:
    """Return the x values, means, and bars of one method."""
    records_by_x: dict[float, list[Record]] = {}
    for record in table.records:
        if record.method == method:
            records_by_x.setdefault(record.x_value, []).append(record)
    x_values = sorted(records_by_x)
    means, bars = [], []
    for x in x_values:
        values = [record.value for record in records_by_x[x]]
        means.append(statistics.fmean(values))
        # All bars of a plot mean the same, so with several seeds a single one has no bar.
        single_interval = None if table.max_seeds > 1 else records_by_x[x][0].interval
        bars.append((min(values), max(values)) if len(values) > 1 else single_interval)
    return x_values, means, bars


def _list_limits(series: Sequence[ChartSeries]) -> tuple[list[float], list[float]]:
    """Return the values and interval ends of colored curves, and the values of other curves."""
    drawn, others = [], []
    for each in series:
        for point in each.points:
            if each.is_colored:
                drawn += [point.value, *(point.interval or ())]
            else:
                others.append(point.value)
    return drawn, others


def _order_methods(
    table: ComparisonTable,
    measured: Sequence[str],
    curves: Mapping[str, tuple[list[float], list[float], list[tuple[float, float] | None]]],
    shown_methods: Sequence[str] | None,
) -> list[tuple[str, bool]]:
    """Return the methods, each with True if it is colored. Colored methods come first, and there is at least one."""
    if shown_methods is not None and not {*shown_methods, *table.trivial_baselines}.isdisjoint(measured):
        drawn = [method for method in shown_methods if method in measured]
        drawn += [method for method in table.trivial_baselines if method in measured and method not in drawn]
    elif len(measured) > MAX_DRAWN_CURVES:
        best_first = sorted(
            measured,
            key=lambda method: (-curves[method][0][-1], table.metric.get_sort_key(curves[method][1][-1])),
        )
        drawn = best_first[:MAX_DRAWN_CURVES]
    else:
        drawn = list(measured)
    return [(method, True) for method in drawn] + [(method, False) for method in measured if method not in drawn]


def _downsample(x_values: list[float], table: ComparisonTable) -> list[float]:
    """Return all x values, or `MAX_DENSE_POINTS` values of a dense axis plus the table's columns.

    The latter are evenly spaced by logarithm.
    """
    if not table.axis.is_dense or len(x_values) <= MAX_DENSE_POINTS:
        return x_values
    wanted = np.geomspace(x_values[0], x_values[-1], MAX_DENSE_POINTS)
    indices = np.clip(np.searchsorted(x_values, wanted), 0, len(x_values) - 1)
    return sorted({*(x_values[index] for index in indices), *table.x_values})


def _locate_x_values(x_values: Sequence[float], table: ComparisonTable) -> list[float]:
    """Return the horizontal position of each x value, as a fraction of the width."""
    return [_locate_x(x, x_values, table) for x in x_values]


def _locate_x(x: float, x_values: Sequence[float], table: ComparisonTable) -> float:
    """Return the horizontal position of an x value, as a fraction of the width.

    Token counts use a logarithmic axis. Axes with markers and bars have margins at both edges.
    """
    low, high = x_values[0], x_values[-1]
    if low == high:
        return 0.5
    share = math.log(x / low) / math.log(high / low) if table.axis.in_tokens else (x - low) / (high - low)
    room = 0.0 if table.axis.is_dense else EDGE_MARGIN
    return room + (1 - 2 * room) * share


def _locate_train_length(x_values: Sequence[float], table: ComparisonTable) -> tuple[float, str] | None:
    """Return the mark at the training length if it is inside the axis, else None."""
    length = table.train_length
    if not table.axis.in_tokens or not x_values[0] <= length <= x_values[-1]:
        return None
    return _locate_x(length, x_values, table), "training length"


def _format_x_title(table: ComparisonTable) -> str:
    return f"{table.axis.title}, and multiples of the training length" if table.axis.in_tokens else table.axis.title


def _choose_x_ticks(
    x_values: Sequence[float], positions: Sequence[float], table: ComparisonTable
) -> tuple[ChartTick, ...]:
    """Choose ticks at the table's columns whose labels do not overlap, starting from the last one."""
    candidates = []
    for x, share in zip(x_values, positions, strict=True):
        if x in table.x_values:
            multiple = format_multiple(x / table.train_length) if table.axis.in_tokens else ""
            candidates.append((share, table.axis.format_value(x), multiple))
    return _keep_separate_ticks(candidates)


def _format_point(table: ComparisonTable, method: str, x: float, mean: float) -> str:
    cell = table.cells.get((method, x))
    return table.metric.format_value(mean) if cell is None else str(cell).rstrip("*")


def _keep_separate_ticks(candidates: Sequence[tuple[float, str, str]]) -> tuple[ChartTick, ...]:
    """Return the ticks (position, label, lower label) whose labels do not overlap on wide screens or on phones."""
    kept = {width: _select_separate_labels(candidates, width) for width in (NARROW_WIDTH, WIDE_WIDTH)}
    return tuple(
        ChartTick(share, text, subtext, is_wide_only=index not in kept[NARROW_WIDTH])
        for index, (share, text, subtext) in enumerate(candidates)
        if index in kept[WIDE_WIDTH]
    )


def _select_separate_labels(ticks: Sequence[tuple[float, str, str]], width: float) -> set[int]:
    """Return the indices of ticks (position, label, lower label) whose labels do not overlap."""
    kept: set[int] = set()
    edge = math.inf
    for index in reversed(range(len(ticks))):
        share, text, subtext = ticks[index]
        half = CHARACTER_WIDTH * max(len(text), len(subtext)) / 2
        if share * width + half + 5 <= edge:
            kept.add(index)
            edge = share * width - half
    return kept


@dataclass(frozen=True)
class ChartLine:
    """Function drawn as a line."""

    name: str
    points: Sequence[tuple[float, float]]
    """x and y values in axis order. y may be infinite; points with y = NaN are skipped."""
    band: Sequence[tuple[float, float]] | None = None
    """Lower and upper end of the band at each point."""
    style: int = 0
    """Index of its color and dash pattern."""


def build_median_line(name: str, x_values: Sequence[float], curves: Sequence[Sequence[float]], style: int) -> ChartLine:
    """Build a line of the median of curves at each x, with a band from the 10% to the 90% quantile."""
    low, middle, high = np.quantile(np.array(curves, dtype=float), [0.1, 0.5, 0.9], axis=0).tolist()
    return ChartLine(name, list(zip(x_values, middle, strict=True)), list(zip(low, high, strict=True)), style)


@dataclass(frozen=True)
class HorizontalAxis:
    """Range and scale of the horizontal axis."""

    title: str
    first: float
    """Number at the left edge; may be larger than the last."""
    last: float
    scale: Literal["linear", "log", "log1p"] = "linear"
    """Scale: linear, log, or log1p (log of the number plus 1, for distances that begin at 0)."""

    def locate(self, x: float) -> float:
        """Return the horizontal position of a number, as a fraction of the width."""
        first, here, last = map(AXIS_SCALES[self.scale], (self.first, x, self.last))
        return 0.5 if first == last else (here - first) / (last - first)

    def choose_ticks(self) -> tuple[ChartTick, ...]:
        low, high = sorted((self.first, self.last))
        if self.scale == "linear":
            values = choose_linear_ticks(low, high)
        else:
            base = 2 if high < 2000 else 10
            values = [base**power for power in range(64) if low <= base**power <= high]
            values = [0.0, *values] if low == 0 else values
        texts = [(self.locate(value), f"{value:,.10g}", "") for value in values]
        texts.sort()
        return _keep_separate_ticks(texts)


def build_line_chart(
    name: str,
    title: str,
    alt_text: str,
    axis: HorizontalAxis,
    y_title: str,
    lines: Sequence[ChartLine],
    *,
    y_limits: tuple[float, float],
    y_format: Callable[[float], str] = format_number,
    note: str = "",
    mark: tuple[float, str] | None = None,
    series_word: str = "methods",
) -> Chart:
    """Build a chart. If there are more lines than colors, evenly spaced lines are colored at first.

    Args:
        name: id of the figure on its page, and name of the file when saved.
        title, y_title: titles of the chart and of its vertical axis.
        alt_text: description for screen readers.
        axis: horizontal axis.
        lines: at least one line.
        y_limits: range of the vertical axis; lines are clipped at its edges.
        y_format: function that formats values under the pointer.
        note: sentence below the chart.
        mark: x and label of a vertical line.
        series_word: word for the lines, in the plural.
    """
    x_values = sorted({x for line in lines for x, y in line.points if not math.isnan(y)}, key=axis.locate)
    index_by_x = {x: index for index, x in enumerate(x_values)}
    num_drawn = min(len(lines), MAX_DRAWN_CURVES)
    drawn = [lines[index * len(lines) // num_drawn] for index in range(num_drawn)]
    low, high = y_limits

    def limit(value: float) -> float:
        return min(max(value, -MAX_NUMBER), MAX_NUMBER)

    def build_point(x: float, y: float, band: tuple[float, float] | None) -> ChartPoint:
        interval = None if band is None else (limit(band[0]), limit(band[1]))
        text = y_format(y) if band is None else f"{y_format(y)} [{y_format(band[0])}, {y_format(band[1])}]"
        return ChartPoint(index_by_x[x], limit(y), text, interval)

    series = []
    for line in [*drawn, *(line for line in lines if line not in drawn)]:
        bands: Sequence[tuple[float, float] | None] = line.band or [None] * len(line.points)
        points = tuple(
            build_point(x, y, band) for (x, y), band in zip(line.points, bands, strict=True) if not math.isnan(y)
        )
        series.append(ChartSeries(line.name, points, line in drawn, line.style))
    ticks = tuple((value, f"{value:,.10g}") for value in choose_linear_ticks(low, high))
    room = 0.02 * (high - low)
    return Chart(
        name,
        title,
        alt_text,
        axis.title,
        y_title,
        tuple(ChartPosition(axis.locate(x), f"{axis.title}: {x:,.4g}") for x in x_values),
        axis.choose_ticks(),
        (ChartScale("linear", low - room, high + room, ticks),),
        tuple(series),
        "dense",
        note,
        None if mark is None else (axis.locate(mark[0]), mark[1]),
        series_word=series_word,
    )

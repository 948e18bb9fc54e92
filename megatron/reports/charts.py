"""Charts for HTML pages: curves or points, in coordinates that a template renders as inline SVG.

One drawing serves all screen widths and both color schemes. Coordinates are fractions of the plot's width and height.
The template writes them as percentages, so text and strokes keep their size at any width. Colors are classes of the
style sheet. `templates/page.js` reads the same numbers from the page, and redraws a chart when a reader switches its
scale or its methods. Without scripts the static chart remains.

A scale covers the range of most values. A line to a value beyond the scale (a perplexity of a million among others of
five) continues toward that value. It is clipped at the edge of the plot, so its slope is correct. If lines have
markers, a triangle at the edge marks the clipped value, and pointing at it shows the number. Perplexities are clipped
at `MAX_LOG_RATIO` times the minimum on a logarithmic scale, and at `MAX_LINEAR_RATIO` times on a linear one. Other
metrics are clipped if they are more than `MAX_SPREADS` interquartile ranges away from the quartiles.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.reports.axes import ChartScale, choose_scales, format_multiple, join_headers
from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.html_page import format_fraction
from megatron.reports.records import Record

NUM_COLORS, NUM_MARKERS, NUM_DASHES = 8, 8, 4
MAX_DRAWN_CURVES = NUM_COLORS
"""Maximum number of colored curves: the best at the last x. Others are faint unless selected."""
MAX_DENSE_POINTS = 160
"""Maximum number of points of a curve on a dense axis."""
NARROW_WIDTH, WIDE_WIDTH = 240, 520
"""Widths of a plot in pixels: on a phone, and on screens wider than 40rem."""
CHARACTER_WIDTH, LINE_HEIGHT = 6.8, 15.0
"""Size of a plot's text in pixels."""
PLOT_HEIGHT = 300
"""Height of a plot in pixels, as in style.css."""
BAR_OFFSET = 0.007
"""Horizontal offset between curves with bars, as a fraction of the width."""
EDGE_MARGIN = 0.03
"""Margin left of the first x and right of the last x in charts with markers and bars, as a fraction of the width.

It keeps bars inside the plot and off the axis labels.
"""
MAX_OVERSHOOT = 100.0
"""Maximum distance that a line is drawn beyond the plot, in plot heights.

Browsers clip what is outside. The point where a line leaves the plot is off by less than 1% of the distance between two
x values.
"""
SIGNIFICANT_DIGITS = 7
"""Number of significant digits in the page; records have all digits."""


@dataclass(frozen=True)
class ChartPosition:
    """Position on the horizontal axis."""

    share: float
    """Distance from the left edge, as a fraction of the width."""
    text: str
    """Name in sentences and tables, for example 32× (2,048)."""


@dataclass(frozen=True)
class ChartTick:
    """Tick of the horizontal axis."""

    share: float
    text: str
    subtext: str = ""
    is_wide_only: bool = False
    """True if its label is hidden on phones for lack of space."""


@dataclass(frozen=True)
class ChartPoint:
    """One value of one series."""

    place: int
    """Index into the chart's x positions."""
    value: float
    text: str
    interval: tuple[float, float] | None = None
    """Range of its error bar or band."""


@dataclass(frozen=True)
class ChartSeries:
    """Points of one method."""

    name: str
    points: tuple[ChartPoint, ...]
    is_drawn: bool
    """True if the curve is colored before a reader selects curves."""
    style: int
    """Index of its color, marker, and dash pattern."""

    @property
    def css_class(self) -> str:
        color, marker, dash = get_style_indices(self.style)
        return f"c{color} m{marker} d{dash}"

    @property
    def marker(self) -> str:
        """SVG id of its marker."""
        return f"m{get_style_indices(self.style)[1]}"


@dataclass(frozen=True)
class Chart:
    """Figure of a page."""

    name: str
    """Id of its element, unique on the page, and name of the file when saved."""
    title: str
    alt_text: str
    """Description for screen readers."""
    x_title: str
    y_title: str
    x_positions: tuple[ChartPosition, ...]
    ticks: tuple[ChartTick, ...]
    scales: tuple[ChartScale, ...]
    """Vertical axes; the first one is used initially."""
    series: tuple[ChartSeries, ...]
    kind: str = "curves"
    """Chart type: curves, dense (bands instead of markers), or points (one for each series)."""
    interval_note: str = ""
    """Meaning of the bars or bands."""
    mark: tuple[float, str] | None = None
    """Horizontal fraction and label of a vertical line."""
    path: tuple[str, ...] = ()
    """Names of points connected by a line."""
    missing: tuple[str, ...] = ()
    """Methods without a value in this chart, with the reason."""
    series_word: str = "methods"
    """Word for its series, in the plural."""

    @property
    def scale(self) -> ChartScale:
        return self.scales[0]

    @cached_property
    def clip_note(self) -> str:
        """Explanation of how clipped values are drawn, with the extreme values; empty if none are clipped."""
        points = [point for series in self.series for point in series.points]
        if not points:
            return ""
        outermost = (
            ("up", max(points, key=lambda point: point.value), "over"),
            ("down", min(points, key=lambda point: point.value), "under"),
        )
        reaches = [
            f"{way} to {point.text}"
            for way, point, mark in outermost
            if any(scale.get_clip_mark(point.value) == mark for scale in self.scales)
        ]
        if not reaches:
            return ""
        drawing = "A line that leaves the plot has" if self.kind == "dense" else "A filled triangle at the edge marks"
        values = "values" if self.kind == "dense" else "a value"
        return f"{drawing} {values} beyond the axis, {' and '.join(reaches)}; hover or use the arrow keys for values."

    def list_shapes(self, series: ChartSeries) -> dict[str, Any]:
        """Return the SVG shapes of a series.

        `line` and `band` are points in a range of 0 to 1000, or beyond if clipped; `bars` and `markers` are
        percentages. A line of one point is its marker. A series that is not colored only has its line and the triangles
        of clipped values.
        """
        scale, offset = self.scale, self._get_offset(series)
        x_shares = [self.x_positions[point.place].share + offset for point in series.points]
        line = [(x, scale.locate(point.value, MAX_OVERSHOOT)) for x, point in zip(x_shares, series.points, strict=True)]
        shapes: dict[str, Any] = {"line": _format_path(line), "band": "", "bars": [], "markers": []}
        if self.kind != "dense" or len(series.points) == 1:
            marks = [scale.get_clip_mark(point.value) or (series.is_drawn and series.marker) for point in series.points]
            shapes["markers"] = [
                (mark, format_fraction(x), format_fraction(scale.locate(point.value)))
                for mark, x, point in zip(marks, x_shares, series.points, strict=True)
                if mark
            ]
        if not series.is_drawn:
            return shapes
        overshoot = MAX_OVERSHOOT if self.kind == "dense" else 0.0
        spans = [
            (x, *(scale.locate(bound, overshoot) for bound in point.interval))
            for x, point in zip(x_shares, series.points, strict=True)
            if point.interval is not None
        ]
        if self.kind == "dense":
            upper = [(x, high) for x, _, high in spans]
            shapes["band"] = _format_path([*upper, *((x, low) for x, low, _ in reversed(spans))])
        elif self._has_bars:
            shapes["bars"] = [tuple(map(format_fraction, span)) for span in spans]
        return shapes

    @cached_property
    def _has_bars(self) -> bool:
        """True if curves have error bars. Too many bars would hide each other."""
        drawn = [series for series in self.series if series.is_drawn]
        has_intervals = any(point.interval is not None for series in drawn for point in series.points)
        return self.kind == "curves" and has_intervals and len(drawn) <= MAX_DRAWN_CURVES

    def _get_offset(self, series: ChartSeries) -> float:
        """Return the horizontal offset of a curve with bars, as a fraction of the width. Bars must not overlap."""
        if not (self._has_bars and series.is_drawn):
            return 0.0
        drawn = [other for other in self.series if other.is_drawn]
        return BAR_OFFSET * (drawn.index(series) - (len(drawn) - 1) / 2)

    @cached_property
    def path_points(self) -> str:
        """Points of the line through `path`."""
        by_name = {series.name: series.points[0] for series in self.series}
        points = [by_name[name] for name in self.path]
        return _format_path(
            [(self.x_positions[point.place].share, self.scale.locate(point.value, MAX_OVERSHOOT)) for point in points]
        )

    @property
    def data(self) -> dict[str, Any]:
        """Data for the page's script, serializable as JSON; numbers have `SIGNIFICANT_DIGITS` digits."""
        return {
            "kind": self.kind,
            "word": self.series_word,
            "places": [[round(place.share, 5), place.text] for place in self.x_positions],
            "scales": [
                {
                    "name": scale.name,
                    "low": _round(scale.low),
                    "high": _round(scale.high),
                    "ticks": [[_round(value), text] for value, text in scale.ticks],
                }
                for scale in self.scales
            ],
            "series": [
                {
                    "name": series.name,
                    "style": get_style_indices(series.style),
                    "drawn": series.is_drawn,
                    "points": [
                        [point.place, _round(point.value), point.text, *map(_round, point.interval or ())]
                        for point in series.points
                    ],
                }
                for series in self.series
            ],
        }

    @cached_property
    def labels(self) -> list[tuple[str, str, str, str]]:
        """Labels of points that do not overlap at any width: x, y, anchor, and text.

        A label is placed beside its point, away from the nearer edge. Wider plots only move points apart, so labels
        that do not overlap on a phone never overlap. Points on the path come first.
        """
        if self.kind != "points":
            return []
        taken = [
            (
                self.x_positions[p.place].share * NARROW_WIDTH - 5,
                self.x_positions[p.place].share * NARROW_WIDTH + 5,
                self.scale.locate(p.value) * PLOT_HEIGHT,
            )
            for series in self.series
            for p in series.points
        ]
        labels = []
        order = sorted(self.series, key=lambda series: (series.name not in self.path, not series.is_drawn))
        for series in order:
            (point,) = series.points
            share, y = self.x_positions[point.place].share, self.scale.locate(point.value)
            x, width = share * NARROW_WIDTH, CHARACTER_WIDTH * len(series.name)
            left = x + 8 if share < 0.5 else x - 8 - width
            own = (x - 5, x + 5, y * PLOT_HEIGHT)
            others = [box for box in taken if box != own]
            is_free = all(
                left + width < start - 2 or left > end + 2 or abs(y * PLOT_HEIGHT - middle) > LINE_HEIGHT
                for start, end, middle in others
            )
            if is_free and left > -50 and left + width < NARROW_WIDTH + 20:
                taken.append((left, left + width, y * PLOT_HEIGHT))
                anchor = "start" if share < 0.5 else "end"
                labels.append((format_fraction(share), format_fraction(y), anchor, series.name))
        return labels


def get_style_indices(index: int) -> tuple[int, int, int]:
    """Return the color, marker, and dash indices of a curve.

    Of 64 curves no two share color and marker; of 256 no two share all three.
    """
    row = index // NUM_COLORS
    return index % NUM_COLORS, (index + row) % NUM_MARKERS, (row + index // (NUM_COLORS * NUM_MARKERS)) % NUM_DASHES


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
    for index, (method, is_drawn) in enumerate(order):
        points = [
            ChartPoint(index_by_x[x], mean, _format_point(table, method, x, mean), bar)
            for x, mean, bar in zip(*curves[method], strict=True)
            if x in index_by_x
        ]
        series.append(ChartSeries(method, tuple(points), is_drawn, index))
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
            if each.is_drawn:
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
    """Return methods with a flag for color. Colored methods come first, and there is at least one."""
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
    kept = {width: select_separate_labels(candidates, width) for width in (NARROW_WIDTH, WIDE_WIDTH)}
    return tuple(
        ChartTick(share, text, multiple, is_wide_only=index not in kept[NARROW_WIDTH])
        for index, (share, text, multiple) in enumerate(candidates)
        if index in kept[WIDE_WIDTH]
    )


def select_separate_labels(ticks: Sequence[tuple[float, str, str]], width: float) -> set[int]:
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


def _format_point(table: ComparisonTable, method: str, x: float, mean: float) -> str:
    cell = table.cells.get((method, x))
    return table.metric.format_value(mean) if cell is None else str(cell).rstrip("*")


def _format_path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{1000 * x:.0f},{1000 * y:.1f}" for x, y in points)


def _round(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")

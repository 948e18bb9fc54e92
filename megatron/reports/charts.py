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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.reports.axes import ChartScale
from megatron.reports.html_page import format_fraction

NUM_COLORS, NUM_MARKERS, NUM_DASHES = 8, 8, 4
MAX_DRAWN_CURVES = NUM_COLORS
"""Maximum number of colored curves: the best at the last x. Others are faint unless selected."""
NARROW_WIDTH, WIDE_WIDTH = 240, 520
"""Widths of a plot in pixels: on a phone, and on screens wider than 40rem."""
CHARACTER_WIDTH, LINE_HEIGHT = 6.8, 15.0
"""Size of a plot's text in pixels."""
PLOT_HEIGHT = 300
"""Height of a plot in pixels, as in style.css."""
BAR_OFFSET = 0.007
"""Horizontal offset between curves with bars, as a fraction of the width."""
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

    x_index: int
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
    is_colored: bool
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
        x_shares = [self.x_positions[point.x_index].share + offset for point in series.points]
        line = [(x, scale.locate(point.value, MAX_OVERSHOOT)) for x, point in zip(x_shares, series.points, strict=True)]
        shapes: dict[str, Any] = {"line": _format_path(line), "band": "", "bars": [], "markers": []}
        if self.kind != "dense" or len(series.points) == 1:
            marks = [
                scale.get_clip_mark(point.value) or (series.is_colored and series.marker) for point in series.points
            ]
            shapes["markers"] = [
                (mark, format_fraction(x), format_fraction(scale.locate(point.value)))
                for mark, x, point in zip(marks, x_shares, series.points, strict=True)
                if mark
            ]
        if not series.is_colored:
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
        drawn = [series for series in self.series if series.is_colored]
        has_intervals = any(point.interval is not None for series in drawn for point in series.points)
        return self.kind == "curves" and has_intervals and len(drawn) <= MAX_DRAWN_CURVES

    def _get_offset(self, series: ChartSeries) -> float:
        """Return the horizontal offset of a curve with bars, as a fraction of the width. Bars must not overlap."""
        if not (self._has_bars and series.is_colored):
            return 0.0
        drawn = [other for other in self.series if other.is_colored]
        return BAR_OFFSET * (drawn.index(series) - (len(drawn) - 1) / 2)

    @cached_property
    def path_points(self) -> str:
        """Points of the line through `path`."""
        by_name = {series.name: series.points[0] for series in self.series}
        points = [by_name[name] for name in self.path]
        return _format_path(
            [(self.x_positions[point.x_index].share, self.scale.locate(point.value, MAX_OVERSHOOT)) for point in points]
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
                    "drawn": series.is_colored,
                    "points": [
                        [point.x_index, _round(point.value), point.text, *map(_round, point.interval or ())]
                        for point in series.points
                    ],
                }
                for series in self.series
            ],
        }

    @cached_property
    def labels(self) -> list[tuple[str, str, str, str]]:
        """Labels of points that do not overlap at any width: x, y, anchor, and text.

        A label is placed next to its point, away from the nearer edge. Wider plots only move points apart, so labels
        that do not overlap on a phone never overlap. Points on the path come first.
        """
        if self.kind != "points":
            return []
        taken = [
            (
                self.x_positions[p.x_index].share * NARROW_WIDTH - 5,
                self.x_positions[p.x_index].share * NARROW_WIDTH + 5,
                self.scale.locate(p.value) * PLOT_HEIGHT,
            )
            for series in self.series
            for p in series.points
        ]
        labels = []
        order = sorted(self.series, key=lambda series: (series.name not in self.path, not series.is_colored))
        for series in order:
            (point,) = series.points
            share, y = self.x_positions[point.x_index].share, self.scale.locate(point.value)
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

    Among 64 curves, no two share color and marker; among 256, no two share all three.
    """
    row = index // NUM_COLORS
    return index % NUM_COLORS, (index + row) % NUM_MARKERS, (row + index // (NUM_COLORS * NUM_MARKERS)) % NUM_DASHES


def _format_path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{1000 * x:.0f},{1000 * y:.1f}" for x, y in points)


def _round(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")

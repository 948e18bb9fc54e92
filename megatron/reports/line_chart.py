"""Chart of functions of a number, each with an optional band (for example the median and the spread over heads)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron.reports.axes import ChartScale, choose_linear_ticks
from megatron.reports.charts import (
    MAX_DRAWN_CURVES,
    NARROW_WIDTH,
    WIDE_WIDTH,
    Chart,
    ChartPoint,
    ChartPosition,
    ChartSeries,
    ChartTick,
    select_separate_labels,
)
from megatron.reports.metrics import format_number

MAX_NUMBER = 1e300
"""Substitute for infinity, which JSON cannot represent."""
SPREADS: dict[str, Callable[[float], float]] = {"linear": float, "log": math.log, "log1p": math.log1p}


@dataclass(frozen=True)
class Line:
    """Function drawn as a line."""

    name: str
    points: Sequence[tuple[float, float]]
    """x and y values in axis order. y may be infinite; points with y = NaN are skipped."""
    band: Sequence[tuple[float, float]] | None = None
    """Lower and upper end of the band at each point."""
    style: int = 0
    """Index of its color and dash pattern."""


def build_median_line(name: str, x_values: Sequence[float], curves: Sequence[Sequence[float]], style: int) -> Line:
    """Build a line of the median of curves at each x, with a band from the 10% to the 90% quantile."""
    low, middle, high = np.quantile(np.array(curves, dtype=float), [0.1, 0.5, 0.9], axis=0).tolist()
    return Line(name, list(zip(x_values, middle, strict=True)), list(zip(low, high, strict=True)), style)


@dataclass(frozen=True)
class HorizontalAxis:
    """Range and scale of the horizontal axis."""

    title: str
    first: float
    """Number at the left edge; may be larger than the last."""
    last: float
    spread: Literal["linear", "log", "log1p"] = "linear"
    """Scale: linear, log, or log1p (log of the number plus 1, for distances that begin at 0)."""

    def locate(self, x: float) -> float:
        """Return the horizontal position of a number, as a fraction of the width."""
        first, here, last = map(SPREADS[self.spread], (self.first, x, self.last))
        return 0.5 if first == last else (here - first) / (last - first)

    def choose_ticks(self) -> tuple[ChartTick, ...]:
        low, high = sorted((self.first, self.last))
        if self.spread == "linear":
            values = choose_linear_ticks(low, high)
        else:
            base = 2 if high < 2000 else 10
            values = [base**power for power in range(64) if low <= base**power <= high]
            values = [0.0, *values] if low == 0 else values
        texts = [(self.locate(value), f"{value:,.10g}", "") for value in values]
        texts.sort()
        kept = {width: select_separate_labels(texts, width) for width in (NARROW_WIDTH, WIDE_WIDTH)}
        return tuple(
            ChartTick(share, text, is_wide_only=index not in kept[NARROW_WIDTH])
            for index, (share, text, _) in enumerate(texts)
            if index in kept[WIDE_WIDTH]
        )


def build_line_chart(
    name: str,
    title: str,
    alt_text: str,
    axis: HorizontalAxis,
    y_title: str,
    lines: Sequence[Line],
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

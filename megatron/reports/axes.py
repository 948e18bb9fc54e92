"""Axes of tables and charts: what columns and horizontal axes show, and the scales of vertical axes.

Most records are scores at a length. Others are scores at a position inside windows, or at a distance from the tokens to
copy. These have their own axes, and their length is that of the window.

A reader of a chart selects one of several vertical scales, with their ranges and ticks.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.reports.metrics import Metric
from megatron.utils.formatting import format_choices


@dataclass(frozen=True)
class RecordAxis:
    """Quantity that values are plotted over."""

    name: str
    """Name in the `axis` field of records."""
    title: str
    """Title with its unit, as an axis label."""
    column_phrase: str
    """Phrase that completes "scored" for a column: at every length."""
    in_tokens: bool = True
    """True if values are token counts, with multiples of the training length and a log axis; otherwise shares."""
    min_value: float = 1.0
    max_value: float = float("inf")
    is_dense: bool = False
    """True if tables show only some of the values, because there are too many."""

    @property
    def inline_name(self) -> str:
        """Name in a sentence, after "by"."""
        return self.name.replace("_", " ")

    def format_value(self, x: float) -> str:
        """Format a value for an axis or a column header."""
        return f"{round(x):,}" if self.in_tokens else f"{x:.0%}"

    def format_value_with_unit(self, x: float) -> str:
        """Format a value in a sentence: 2,048 tokens, 50%."""
        return f"{self.format_value(x)} tokens" if self.in_tokens else self.format_value(x)

    def get_column_headers(self, x: float, train_length: int) -> tuple[str, str]:
        """Return both header lines of a column: multiple of the training length if applicable, and value."""
        return format_multiple(x / train_length) if self.in_tokens else "", self.format_value(x)


RECORD_AXES = {
    axis.name: axis
    for axis in (
        RecordAxis("length", "length: tokens", "at every length"),
        RecordAxis("position", "position in the window: tokens seen, including itself", "in a bin of positions"),
        RecordAxis(
            "tokens_seen", "position in the window: tokens seen, including itself", "at a position", is_dense=True
        ),
        RecordAxis("distance", "distance to the first occurrence: tokens", "at a distance"),
        RecordAxis(
            "depth",
            "depth: share of the text before the answer",
            "at a depth",
            in_tokens=False,
            min_value=0,
            max_value=1,
        ),
    )
}
"""All axes by name."""


def get_record_axis(name: str) -> RecordAxis:
    """Return an axis by name.

    Raises:
        ValueError: the name is unknown; the message lists the choices.
    """
    if name not in RECORD_AXES:
        raise ValueError(f"unknown axis {name!r}; {format_choices(name, RECORD_AXES)}")
    return RECORD_AXES[name]


def join_headers(header: str, subheader: str) -> str:
    """Join both header lines of a column in one: 32× (2,048)."""
    return f"{header} ({subheader})" if header and subheader else header or subheader


def format_multiple(value: float) -> str:
    """Format a multiple: 1×, 32×, 1.5×."""
    return f"{value:.3g}×" if value < 1000 else f"{value:,.0f}×"


MAX_LOG_RATIO, MAX_LINEAR_RATIO, MAX_SPREADS = 1000.0, 10.0, 10.0
MAX_FAINT_CURVE_RATIO = 4.0
"""Maximum ratio of a faint curve's perplexity to the range of colored curves, for the axis to include it."""


@dataclass(frozen=True)
class ChartScale:
    """Vertical axis of a chart."""

    name: str
    """Either log or linear."""
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Value and label of each tick, ascending."""

    def locate(self, value: float, reach: float = 0.0) -> float:
        """Return the vertical position of a value: 0 at the top edge, 1 at the bottom edge.

        Values beyond the scale are limited to `reach` below 0 or above 1.
        """
        if self.name == "log":
            position = math.log(value) if value > 0 else -math.inf
            share = (math.log(self.high) - position) / math.log(self.high / self.low)
        else:
            share = (self.high - value) / (self.high - self.low)
        return min(max(share, -reach), 1 + reach)

    def get_clip_mark(self, value: float) -> str | None:
        """Return `over` or `under` for a value beyond the scale, else None."""
        return "over" if value > self.high else "under" if value < self.low else None


def choose_scales(values: Sequence[float], others: Sequence[float], metric: Metric) -> tuple[ChartScale, ...]:
    """Choose the vertical axes that a reader can select, best one first.

    Args:
        values: values that the axes should cover, unless they are clipped.
        others: values that the axes cover only if they are not far beyond `values`.
        metric: metric of the values.
    """
    low, high = min(values), max(values)
    if metric.plot_scale == "logarithmic" and low > 0:
        low = min([low, *(other for other in others if other > low / MAX_FAINT_CURVE_RATIO)])
        high = max([high, *(other for other in others if other < high * MAX_FAINT_CURVE_RATIO)])
    if metric.plot_scale == "linear" or low <= 0:
        low, high = min([low, *others]), max([high, *others])
        values = [*values, *others]
        first, _, third = statistics.quantiles(values, n=4) if len(values) > 3 else (low, low, high)
        reach = MAX_SPREADS * max(third - first, abs(third) * 0.01)
        return (_build_scale("linear", max(low, first - reach), min(high, third + reach), metric),)
    log = _build_scale("log", low, min(high, MAX_LOG_RATIO * low), metric)
    linear = _build_scale("linear", low, min(high, MAX_LINEAR_RATIO * low), metric)
    return (log, linear) if high > 4 * low else (linear, log)


def _build_scale(name: str, low: float, high: float, metric: Metric) -> ChartScale:
    """Build a scale with margins above and below the range, and ticks within it."""
    if name == "log":
        room = max((high / low) ** 0.04, 1.02)
        low, high = low / room, high * room
        ticks = choose_log_ticks(low, high)
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) < 3:
            ticks = choose_linear_ticks(low, high)
    else:
        room = max(0.04 * (high - low), 0.01 * abs(high)) or 1.0
        low, high = max(low - room, metric.min_value), min(high + room, metric.max_value)
        ticks = choose_linear_ticks(low, high)
    return ChartScale(name, low, high, tuple((tick, metric.format_tick(tick, ticks)) for tick in ticks))


def choose_log_ticks(low: float, high: float) -> list[float]:
    """Return ticks around the range: at powers of ten if it exceeds three decades, else at 1, 2, 5, 10, 20, 50, ….

    A range of less than one decade has ticks at 1, 1.5, 2, 3, 4, 5, 7, 10, 15, ….
    """
    steps: tuple[float, ...] = (1,)
    if high / low < 1000:
        steps = (1, 2, 5) if high / low >= 10 else (1, 1.5, 2, 3, 4, 5, 7)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    candidates = [step * 10.0**power for power in range(first, last) for step in steps]
    inside = [tick for tick in candidates if low / 2.6 <= tick <= high * 2.6]
    return inside or [low, high]


def choose_linear_ticks(low: float, high: float) -> list[float]:
    """Return four to eight ticks at multiples of 1, 2, or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]

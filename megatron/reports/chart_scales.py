"""Scales of charts: vertical axes that a reader can select, with their ranges and ticks."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.reports.metrics import Metric

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
    """Return ticks at 1, 2, 5, 10, 20, 50, … around the range, or powers of ten if it exceeds three decades."""
    steps = (1, 2, 5) if high / low < 1000 else (1,)
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

"""Metrics: unit, better direction, comparison, and formatting of each measured quantity.

A record contains one value of one metric, under the metric's name (`megatron.reports.records`). Tables, plots, and
pages get all metric-specific behavior from here, so a new metric only needs an entry in `METRICS`.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import stdev
from typing import Literal

from megatron.utils.formatting import format_choices

MAX_NLL = 700.0
"""Maximum loss in nats per token that still has a perplexity; exp overflows at 709."""

MIN_PERPLEXITY, MAX_PERPLEXITY = 1e-3, 1e305
"""Bounds of a record's perplexity, such that the ratio of any two is finite."""

DEVIATIONS_PER_HALF_WIDTH = 2
"""Number of standard deviations in half the width of a 95% interval."""

MAX_DECIMALS = 6
"""Maximum number of decimals. Only identical seeds or texts give a narrower interval."""


def _decapitalize(title: str) -> str:
    """Return a title as used inside a sentence: perplexity, but ΔP."""
    return title[0].lower() + title[1:] if title[1:2].islower() else title


@dataclass(frozen=True)
class Metric:
    """One kind of measured quantity.

    Two values of a metric are compared by their ratio or by their difference. If they are compared by ratio, the value
    is exp of a mean, and standard errors are those of its logarithm.
    """

    name: str
    """Key of the value in results.json and results.csv; `NAME_low` and `NAME_high` contain its interval."""
    title: str
    unit: str
    """Phrase that follows the title, such as per token or in %."""
    definition: str
    """Definition in one sentence, for readers of a report."""
    better: Literal["lower", "higher"]
    comparison: Literal["ratio", "difference"]
    negligible_change: float
    """Change below which a value holds, as a distance of the ratio from 1 or of the difference from 0."""
    min_value: float = -math.inf
    max_value: float = math.inf
    display_factor: float = 1.0
    """Factor applied for display: 100 for values in percent."""
    shows_best_seed: bool = False
    """True if the best of several seeds is shown next to their mean, because papers publish it."""
    length_summary: tuple[str, str] | None = None
    """Both header lines of its column if a value summarizes several lengths; its record names the largest length."""
    is_count: bool = False
    """True if values are integers."""
    plot_scale: Literal["linear", "logarithmic"] = "linear"
    """Scale of plots. A logarithmic scale applies only if values differ by more than a factor of 4."""

    @property
    def title_with_unit(self) -> str:
        """Title and unit at the start of a table's title: Perplexity per token."""
        return f"{self.title} {self.unit}".strip()

    @property
    def inline_title(self) -> str:
        """Title inside a sentence."""
        return _decapitalize(self.title)

    @property
    def axis_label(self) -> str:
        """Title and unit as an axis label: perplexity per token."""
        return _decapitalize(self.title_with_unit)

    @property
    def neutral_change(self) -> float:
        """Change between equal values: 1 for ratios, 0 for differences."""
        return 1.0 if self.comparison == "ratio" else 0.0

    def select_best(self, values: Iterable[float]) -> float:
        return min(values) if self.better == "lower" else max(values)

    def find_best(self, values: Collection[float]) -> float | None:
        """Return the best value, or None if all values are equal, because then none is better than another."""
        return self.select_best(values) if len(set(values)) > 1 else None

    def get_sort_key(self, value: float) -> float:
        """Return a key that sorts the best values first."""
        return value if self.better == "lower" else -value

    def describe_invalid(self, value: float) -> str | None:
        """Return the reason why a value is outside the metric's range, or None."""
        if value < self.min_value or value > self.max_value:
            lower_text = f"at least {self.min_value:g}"
            upper_text = f"at most {self.max_value:g}"
            bounds = [
                text
                for text, bound in ((lower_text, self.min_value), (upper_text, self.max_value))
                if math.isfinite(bound)
            ]
            return f"{self.name} must be {' and '.join(bounds)}"
        return None

    def compute_change(self, value: float, base: float) -> float:
        """Return the ratio of two values, or their difference."""
        return value / base if self.comparison == "ratio" else value - base

    def classify_change(self, change: float, low: float, high: float) -> str:
        """Return whether a value rises, falls, or holds: it holds if the change is small or uncertain.

        The verdict describes the number only; the metric's direction decides whether a rise is good.
        """
        if abs(change - self.neutral_change) < self.negligible_change:
            return "holds"
        return "rises" if low > self.neutral_change else "falls" if high < self.neutral_change else "holds"

    def compute_interval(self, value: float, stderr: float) -> tuple[float, float]:
        """Return the normal 95% interval for a standard error, on the scale of the mean."""
        if self.comparison == "ratio":
            return math.exp(math.log(value) - 1.96 * stderr), math.exp(math.log(value) + 1.96 * stderr)
        return value - 1.96 * stderr, value + 1.96 * stderr

    @property
    def mean_kind(self) -> str:
        """Kind of mean computed by `average_changes`."""
        return "geometric mean" if self.comparison == "ratio" else "mean"

    def average_changes(self, changes: Sequence[float]) -> float:
        """Average changes: geometric mean of ratios, or arithmetic mean of differences.

        Both equal the change between means of the same kind, so the order of averaging does not matter: the geometric
        mean of ratios is the ratio of geometric means, and the exponential of the mean difference of logarithms. If a
        and b are swapped, it is the inverse.
        """
        if self.comparison == "ratio":
            return math.exp(math.fsum(map(math.log, changes)) / len(changes))
        return math.fsum(changes) / len(changes)

    def compute_change_deviation(self, changes: Sequence[float]) -> float | None:
        """Return the sample standard deviation on the scale of `average_changes`, or None for a single change.

        For ratios it is geometric: a deviation is a factor to multiply or divide by.
        """
        if len(changes) < 2:
            return None
        return math.exp(stdev(map(math.log, changes))) if self.comparison == "ratio" else stdev(changes)

    def format_value(self, value: float, half_width: float | None = None) -> str:
        """Format a value for a table's cell, with as many digits as its uncertainty needs (see `format_number`)."""
        if self.is_count:
            return f"{value:,.0f}"
        return format_number(
            value * self.display_factor, None if half_width is None else half_width * self.display_factor
        )

    def format_value_with_deviation(self, value: float, deviation: float) -> str:
        """Format a value and its standard deviation with equal numbers of decimals: 5.60 ± 0.66."""
        return _append_deviation(
            self.format_value(value, DEVIATIONS_PER_HALF_WIDTH * deviation), deviation * self.display_factor
        )

    def format_tick(self, value: float, ticks: Sequence[float] = ()) -> str:
        """Format a value for a figure with three digits, or for an axis with as many decimals as its `ticks` need."""
        scaled = value * self.display_factor
        x_positions = sorted({float(tick) * self.display_factor for tick in ticks})
        if len(x_positions) < 2:
            return f"{scaled:,.3g}" if abs(scaled) < 1000 else f"{scaled:,.0f}"
        step = min(upper - lower for lower, upper in pairwise(x_positions))
        decimals = next((d for d in range(9) if all(abs(round(x, d) - x) < step / 100 for x in x_positions)), 9)
        return f"{scaled:,.{decimals}f}"

    def format_change(self, change: float, half_width: float | None = None) -> str:
        """Format a change: 1.004, or +12.30. An interval of half-width `half_width` may need more digits."""
        if self.comparison == "ratio":
            return _format_ratio(change, half_width)
        return _format_signed(
            change * self.display_factor, None if half_width is None else half_width * self.display_factor
        )

    def format_change_with_deviation(self, change: float, deviation: float) -> str:
        """Format a mean change with its `compute_change_deviation`: 1.296 ×/÷ 1.115, or +1.30 ± 0.14."""
        half_width = self.compute_change_half_width(change, deviation)
        if self.comparison == "ratio":
            return (
                f"{_format_ratio(change, half_width)} ×/÷ "
                f"{_format_ratio(deviation, DEVIATIONS_PER_HALF_WIDTH * (deviation - 1))}"
            )
        return _append_deviation(self.format_change(change, half_width), deviation * self.display_factor)

    def compute_change_half_width(self, change: float, deviation: float) -> float:
        """Return the half-width of an interval that covers most changes with this mean and deviation."""
        return DEVIATIONS_PER_HALF_WIDTH * (change * (deviation - 1) if self.comparison == "ratio" else deviation)

    def format_change_interval(self, low: float, high: float) -> str:
        """Format the interval of a change: [0.985, 1.023]."""
        half_width = (high - low) / 2
        return f"[{self.format_change(low, half_width)}, {self.format_change(high, half_width)}]"

    def format_relative_change(self, change: float, half_width: float | None = None, min_decimals: int = 0) -> str:
        """Format a change as a distance from no change, such as +467%, +0.3%, or -12.30."""
        if self.comparison == "ratio":
            return format_percent(change - 1, half_width, min_decimals)
        return _format_signed(
            change * self.display_factor, None if half_width is None else half_width * self.display_factor
        )

    @property
    def verdict_rule(self) -> str:
        """Rule of `classify_change` in words."""
        if self.comparison == "ratio":
            return (
                f"“holds”: the interval contains 1 or the change is under {self.negligible_change:.1%}; otherwise "
                "“rises” or “falls”"
            )
        return (
            "“holds”: the interval contains 0 or the change is under "
            f"{self.negligible_change * self.display_factor:g}; otherwise “rises” or “falls”"
        )

    @property
    def change_mean_description(self) -> str:
        """Format of the aggregated changes of several seeds, in words."""
        if self.comparison == "ratio":
            return "geometric mean ×/÷ geometric standard deviation"
        return "mean ± standard deviation"

    @property
    def change_operator(self) -> str:
        """Operator between the two values of a change, in words."""
        return "divided by" if self.comparison == "ratio" else "minus"


METRICS = {
    metric.name: metric
    for metric in (
        *(
            Metric(
                name=name,
                title="Perplexity",
                unit=f"per {of}",
                definition=f"Perplexity{by} is exp of the mean negative log-likelihood per {what}, in nats.",
                better="lower",
                comparison="ratio",
                negligible_change=0.005,
                min_value=MIN_PERPLEXITY,
                max_value=MAX_PERPLEXITY,
                plot_scale="logarithmic",
            )
            for name, of, by, what in (
                ("perplexity", "token", "", "token"),
                (
                    "long_perplexity",
                    "key token",
                    " of key tokens (LongPPL)",
                    "token that benefits from distant context",
                ),
                ("word_perplexity", "word", " per word", "word of a task's documents"),
                ("byte_perplexity", "byte", " per byte", "byte of a task's documents"),
                ("target_perplexity", "target", " per target", "target text of a task's document"),
            )
        ),
        Metric(
            name="delta_perplexity",
            title="ΔP",
            unit="per token",
            definition="ΔP is the perplexity of the scored tokens without context minus their perplexity with context.",
            better="higher",
            comparison="difference",
            negligible_change=0.005,
        ),
        Metric(
            name="log_ratio",
            title="Log-ratio of perplexity",
            unit="in nats",
            definition="The log-ratio is the logarithm of the perplexity of the scored tokens without context over "
            "their perplexity with context.",
            better="higher",
            comparison="difference",
            negligible_change=0.005,
        ),
        Metric(
            name="context_gain",
            title="Gain from context",
            unit="in nats per token",
            definition="The gain from context is the loss of the scored tokens with about the context of training, "
            "minus their loss with more context.",
            better="higher",
            comparison="difference",
            negligible_change=0.01,
        ),
        Metric(
            name="loss",
            title="Loss",
            unit="in nats per token",
            definition="Loss is the mean negative log-likelihood per token, in nats.",
            better="lower",
            comparison="difference",
            negligible_change=0.005,
            min_value=0.0,
        ),
        Metric(
            name="effective_length",
            title="Effective length",
            unit="in tokens",
            definition="The effective length is the largest length at which a model reaches at least a given score.",
            better="higher",
            comparison="difference",
            negligible_change=0.5,
            min_value=0.0,
            length_summary=("effective", "length"),
            is_count=True,
        ),
        *(
            Metric(
                name=name,
                title=title,
                unit="in %",
                definition=f"{title} is {share}.",
                better="higher",
                comparison="difference",
                negligible_change=0.005,
                min_value=0.0,
                max_value=1.0,
                display_factor=100.0,
                shows_best_seed=name == "mean_accuracy",
                length_summary=("mean", "beyond training") if name == "mean_accuracy" else None,
            )
            for name, title, share in (
                ("accuracy", "Accuracy", "the share of scored tokens that the model predicts correctly"),
                ("mean_accuracy", "Mean accuracy", "the mean of the accuracies at all scored lengths beyond training"),
                ("acc", "Task accuracy", "the share of a task's documents that are answered correctly"),
                (
                    "acc_norm",
                    "Task accuracy by length",
                    "task accuracy with log-likelihoods of choices divided by their length in bytes",
                ),
                ("exact_match", "Exact match", "the share of answers that match exactly"),
                ("string_match", "String match", "the share of expected strings that occur in the answer (RULER)"),
                ("f1", "F1", "the harmonic mean of precision and recall of the answers"),
            )
        ),
    )
}
"""All metrics by name. A name must not equal another field of `Record`."""


def get_metric(name: str) -> Metric:
    """Return a metric by name.

    Raises:
        ValueError: the name is unknown; the message lists the choices.
    """
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}; {format_choices(name, METRICS)}")
    return METRICS[name]


def compute_clamped_exp(nats: float) -> float:
    """Return exp of a loss in nats, limited to the largest reportable perplexity; interval ends may exceed it."""
    return math.exp(min(nats, MAX_NLL))


def count_decimals(half_width: float | None) -> int:
    """Return the number of decimals for a value, such that its last digit is worth at most half of its uncertainty.

    Args:
        half_width: half the width of its 95% interval, or None or 0 if unknown.
    """
    if not half_width or not math.isfinite(half_width):
        return 0
    return min(max(0, math.ceil(math.log10(2 / abs(half_width)))), MAX_DECIMALS)


def format_number(value: float, half_width: float | None = None) -> str:
    """Format a number with two decimals, or fewer if it is large, or more if it is small: 0.0034, 4.87, 152.3, 16,443.

    If the uncertainty is known, it determines the decimals (see `count_decimals`). Perplexities from ten million on
    mean that a model has diverged, and are formatted as 3.2e+17.
    """
    size = abs(value)
    if (0 < size < 0.005 and not half_width) or size >= 1e7:
        return f"{value:.2g}"
    min_decimals = 2 if size < 100 else 1 if size < 1000 else 0
    text = f"{value:,.{max(min_decimals, count_decimals(half_width))}f}"
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")


def format_percent(fraction: float, half_width: float | None = None, min_decimals: int = 0) -> str:
    """Format a fraction as signed percent: +467%, -2%, +0.3%, +16,443%.

    Args:
        fraction: 1 is 100%.
        half_width: uncertainty, if known (see `count_decimals`).
        min_decimals: minimum number of decimals.
    """
    num_decimals = max(
        min_decimals, count_decimals(2 * 100 * abs(fraction) if half_width is None else 100 * half_width)
    )
    if abs(100 * fraction) >= 1e9:  # diverged model
        return f"{100 * fraction:+.2g}%"
    text = f"{100 * fraction:+,.{num_decimals}f}"
    return f"{text if any(digit in text for digit in '123456789') else f'{0:.{min_decimals}f}'}%"


def _append_deviation(text: str, deviation: float) -> str:
    """Append the standard deviation to a formatted number, with as many decimals."""
    num_decimals = len(text.partition(".")[2])
    return f"{text} ± {format_number(deviation) if 'e' in text else f'{deviation:,.{num_decimals}f}'}"


def _format_ratio(value: float, half_width: float | None = None) -> str:
    """Format a ratio with three decimals below 10, for narrow paired intervals: 1.002, 6.43, 29.64."""
    return f"{value:.{max(3, count_decimals(half_width))}f}" if value < 10 else format_number(value, half_width)


def _format_signed(value: float, half_width: float | None = None) -> str:
    text = format_number(abs(value), half_width)
    return f"{'-' if value < 0 else '+'}{text}" if float(text.replace(",", "")) else text

"""What can be measured: each metric with its unit, its better direction, and how its values are compared and shown.

A record holds one value of one metric, under the metric's name (`megatron.reports.records`). Tables, plots and pages
ask the metric for everything that differs between metrics, so a new one is an entry of `METRICS` and nothing else.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Literal

from megatron.suggest import choose_from

LARGEST_NLL = 700.0
"""Nats per token that still have a perplexity: exp overflows at 709."""

DEVIATIONS = 2
"""Standard deviations in half of a 95% interval's width."""

MOST_DECIMALS = 6
"""An interval that is narrower says that seeds or texts were the same, and needs no more digits to say so."""


def _inside(title: str) -> str:
    """A title as it stands inside a sentence: perplexity, but ΔP."""
    return title[0].lower() + title[1:] if title[1:2].islower() else title


@dataclass(frozen=True)
class Metric:
    """One kind of number that evaluations produce.

    Two values of a metric are compared by their ratio or by their difference. Where they are compared by ratio, the
    value is exp of a mean, so standard errors are those of its logarithm.
    """

    name: str
    """Under which a value stands in results.json and results.csv; `NAME_low` and `NAME_high` hold its interval."""
    title: str
    unit: str
    """A phrase that follows the title: per token, in %."""
    definition: str
    """One sentence for people who read a report."""
    better: Literal["lower", "higher"]
    compared: Literal["ratio", "difference"]
    negligible: float
    """A ratio that is this close to 1, or a difference that is this close to 0, is no change, however sure it is."""
    lowest: float = -math.inf
    highest: float = math.inf
    open_ended: bool = False
    """Is `lowest` itself no possible value?"""
    factor: float = 1.0
    """What is shown is the value times this: 100 for shares that are shown in percent."""
    tells_best: bool = False
    """Is the best of several seeds told beside their mean, because that is what is published?"""
    over_lengths: bool = False
    """Is a value the mean over several lengths, of which its record names the largest?"""
    scale: Literal["linear", "logarithmic"] = "linear"
    """Of a plot's axis. A logarithmic one is used only where values differ by more than a factor of 4."""

    @property
    def heading(self) -> str:
        """Title and unit, as a table's title begins: Perplexity per token."""
        return f"{self.title} {self.unit}".strip()

    @property
    def word(self) -> str:
        """The title inside a sentence."""
        return _inside(self.title)

    @property
    def axis(self) -> str:
        """Title and unit, as a plot's axis is labelled: perplexity per token."""
        return _inside(self.heading)

    @property
    def neutral(self) -> float:
        """The change between equal values."""
        return 1.0 if self.compared == "ratio" else 0.0

    def best(self, values: Iterable[float]) -> float:
        """The best of some values."""
        return min(values) if self.better == "lower" else max(values)

    def rank(self, value: float) -> float:
        """A key to sort by, the best first."""
        return value if self.better == "lower" else -value

    def refusal(self, value: float) -> str | None:
        """Why this is no possible value, else None."""
        if value < self.lowest or value > self.highest or (self.open_ended and value == self.lowest):
            least = f"{'greater than' if self.open_ended else 'at least'} {self.lowest:g}"
            most = f"at most {self.highest:g}"
            bounds = [text for text, bound in ((least, self.lowest), (most, self.highest)) if math.isfinite(bound)]
            return f"{self.name} must be {' and '.join(bounds)}"
        return None

    def change(self, value: float, base: float) -> float:
        """How a value differs from another: their ratio, or their difference."""
        return value / base if self.compared == "ratio" else value - base

    def verdict(self, change: float, low: float, high: float) -> str:
        """What a change and its interval say of the value: rises, falls, or holds, if that may be chance or is small.

        Whether a rise is good is the metric's direction; the word says only what the number does.
        """
        if abs(change - self.neutral) < self.negligible:
            return "holds"
        return "rises" if low > self.neutral else "falls" if high < self.neutral else "holds"

    def interval(self, value: float, stderr: float) -> tuple[float, float]:
        """The 95% interval of a normal distribution with that standard error, on the scale that the mean was taken."""
        if self.compared == "ratio":
            return math.exp(math.log(value) - 1.96 * stderr), math.exp(math.log(value) + 1.96 * stderr)
        return value - 1.96 * stderr, value + 1.96 * stderr

    @property
    def mean_name(self) -> str:
        """Which mean `mean_change` takes."""
        return "geometric mean" if self.compared == "ratio" else "mean"

    def mean_change(self, changes: Sequence[float]) -> float:
        """Several changes in one number: the geometric mean of ratios, the arithmetic mean of differences.

        Either is the change of the means of the same kind, so it does not matter whether one averages first: the
        geometric mean of ratios is the ratio of geometric means, and the exponential of the mean difference of
        logarithms. Turned round (b over a for a over b) it is the inverse.
        """
        if self.compared == "ratio":
            return math.exp(math.fsum(map(math.log, changes)) / len(changes))
        return math.fsum(changes) / len(changes)

    def change_deviation(self, changes: Sequence[float]) -> float | None:
        """The sample standard deviation that belongs to `mean_change`, of the same scale; None of a single change.

        Of ratios it is geometric, a factor: a step of one deviation multiplies or divides by it.
        """
        if len(changes) < 2:
            return None
        return math.exp(stdev(map(math.log, changes))) if self.compared == "ratio" else stdev(changes)

    def shown(self, value: float, spread: float | None = None) -> str:
        """A value in a table's cell, with digits enough for what is said of its uncertainty (see `number`)."""
        return number(value * self.factor, None if spread is None else spread * self.factor)

    def shown_with(self, value: float, deviation: float) -> str:
        """A value and its standard deviation, with equally many decimals: 5.60 ± 0.66."""
        return _with_deviation(self.shown(value, DEVIATIONS * deviation), deviation * self.factor)

    def tick(self, value: float) -> str:
        """A value at a plot's axis."""
        scaled = value * self.factor
        return f"{scaled:,.3g}" if abs(scaled) < 1000 else f"{scaled:,.0f}"

    def shown_change(self, change: float, spread: float | None = None) -> str:
        """A change: 1.004, or +12.30. More digits where an interval of half-width `spread` needs them."""
        if self.compared == "ratio":
            return _ratio(change, spread)
        return _signed(change * self.factor, None if spread is None else spread * self.factor)

    def shown_change_with(self, change: float, deviation: float) -> str:
        """A mean change and its `change_deviation`: 1.296 ×/÷ 1.115, or +1.30 ± 0.14."""
        spread = self.change_spread(change, deviation)
        if self.compared == "ratio":
            return f"{_ratio(change, spread)} ×/÷ {_ratio(deviation, DEVIATIONS * (deviation - 1))}"
        return _with_deviation(self.shown_change(change, spread), deviation * self.factor)

    def change_spread(self, change: float, deviation: float) -> float:
        """Half of the width of an interval that changes with this mean and `change_deviation` lie in mostly."""
        return DEVIATIONS * (change * (deviation - 1) if self.compared == "ratio" else deviation)

    def shown_interval(self, low: float, high: float) -> str:
        """The interval of a change: [0.985, 1.023]."""
        spread = (high - low) / 2
        return f"[{self.shown_change(low, spread)}, {self.shown_change(high, spread)}]"

    def shown_distance(self, change: float, spread: float | None = None) -> str:
        """A change as a distance from none: +467%, +0.3%, or -12.30."""
        if self.compared == "ratio":
            return percent(change - 1, spread)
        return _signed(change * self.factor, None if spread is None else spread * self.factor)

    @property
    def rule(self) -> str:
        """How `verdict` judges, in words."""
        if self.compared == "ratio":
            return f"holds if 1 is inside or it is below {self.negligible:.1%}, else rises or falls"
        return f"holds if 0 is inside or it is below {self.negligible * self.factor:g}, else rises or falls"

    @property
    def averaged(self) -> str:
        """How changes of several seeds are shown, in words."""
        if self.compared == "ratio":
            return "geometric mean ×/÷ geometric standard deviation"
        return "mean ± standard deviation"

    @property
    def relation(self) -> str:
        """What stands between the two values of a change, in words."""
        return "over" if self.compared == "ratio" else "minus"


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
                compared="ratio",
                negligible=0.005,
                lowest=0.0,
                open_ended=True,
                scale="logarithmic",
            )
            for name, of, by, what in (
                ("perplexity", "token", "", "token"),
                ("word_perplexity", "word", " per word", "word of a task's documents"),
                ("byte_perplexity", "byte", " per byte", "byte of a task's documents"),
                ("target_perplexity", "target", " per target", "text that a task's document asks for"),
            )
        ),
        Metric(
            name="delta_perplexity",
            title="ΔP",
            unit="per token",
            definition="ΔP is the perplexity of the scored tokens alone minus theirs with the context before them.",
            better="higher",
            compared="difference",
            negligible=0.005,
        ),
        Metric(
            name="log_ratio",
            title="Log-ratio of perplexity",
            unit="in nats",
            definition="The log-ratio is the logarithm of the perplexity of the scored tokens alone over theirs with "
            "the context before them.",
            better="higher",
            compared="difference",
            negligible=0.005,
        ),
        Metric(
            name="loss",
            title="Loss",
            unit="in nats per token",
            definition="Loss is the mean negative log-likelihood per token, in nats.",
            better="lower",
            compared="difference",
            negligible=0.005,
            lowest=0.0,
        ),
        *(
            Metric(
                name=name,
                title=title,
                unit="in %",
                definition=f"{title} is {share}.",
                better="higher",
                compared="difference",
                negligible=0.005,
                lowest=0.0,
                highest=1.0,
                factor=100.0,
                tells_best=name == "mean_accuracy",
                over_lengths=name == "mean_accuracy",
            )
            for name, title, share in (
                ("accuracy", "Accuracy", "the share of scored tokens that the model predicts rightly"),
                ("mean_accuracy", "Mean accuracy", "the mean of the accuracies at all scored lengths beyond training"),
                ("acc", "Task accuracy", "the share of a task's documents that are answered rightly"),
                (
                    "acc_norm",
                    "Task accuracy by length",
                    "as task accuracy, where the likelihood of each choice is divided by its length in bytes",
                ),
                ("exact_match", "Exact match", "the share of answers that are written exactly as they should be"),
                ("f1", "F1", "the harmonic mean of precision and recall of the answers"),
            )
        ),
    )
}
"""All metrics by their names. No name may be that of another field of `Record`."""


def find(name: str) -> Metric:
    """The metric of that name. Raises ValueError, with the choices, if there is none."""
    if name not in METRICS:
        raise ValueError(f"{name!r} is no metric; {choose_from(name, METRICS)}")
    return METRICS[name]


def bounded_exp(nats: float) -> float:
    """e to that power, or to the largest that has a perplexity: the end of an interval may lie beyond."""
    return math.exp(min(nats, LARGEST_NLL))


def decimals(spread: float | None) -> int:
    """Digits after the point that a value needs beside its uncertainty: the last digit counts at most half of it.

    Args:
        spread: half of the width of its 95% interval; None or 0 where nothing is known.
    """
    if not spread or not math.isfinite(spread):
        return 0
    return min(max(0, math.ceil(math.log10(2 / abs(spread)))), MOST_DECIMALS)


def number(value: float, spread: float | None = None) -> str:
    """Two decimals, fewer where the number is large, more where two would say nothing: 0.0034, 4.87, 152.3, 16,443.

    With a spread (see `decimals`) there are as many as it needs. From ten million on a perplexity says that a model
    has diverged: 3.2e+17.
    """
    size = abs(value)
    if (0 < size < 0.005 and not spread) or size >= 1e7:
        return f"{value:.2g}"
    least = 2 if size < 100 else 1 if size < 1000 else 0
    text = f"{value:,.{max(least, decimals(spread))}f}"
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")


def percent(share: float, spread: float | None = None, least: int = 0) -> str:
    """A share as signed percent: +467%, -2%, +0.3%, +16,443%.

    Args:
        share: 1 is 100%.
        spread: its uncertainty, if it is known: `decimals`.
        least: digits after the point at least.
    """
    places = max(least, decimals(2 * 100 * abs(share) if spread is None else 100 * spread))
    text = f"{100 * share:+,.{places}f}"
    return f"{text if any(digit in text for digit in '123456789') else '0'}%"


def _with_deviation(text: str, deviation: float) -> str:
    """A number that is shown as `text`, and its standard deviation with as many decimals."""
    places = len(text.partition(".")[2])
    return f"{text} ± {number(deviation) if 'e' in text else f'{deviation:,.{places}f}'}"


def _ratio(value: float, spread: float | None = None) -> str:
    """Three decimals below 10, where a paired interval can be as narrow as a percent: 1.002, 6.43, 29.64."""
    return f"{value:.{max(3, decimals(spread))}f}" if value < 10 else number(value, spread)


def _signed(value: float, spread: float | None = None) -> str:
    text = number(abs(value), spread)
    return f"{'-' if value < 0 else '+'}{text}" if float(text.replace(",", "")) else text

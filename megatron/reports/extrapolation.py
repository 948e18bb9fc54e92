"""Does a method extrapolate? The criterion of Exploring Transformer Extrapolation (2307.10156, definition 2.1).

With windows of n tokens and the training length m, a model extrapolates if |ppl_n − ppl_m| / ppl_m < δ for every n.
The paper gives no δ, and "every n" cannot be tried: what is told is

    r_n = ppl_n / ppl_m − 1          signed, so that a gain is not taken for a loss
    its largest size over n > m      with the δ and the largest n
"""

from dataclasses import dataclass

from megatron.reports.grids import Grid
from megatron.reports.layout import Layout

DELTA = 0.1


@dataclass(frozen=True)
class Extrapolation:
    """One method of a table."""

    method: str
    ratios: dict[int, float]
    """n → r_n of the mean over seeds, for n above the training length."""
    worst: int
    """The n at which r_n is largest in size."""
    interval: tuple[float, float] | None
    """95% of that r_n, by bootstrap; for one seed."""

    def holds(self, delta: float) -> bool:
        """Is every r_n below δ in size?"""
        return abs(self.ratios[self.worst]) < delta


def extrapolation(layout: Layout) -> list[Extrapolation]:
    """The methods of a table of perplexities over lengths that were scored at the training length and beyond it.

    Methods whose positions end within the table have the lengths that they know.
    """
    if layout.metric.name != "perplexity" or layout.axis.name != "length":
        return []
    trained = layout.train_length
    found = []
    for method in layout.methods:
        base = layout.cells.get((method, trained))
        if base is None:
            continue
        ratios = {
            round(place): layout.cells[method, place].mean / base.mean - 1
            for place in layout.places
            if place > trained and (method, place) in layout.cells
        }
        if not ratios:
            continue
        worst = max(ratios, key=lambda n: abs(ratios[n]))
        found.append(Extrapolation(method, ratios, worst, _interval(layout, method, worst)))
    return found


def _interval(layout: Layout, method: str, length: int) -> tuple[float, float] | None:
    """That of the change from the training length, minus 1, if there is one run and one is known."""
    records = [each for each in layout.records if (each.method, each.length) == (method, length)]
    if len(records) > 1 or records[0].change_from != layout.train_length:
        return None
    low, high = records[0].change_low, records[0].change_high
    return None if low is None or high is None else (low - 1, high - 1)


def grid(layout: Layout, delta: float = DELTA) -> Grid | None:
    """The criterion as a table, the largest r first; None if nothing was scored at and beyond the training length."""
    found = sorted(extrapolation(layout), key=lambda each: -abs(each.ratios[each.worst]))
    if not found:
        return None
    rows = []
    for each in found:
        value = f"{each.ratios[each.worst]:+.1%}"
        if each.interval is not None:
            value += f" [{each.interval[0]:+.1%}, {each.interval[1]:+.1%}]"
        verdict = f"{'yes' if each.holds(delta) else 'no'}, up to {max(each.ratios):,}"
        rows.append((each.method, (value, f"{each.worst:,}", verdict)))
    known = {each.method for each in found}
    for method, limit in layout.limits.items():
        if method not in known and limit <= layout.train_length:
            rows.append((method, ("–", "–", f"its positions end at {limit:,}")))
    return Grid(
        title=f"Extrapolation beyond {layout.train_length:,} tokens, {layout.how}",
        corner="method",
        heads=("r of the largest size", "at", f"extrapolates (|r| < {delta:g})"),
        rows=tuple(rows),
        notes=(
            f"r is perplexity over that at {layout.train_length:,} tokens, minus 1 (2307.10156, definition 2.1; the "
            "paper gives no bound).",
        ),
    )

"""Does a method extrapolate? The criterion of Exploring Transformer Extrapolation (2307.10156, definition 2.1).

With windows of n tokens and the training length m, a model extrapolates if |ppl_n − ppl_m| / ppl_m < δ for every n.
The paper gives no δ, and "every n" cannot be tried: what is told is

    r_n = ppl_n / ppl_m − 1          signed, so that a gain is not taken for a loss
    its largest size over n > m      with the δ and the largest n

The ratio is the change from m to n as `layout.py` defines it: of several seeds the geometric mean of each seed's own,
over the seeds that were scored at both lengths.
"""

from dataclasses import dataclass

from megatron.reports.grids import Grid
from megatron.reports.layout import Change, Layout, count_note
from megatron.reports.metrics import percent

DELTA = 0.1


@dataclass(frozen=True)
class Extrapolation:
    """One method of a table."""

    method: str
    changes: dict[int, Change]
    """n → how the perplexity differs from that at the training length, for n above it."""
    worst: int
    """The n at which r_n is largest in size."""

    @property
    def ratios(self) -> dict[int, float]:
        """n → r_n."""
        return {n: change.mean - 1 for n, change in self.changes.items()}

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% of the largest r_n, by bootstrap; for one seed."""
        ends = self.changes[self.worst].interval
        return None if ends is None else (ends[0] - 1, ends[1] - 1)

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
        changes = {
            round(place): change
            for place in layout.places
            if place > trained and (change := layout.change(method, trained, place)) is not None
        }
        if changes:
            worst = max(changes, key=lambda n: abs(changes[n].mean - 1))
            found.append(Extrapolation(method, changes, worst))
    return found


def grid(layout: Layout, delta: float = DELTA) -> Grid | None:
    """The criterion as a table, the largest r first; None if nothing was scored at and beyond the training length."""
    found = sorted(extrapolation(layout), key=lambda each: -abs(each.ratios[each.worst]))
    if not found:
        return None
    rows = []
    for each in found:
        change = each.changes[each.worst]
        value = percent(change.mean - 1, change.spread, least=1)
        if each.interval is not None:
            value += f" [{', '.join(percent(end, change.spread, least=1) for end in each.interval)}]"
        value += count_note(change.few)
        verdict = f"{'yes' if each.holds(delta) else 'no'}, up to {max(each.ratios):,}"
        rows.append((each.method, (value, f"{each.worst:,}", verdict)))
    known = {each.method for each in found}
    for method, limit in layout.limits.items():
        if method not in known and limit <= layout.train_length:
            rows.append((method, ("–", "–", f"its positions end at {limit:,}")))
            known.add(method)
    rows += [(method, ("–", "–", "failed")) for method in dict.fromkeys(each.method for each in layout.failures)
             if method not in known]  # fmt: skip
    notes = [
        f"r is perplexity over that at {layout.train_length:,} tokens, minus 1 (2307.10156, definition 2.1; the paper "
        "gives no bound)."
    ]
    if layout.repeats > 1:
        notes.append(
            f"Over seeds it is the {layout.metric.mean_name} of each seed's own ratio, minus 1; over {layout.repeats}, "
            "where there is no n."
        )
    return Grid(
        title=f"Extrapolation beyond {layout.train_length:,} tokens, {layout.how}",
        corner="method",
        heads=("r of the largest size", "at", f"extrapolates (|r| < {delta:g})"),
        rows=tuple(rows),
        notes=tuple(notes),
    )

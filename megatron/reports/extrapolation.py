"""Does a method extrapolate? The criterion of Exploring Transformer Extrapolation (2307.10156, definition 2.1).

With windows of n tokens and the training length m, a model extrapolates if |ppl_n − ppl_m| / ppl_m < δ for every n.
The paper gives no δ, and "every n" cannot be tried: what is told is

    r_n = ppl_n / ppl_m − 1          signed, so that a gain is not taken for a loss
    its largest size over n > m      with the δ and the largest n

The ratio is the change from m to n as `layout.py` defines it: of several seeds the geometric mean of each seed's own,
over the seeds that were scored at both lengths.
"""

from dataclasses import dataclass

from megatron.reports.comparison_table import Change, ComparisonTable, format_partial_seeds
from megatron.reports.metrics import format_percent
from megatron.reports.text_table import TextTable

DEFAULT_DELTA = 0.1


@dataclass(frozen=True)
class Extrapolation:
    """One method of a table."""

    method: str
    changes: dict[int, Change]
    """n → how the perplexity differs from that at the training length, for n above it."""
    worst_length: int
    """The n at which r_n is largest in size."""

    @property
    def relative_changes(self) -> dict[int, float]:
        """n → r_n."""
        return {length: change.mean - 1 for length, change in self.changes.items()}

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% of the largest r_n, by bootstrap; for one seed."""
        bounds = self.changes[self.worst_length].interval
        return None if bounds is None else (bounds[0] - 1, bounds[1] - 1)

    def extrapolates(self, delta: float) -> bool:
        """Is every r_n below δ in size?"""
        return abs(self.relative_changes[self.worst_length]) < delta


def measure_extrapolation(table: ComparisonTable) -> list[Extrapolation]:
    """The methods of a table of perplexities over lengths that were scored at the training length and beyond it.

    Methods whose positions end within the table have the lengths that they know.
    """
    if table.metric.name != "perplexity" or table.axis.name != "length":
        return []
    train_length = table.train_length
    results = []
    for method in table.methods:
        changes = {
            round(x): change
            for x in table.x_values
            if x > train_length and (change := table.compute_change(method, train_length, x)) is not None
        }
        if changes:
            worst_length = max(changes, key=lambda length: abs(changes[length].mean - 1))
            results.append(Extrapolation(method, changes, worst_length))
    return results


def build_extrapolation_table(table: ComparisonTable, delta: float = DEFAULT_DELTA) -> TextTable | None:
    """The criterion as a table, the largest r first; None if nothing was scored at and beyond the training length."""
    results = sorted(
        measure_extrapolation(table), key=lambda result: -abs(result.relative_changes[result.worst_length])
    )
    if not results:
        return None
    rows = []
    for result in results:
        change = result.changes[result.worst_length]
        value = format_percent(change.mean - 1, change.half_width, min_decimals=1)
        if result.interval is not None:
            value += (
                f" [{', '.join(format_percent(bound, change.half_width, min_decimals=1) for bound in result.interval)}]"
            )
        value += format_partial_seeds(change.partial_num_seeds)
        verdict = f"{'yes' if result.extrapolates(delta) else 'no'}, up to {max(result.relative_changes):,}"
        rows.append((result.method, (value, f"{result.worst_length:,}", verdict)))
    listed_methods = {result.method for result in results}
    for method, max_length in table.max_lengths.items():
        if method not in listed_methods and max_length <= table.train_length:
            rows.append((method, ("–", "–", f"its positions end at {max_length:,}")))
            listed_methods.add(method)
    rows += [(method, ("–", "–", "failed")) for method in dict.fromkeys(result.method for result in table.failures)
             if method not in listed_methods]  # fmt: skip
    notes = [
        f"r is perplexity over that at {table.train_length:,} tokens, minus 1 (2307.10156, definition 2.1; the paper "
        "gives no bound)."
    ]
    if table.max_seeds > 1:
        notes.append(
            f"Over seeds it is the {table.metric.mean_kind} of each seed's own ratio, minus 1; over {table.max_seeds}, "
            "where there is no n."
        )
    return TextTable(
        title=f"Extrapolation beyond {table.train_length:,} tokens, {table.protocol_description}",
        corner_header="method",
        column_headers=("r of the largest size", "at", f"extrapolates (|r| < {delta:g})"),
        rows=tuple(rows),
        notes=tuple(notes),
    )

"""Gain from context beyond the training length: whether a model uses it, ignores it, or is hurt by it.

A flat curve of perplexity over length is not yet a use of the context. It shows only that a longer context does no
harm. The gain compares the losses of the same targets with a shorter and a longer context, in nats per token:

    gain(L) = nll(L0) − nll(L)       L0: the shortest scored length at which every target has at least half the training
                                     length of context; L: a longer one

Protocols `last` and `strided` score the same targets at every length. With as many targets as the training length, the
first target has no context at 1×, and a longer window first restores the context that training had. L0 is then 2×. With
a quarter as many targets, L0 is 1×.

**Interval.** For one run it is a bootstrap over blocks of the text, paired: a block counts with both of its losses, so
that its difficulty cancels. For several seeds it is the t interval of their gains. Both are 95% for each method alone.

**Verdict.** A gain below `NEGLIGIBLE_GAIN` is of no use. A method uses the context if its gain is larger and its
interval is above 0, is hurt by it if the same holds below 0, and ignores it if the whole interval is negligible. Else
the verdict is undecided: the text is too short, or there are too few seeds.

**Bound.** A text may offer nothing beyond the training length. If other models in the report were trained at L or more,
and scored on the same targets, the best of them at L shows what such a model gains from the same context.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.reports.comparison_table import (
    ComparisonTable,
    build_comparison_tables,
    format_partial_seeds,
    pair_by_seed,
)
from megatron.reports.metrics import METRICS
from megatron.reports.records import Record
from megatron.reports.significance import bootstrap_loss_interval
from megatron.reports.table_formats import TextTable
from megatron.reports.uncertainty import CONFIDENCE_LEVEL

NEGLIGIBLE_GAIN = METRICS["context_gain"].negligible_change
"""Gain in nats per token below which context counts as unused: 1% of the perplexity."""

USED, IGNORED, HURT, UNDECIDED = "uses the context", "ignores the context", "is hurt by the context", "undecided"


@dataclass(frozen=True)
class ContextGain:
    """Gain of one method from the context between two lengths, over all its seeds."""

    method: str
    train_length: int
    base_length: int
    length: int
    base_loss: float
    """Mean loss at the base length, in nats per token."""
    loss: float
    gains: tuple[float, ...]
    """Gain of each seed, in nats per token."""
    interval: tuple[float, float] | None
    """95% interval, or None for a single run without the sums of its blocks."""

    @property
    def gain(self) -> float:
        """Mean gain over seeds, in nats per token."""
        return statistics.fmean(self.gains)

    @property
    def verdict(self) -> str:
        """Verdict on the method: one of `USED`, `IGNORED`, `HURT`, and `UNDECIDED`."""
        if self.interval is None:
            return UNDECIDED
        low, high = self.interval
        if abs(self.gain) >= NEGLIGIBLE_GAIN and (low > 0 or high < 0):
            return USED if self.gain > 0 else HURT
        return IGNORED if low > -NEGLIGIBLE_GAIN and high < NEGLIGIBLE_GAIN else UNDECIDED

    def __str__(self) -> str:
        interval = "" if self.interval is None else " [{:+.3f}, {:+.3f}]".format(*self.interval)
        return f"{self.gain:+.3f}{interval}"


def find_base_length(table: ComparisonTable) -> int | None:
    """Return the length from which gains are measured, or None if the table cannot show the use of context.

    The table must contain perplexities over lengths, of targets at the end of each window, with a longer length.
    """
    targets = table.records[0].targets_per_window
    if (table.metric.name, table.axis.name) != ("perplexity", "length") or targets is None:
        return None
    if table.protocol not in ("last", "strided"):
        return None
    lengths = [length for x in table.x_values if (length := round(x)) >= table.train_length]
    lengths = [length for length in lengths if length - targets + 1 > table.train_length // 2]
    return lengths[0] if len(lengths) > 1 else None


def measure_gain(table: ComparisonTable, method: str, base_length: int, length: int) -> ContextGain | None:
    """Measure the gain of a method from `base_length` to `length`, or return None if no seed has both."""
    longer, shorter = (
        [record for record in table.records if (record.method, record.x_value) == (method, x)]
        for x in (length, base_length)
    )
    pairs = pair_by_seed(longer, shorter)
    if not pairs:
        return None
    gains = tuple(_get_loss(short) - _get_loss(long) for long, short in pairs)
    return ContextGain(
        method,
        table.train_length,
        base_length,
        length,
        statistics.fmean(_get_loss(short) for _, short in pairs),
        statistics.fmean(_get_loss(long) for long, _ in pairs),
        gains,
        bootstrap_loss_interval(pairs[0][1], pairs[0][0]) if len(pairs) == 1 else _compute_seed_interval(gains),
    )


def measure_gains(table: ComparisonTable) -> list[ContextGain]:
    """Measure the gains of all methods up to the largest length. Empty if the table cannot show them."""
    base_length = find_base_length(table)
    if base_length is None:
        return []
    length = round(table.x_values[-1])
    gains = (measure_gain(table, method, base_length, length) for method in table.methods)
    return [gain for gain in gains if gain is not None and gain.method not in table.trivial_baselines]


def _get_loss(record: Record) -> float:
    return math.log(record.value) if record.nll is None else record.nll


def _compute_seed_interval(gains: Sequence[float]) -> tuple[float, float]:
    """Compute the t interval of the mean of the seeds' gains."""
    from scipy import stats  # imports slowly (about one second)

    mean, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    half_width = float(stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, len(gains) - 1)) * error
    return mean - half_width, mean + half_width


def find_bound(
    table: ComparisonTable, tables: Sequence[ComparisonTable], base_length: int, length: int
) -> tuple[ComparisonTable, ContextGain] | None:
    """Find the best model that was trained at `length` or more and scored on the same targets, and measure its gain.

    Args:
        table: table of the methods to compare with the bound.
        tables: all tables of the report.
        base_length: length from which gains are measured.
        length: largest length.

    Returns:
        Table and gain of the method with the lowest loss at `length`, among those trained at the shortest sufficient
        length, or None if there is no such model.
    """
    digest = table.records[0].target_digest
    candidates = [
        other
        for other in tables
        if digest is not None
        and other.train_length >= length
        and (other.metric, other.axis, other.protocol) == (table.metric, table.axis, table.protocol)
        and other.records[0].target_digest == digest
    ]
    for other in sorted(candidates, key=lambda candidate: candidate.train_length):
        gains = [gain for method in other.methods if (gain := measure_gain(other, method, base_length, length))]
        if gains:
            return other, min(gains, key=lambda gain: gain.loss)
    return None


def build_context_tables(tables: Sequence[ComparisonTable]) -> list[TextTable]:
    """Build a table of verdicts for each table of methods that were scored beyond their training length."""
    found = ((table, find_base_length(table)) for table in tables)
    return [
        text_table
        for table, base_length in found
        if base_length is not None and (text_table := _build_context_table(table, tables, base_length)) is not None
    ]


def _build_context_table(
    table: ComparisonTable, tables: Sequence[ComparisonTable], base_length: int
) -> TextTable | None:
    length = round(table.x_values[-1])
    measured = measure_gains(table)
    if not measured:
        return None
    found = find_bound(table, tables, base_length, length)
    bound = None if found is None else found[1]
    reachable = bound if bound is not None and bound.verdict == USED else None
    rows = []
    for gain in measured:
        cells = [f"{gain.base_loss:.3f}", f"{gain.loss:.3f}", str(gain)]
        if reachable is not None:
            cells.append("–" if gain.verdict == HURT else f"{gain.gain / reachable.gain:.0%}")
        partial = format_partial_seeds(table.get_partial_num_seeds(len(gain.gains)))
        rows.append((gain.method, (*cells, f"{gain.verdict}{partial}")))
    targets = table.records[0].targets_per_window or 0
    notes = [
        f"Gain: loss with {base_length:,} tokens minus loss with {length:,} tokens, in nats per token, of the same "
        f"targets. A target has {base_length - targets + 1:,} to {base_length:,} tokens of context, its own included, "
        f"in the first case, and {length - targets + 1:,} to {length:,} in the second.",
        f"“{USED}”: the gain is at least {NEGLIGIBLE_GAIN:g} and its interval is above 0; “{HURT}”: it "
        f"is at most −{NEGLIGIBLE_GAIN:g} and its interval is below 0; "
        f"“{IGNORED}”: the interval is within ±{NEGLIGIBLE_GAIN:g}.",
        _describe_intervals(table),
        _describe_bound(bound, length),
    ]
    share_header = () if reachable is None else (f"share of {reachable.method}'s gain",)
    return TextTable(
        title=f"Use of context from {base_length:,} to {length:,} tokens, trained at {table.train_length:,} tokens, "
        f"{table.protocol_description}" + ("" if table.text is None else f", text {table.text}"),
        corner_header="method",
        column_headers=(f"loss at {base_length:,}", f"loss at {length:,}", "gain", *share_header, "verdict"),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _describe_intervals(table: ComparisonTable) -> str:
    if table.max_seeds > 1:
        return (
            f"Intervals: 95%, t distribution over {table.max_seeds} seeds unless n is shown; of one seed, paired "
            "bootstrap over blocks of the text."
        )
    return (
        "Intervals: 95%, paired bootstrap over blocks of the text, for one seed; other training runs may differ more."
    )


def _describe_bound(bound: ContextGain | None, length: int) -> str:
    if bound is None:
        return (
            f"Whether the text offers more is unknown: no model in this report was trained at {length:,} tokens and "
            "scored on these targets."
        )
    conclusion = {
        USED: "The text offers at least this gain.",
        UNDECIDED: "Whether the text offers more is undecided.",
    }.get(bound.verdict, f"It {bound.verdict}, so these models cannot show what the text offers.")
    return (
        f"Bound: {bound.method}, trained at {bound.train_length:,} tokens, gains {bound} and reaches a loss of "
        f"{bound.loss:.3f}. {conclusion}"
    )


def build_gain_tables(tables: Sequence[ComparisonTable]) -> list[ComparisonTable]:
    """Build tables of gains over lengths, for charts. The bound is a method of its own."""
    gain_tables = []
    for table in tables:
        base_length = find_base_length(table)
        if base_length is None:
            continue
        records = [record for method in table.methods for record in _derive_gain_records(table, method, base_length)]
        found = find_bound(table, tables, base_length, round(table.x_values[-1]))
        if found is not None:
            source, bound = found
            name = f"{bound.method} (trained at {bound.train_length:,})"
            records += [
                record.replace(method=name, train_length=table.train_length)
                for record in _derive_gain_records(source, bound.method, base_length)
                if record.length in table.x_values
            ]
        gain_tables += build_comparison_tables(records) if records else []
    return gain_tables


def _derive_gain_records(table: ComparisonTable, method: str, base_length: int) -> Iterator[Record]:
    """Derive records of the gain from records of the perplexity, with paired intervals. They start with 0."""
    by_cell = {(record.seed, record.length): record for record in table.records if record.method == method}
    cleared = dict.fromkeys(("nll", "stderr", "low", "high", "change", "change_low", "change_high", "change_from"))
    cleared |= dict.fromkeys(("bits_per_byte", "block_sums", "block_tokens"))
    for (seed, length), record in by_cell.items():
        base = by_cell.get((seed, base_length))
        if length < base_length or base is None or record.is_trivial_baseline:
            continue
        interval = None if length == base_length else bootstrap_loss_interval(base, record)
        known = {} if interval is None else dict(zip(("low", "high"), interval, strict=True))
        gain = _get_loss(base) - _get_loss(record)
        yield record.replace(**{**cleared, **known, "metric": "context_gain", "value": gain})

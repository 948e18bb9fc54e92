"""How one method differs from another: in perplexity on the same text, and in what it costs.

Perplexities are compared on the same blocks of text, by the seeds that both methods have:

    d_b      the mean over seeds of the difference of their nll per token in block b
    change   exp of the mean of d_b: the geometric mean over seeds of the ratio of their perplexities
    p        of a paired two-sided t-test of d_b against 0 over blocks; Holm's correction over all that are tested
    beyond chance   the corrected p is below 5%, and every seed says the same

The test says what another text would change. What another training would is told by the seeds alone: a difference of
one seed is marked as such.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.reports.bootstrap import compute_percentile_interval, draw_bootstrap_means
from megatron.reports.comparison_table import ComparisonTable, pair_by_seed
from megatron.reports.metrics import format_percent
from megatron.reports.records import Record
from megatron.reports.significance import SIGNIFICANCE_LEVEL, apply_holm_correction, format_p_value


@dataclass(frozen=True)
class TextComparison:
    """Of two methods at one length of one text."""

    method: str
    base: str
    length: int
    change: float
    interval: tuple[float, float]
    """95%, by a paired bootstrap over blocks."""
    seed_changes: tuple[float, ...]
    p: float
    holm_p: float = math.nan

    @property
    def verdict(self) -> str:
        """better, worse, or no difference: beyond chance, and alike for every seed."""
        if self.holm_p < SIGNIFICANCE_LEVEL:
            if all(change < 1 for change in self.seed_changes):
                return "better"
            if all(change > 1 for change in self.seed_changes):
                return "worse"
        return "no difference"

    def __str__(self) -> str:
        percent = [format_percent(bound - 1, min_decimals=1) for bound in self.interval]
        agreeing = sum((change < 1) == (self.change < 1) for change in self.seed_changes)
        seeds = "one seed" if len(self.seed_changes) == 1 else f"{agreeing} of {len(self.seed_changes)} seeds"
        change = format_percent(self.change - 1, min_decimals=1)
        return f"{change} [{', '.join(percent)}], p {format_p_value(self.holm_p)}, {seeds}: {self.verdict}"


def compare_texts(table: ComparisonTable, pairs: Sequence[tuple[str, str]], length: float) -> list[TextComparison]:
    """Compare pairs of methods, each with its base, at one length; Holm's correction is over all of them.

    Pairs without a seed in common, or without sums of the same blocks, are left out.
    """
    by_method: dict[str, list[Record]] = {}
    for record in table.records:
        if record.x_value == length and not record.is_trivial_baseline:
            by_method.setdefault(record.method, []).append(record)
    found = []
    for method, base in pairs:
        seeds = [
            pair
            for pair in pair_by_seed(by_method.get(method, ()), by_method.get(base, ()))
            if pair[0].tokens_per_block is not None and pair[0].tokens_per_block == pair[1].tokens_per_block
        ]
        if seeds and len(seeds[0][0].block_sums or ()) > 1:
            found.append(_compare_blocks(method, base, round(length), seeds))
    corrected = apply_holm_correction([comparison.p for comparison in found])
    return [replace(comparison, holm_p=p) for comparison, p in zip(found, corrected, strict=True)]


def _compare_blocks(method: str, base: str, length: int, pairs: Sequence[tuple[Record, Record]]) -> TextComparison:
    from scipy import stats  # takes a second to import

    counts = np.array(pairs[0][0].tokens_per_block, dtype=np.int64)
    differences = np.array(
        [np.array(one.block_sums) - np.array(other.block_sums) for one, other in pairs]
    )  # [seeds, blocks]
    means = differences.mean(axis=0) / counts
    seed_changes = tuple(math.exp(total / counts.sum()) for total in differences.sum(axis=1))
    draws = draw_bootstrap_means(differences.mean(axis=0)[None], counts)
    assert draws is not None  # there are two blocks
    low, high = compute_percentile_interval(draws[0])
    p = 1.0 if np.ptp(means) == 0 and means[0] == 0 else float(stats.ttest_1samp(means, 0.0).pvalue)
    change = math.exp(differences.mean(axis=0).sum() / counts.sum())
    return TextComparison(method, base, length, change, (math.exp(low), math.exp(high)), seed_changes, p)


@dataclass(frozen=True)
class MethodCost:
    """What a method costs, over what the baseline costs; memory in GiB. None is not known."""

    parameters: int | None
    step: float | None
    scoring: float | None
    """Seconds of scoring at the largest length."""
    train_memory: float | None
    scoring_memory: float | None

    @property
    def has_times(self) -> bool:
        return self.step is not None and self.scoring is not None


def measure_costs(table: ComparisonTable, baseline: str) -> dict[str, MethodCost]:
    """The costs of the methods of a table of perplexities.

    A model on CPUs is charged the seconds of its processors, which runs beside it hardly change; on a GPU, seconds.
    """
    last, prefix = table.x_values[-1], "cpu_" if has_cpu_times(table) else ""

    def get_median(method: str, field: str, *, at_last: bool = False) -> float | None:
        values = [
            value
            for record in table.records
            if record.method == method and (not at_last or record.x_value == last)
            and (value := getattr(record, field)) is not None
        ]  # fmt: skip
        return statistics.median(values) if values else None

    def compare(method: str, field: str, *, at_last: bool = False) -> float | None:
        value = get_median(method, field, at_last=at_last)
        base = get_median(baseline, field, at_last=at_last)
        return None if value is None or not base else value / base

    costs = {}
    for method in table.methods:
        parameters = get_median(method, "parameters")
        costs[method] = MethodCost(
            None if parameters is None else round(parameters),
            compare(method, f"step_{prefix}seconds"),
            compare(method, f"{prefix}seconds", at_last=True),
            get_median(method, "train_memory_gib"),
            get_median(method, "memory_gib", at_last=True),
        )
    return costs


def has_cpu_times(table: ComparisonTable) -> bool:
    """Do all its records tell the seconds of processors, of models that ran on nothing else?"""
    records = [record for record in table.records if not record.is_trivial_baseline]
    return all(
        record.device == "cpu" and record.step_cpu_seconds is not None and record.cpu_seconds is not None
        for record in records
    )


def find_text_table(tables: Sequence[ComparisonTable]) -> ComparisonTable | None:
    """The table of perplexities over lengths that has most methods."""
    candidates = [
        table
        for table in tables
        if table.metric.name == "perplexity" and table.axis.name == "length" and len(table.x_values) > 1
    ]
    return max(candidates, key=lambda table: len(table.methods), default=None)

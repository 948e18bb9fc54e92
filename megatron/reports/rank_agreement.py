"""Agreement between two orders of methods: Kendall's τ with its interval.

Single numbers of two experiments are not comparable, because corpora, tokenizers, sizes, and protocols differ. The
order of methods at a multiple of the training length is comparable. Agreement is Kendall's τ-b (Kendall 1938, A new
measure of rank correlation): the share of pairs in the same order minus the share of pairs in the opposite order. It is
1 for the same order, 0 for no agreement, and −1 for the reverse. Measured values are means over the seeds common to all
compared methods, so that no method benefits from its seeds. The interval is a bootstrap over seeds if there are
several, else over blocks of the text. Two measured orders are resampled independently.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron.reports.axes import format_multiple
from megatron.reports.comparison_table import ComparisonTable
from megatron.reports.records import Record
from megatron.reports.table_formats import TextTable
from megatron.reports.uncertainty import (
    BOOTSTRAP_SEED,
    NUM_RESAMPLES,
    compute_percentile_interval,
    draw_bootstrap_means,
)

NUM_TAU_RESAMPLES = NUM_RESAMPLES // 10
"""Number of resamples of τ. Each is a ranking, so fewer suffice for two digits."""


@dataclass(frozen=True)
class RankAgreement:
    """Agreement between two orders of methods at one multiple of the training length."""

    length_ratio: float
    methods: tuple[str, ...]
    """Methods that both orders contain. `compare_orders` sorts them, the best first."""
    tau: float
    interval: tuple[float, float] | None
    num_seeds: int
    """Number of seeds common to all methods; the smaller number if both orders are measured."""

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.tau:+.2f}"
        return f"{self.tau:+.2f} [{self.interval[0]:+.2f}, {self.interval[1]:+.2f}]"


@dataclass(frozen=True)
class MeasuredOrder:
    """Values of methods at one length, over the seeds common to all of them."""

    values: tuple[float, ...]
    samples: np.ndarray | None
    """Resampled values [resamples, methods], or None if there is neither a second seed nor a second block."""
    num_seeds: int


def measure_order(
    table: ComparisonTable, methods: Sequence[str], x: float, seed: int = BOOTSTRAP_SEED
) -> MeasuredOrder | None:
    """Return the values of methods at an x value, or None if they share no seed there.

    Args:
        table: table with the records of the methods.
        methods: methods to order.
        x: length in tokens.
        seed: random seed of the resamples.
    """
    records_per_method = _select_shared_seeds(table, methods, x)
    if not records_per_method[0]:
        return None
    values = tuple(statistics.fmean(record.value for record in records) for records in records_per_method)
    return MeasuredOrder(values, _resample_values(records_per_method, seed), len(records_per_method[0]))


def compare_orders(table: ComparisonTable, other: ComparisonTable, num_best: int | None = None) -> list[RankAgreement]:
    """Compute the agreement of two tables at every common multiple.

    Args:
        table: first table.
        other: second table.
        num_best: number of methods to compare, the best ones of the first table at each multiple; None for all methods
            that both tables have there.
    """
    agreements = []
    for x in table.x_values:
        length_ratio = x / table.train_length
        x_other = other.get_length_at_multiple(length_ratio)
        common = [m for m in table.methods if (m, x) in table.cells and (m, x_other) in other.cells]
        methods = tuple(sorted(common, key=lambda m: table.metric.get_sort_key(table.cells[m, x].mean))[:num_best])
        if len(methods) < 2:
            continue
        order = measure_order(table, methods, x)
        other_order = measure_order(other, methods, x_other, BOOTSTRAP_SEED + 1)
        if order is None or other_order is None:
            continue
        tau = float(compute_kendall_tau(order.values, other_order.values))
        interval = None
        if order.samples is not None or other_order.samples is not None:
            samples, other_samples = (o.values if o.samples is None else o.samples for o in (order, other_order))
            interval = compute_percentile_interval(compute_kendall_tau(samples, other_samples))
        num_seeds = min(order.num_seeds, other_order.num_seeds)
        agreements.append(RankAgreement(length_ratio, methods, tau, interval, num_seeds))
    return agreements


def compute_kendall_tau(values: ArrayLike, other_values: ArrayLike) -> np.ndarray:
    """Compute Kendall's τ-b of rankings [..., methods], or 0 if one of them has only ties.

    It is the correlation of the signs of all differences between two methods. scipy.stats.kendalltau returns the same
    for one pair of rankings, and takes 170 times as long for a thousand of twelve methods.
    """
    signs, other_signs = _compare_methods(np.asarray(values)), _compare_methods(np.asarray(other_values))
    concordant = (signs * other_signs).sum(axis=-1)
    untied = np.sqrt((signs**2).sum(axis=-1) * (other_signs**2).sum(axis=-1))
    return np.divide(concordant, untied, out=np.zeros(concordant.shape), where=untied > 0)


def _compare_methods(values: np.ndarray) -> np.ndarray:
    """Return 1, 0 or −1 for each pair of methods: the first is greater, equal or smaller, int64 [..., pairs]."""
    first, second = np.triu_indices(values.shape[-1], 1)
    first_values, second_values = values[..., first], values[..., second]
    return (first_values > second_values).astype(np.int64) - (first_values < second_values)


def build_agreement_table(
    table: ComparisonTable, other: ComparisonTable, title: str, num_best: Sequence[int] = ()
) -> TextTable:
    """Build a table of both values of each common method at each common multiple, and of the orders' agreement.

    Args:
        table: first table.
        other: second table.
        title: title of the result.
        num_best: numbers of best methods for which further rows give the agreement.
    """
    agreements = compare_orders(table, other)
    length_ratios = [agreement.length_ratio for agreement in agreements]
    best_agreements = {
        num: {found.length_ratio: found for found in compare_orders(table, other, num)} for num in num_best
    }
    methods = dict.fromkeys(m for agreement in reversed(agreements) for m in agreement.methods)

    def format_values(method: str, length_ratio: float) -> str:
        cells = [t.cells.get((method, t.get_length_at_multiple(length_ratio))) for t in (table, other)]
        return " | ".join("–" if cell is None else str(cell).rstrip("*") for cell in cells)

    rows = [(method, tuple(format_values(method, ratio) for ratio in length_ratios)) for method in methods]
    rows.append(("order agreement τ", tuple(str(agreement) for agreement in agreements)))
    rows += [
        (f"τ of the {num} best", tuple(str(found.get(ratio, "–")) for ratio in length_ratios))
        for num, found in best_agreements.items()
    ]
    return TextTable(
        title=title,
        corner_header="method",
        column_headers=tuple(format_multiple(ratio) for ratio in length_ratios),
        rows=tuple(rows),
        notes=(
            "Kendall's τ is 1 for the same order and −1 for the reverse. Its 95% interval is a bootstrap over the "
            "seeds of each experiment that has several. Resampling adds noise, which lowers τ.",
        ),
    )


def _select_shared_seeds(table: ComparisonTable, methods: Sequence[str], x: float) -> list[list[Record]]:
    """Return the records of each method at an x value, for the seeds common to all methods, sorted by seed."""
    records_by_seed: list[dict[int, Record]] = []
    for method in methods:
        method_records = (record for record in table.records if (record.method, record.x_value) == (method, x))
        records_by_seed.append({record.seed: record for record in method_records})
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in records_by_seed)))
    return [[by_seed[seed] for seed in seeds] for by_seed in records_by_seed]


def _resample_values(records_per_method: Sequence[Sequence[Record]], seed: int) -> np.ndarray | None:
    """Resample values [resamples, methods] from records [methods, seeds], or return None if that is not possible."""
    num_seeds = len(records_per_method[0])
    if num_seeds > 1:
        values = np.array(
            [[run_record.value for run_record in method_records] for method_records in records_per_method]
        )
        seed_indices = np.random.Generator(np.random.PCG64(seed)).integers(
            num_seeds, size=(NUM_TAU_RESAMPLES, num_seeds)
        )
        return values[:, seed_indices].mean(axis=2).T
    single_records = [method_records[0] for method_records in records_per_method]
    block_counts = single_records[0].tokens_per_block
    if block_counts is None or any(record.tokens_per_block != block_counts for record in single_records):
        return None
    means = draw_bootstrap_means(
        np.array([record.block_sums for record in single_records]),
        np.array(block_counts),
        num_resamples=NUM_TAU_RESAMPLES,
        seed=seed,
    )
    return None if means is None else means.T

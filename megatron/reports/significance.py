"""Is one method better than another, or may the difference be chance?

Two methods are compared on the same targets, in pairs, so that what makes a text or a seed hard for both cancels:

    over seeds     a paired two-sided t-test, the pairs are the runs of a seed: on the values, as KERPLE's tables 3 and
                   9 (2205.09921), and on their logarithms where those are the means (a perplexity that explodes is
                   skewed, its nll is not)
    one seed       a paired bootstrap over blocks of text, the same blocks drawn for both: says what another text might
                   change, and nothing of another training

Many tests find something by chance. Holm's correction (Holm 1979, A simple sequentially rejective multiple test
procedure) is over all tests of a table and metric's scale, and stands beside the raw value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.reports.bootstrap import compute_percentile_interval, draw_bootstrap_means
from megatron.reports.comparison_table import ComparisonTable, format_partial_seeds, pair_by_seed
from megatron.reports.metrics import Metric, clamped_exp
from megatron.reports.records import Record
from megatron.reports.table_formats import TextTable
from megatron.reports.x_axes import join_headers
from megatron.utils.errors import UserError
from megatron.utils.suggestions import format_choices

SIGNIFICANCE_LEVEL = 0.05
WORSE_MARK = "†"


@dataclass(frozen=True)
class TTest:
    """A paired two-sided t-test over seeds."""

    t: float
    p: float
    holm_p: float = math.nan
    """Corrected for all tests of the table."""


@dataclass(frozen=True)
class MethodComparison:
    """One method against another at one place."""

    metric: Metric
    method: str
    x_value: float
    num_seeds: int
    """That both have there."""
    change: float
    """How the method differs from the other: over seeds the geometric mean of ratios, or the mean of differences."""
    partial_num_seeds: int | None = None
    """`seeds`, where other comparisons of the table are over more."""
    interval: tuple[float, float] | None = None
    """Of the change, 95%, by bootstrap; for one seed."""
    value_test: TTest | None = None
    log_test: TTest | None = None

    @property
    def is_significant(self) -> bool:
        """Beyond chance at 5%, uncorrected: both tests agree, or the interval leaves no change out."""
        if self.interval is not None:
            return not self.interval[0] <= self.metric.neutral_change <= self.interval[1]
        tests = [test for test in (self.value_test, self.log_test) if test is not None]
        return bool(tests) and all(test.p < SIGNIFICANCE_LEVEL for test in tests)

    @property
    def verdict(self) -> str:
        """better, worse, or not significant."""
        if not self.is_significant:
            return "not significant"
        return (
            "better"
            if self.metric.get_sort_key(self.change) < self.metric.get_sort_key(self.metric.neutral_change)
            else "worse"
        )

    def __str__(self) -> str:
        """A cell: the change, what is known of it, and KERPLE's † where the method is worse beyond chance."""
        uncertainty, half_width = "one seed", None
        if self.interval is not None:
            uncertainty, half_width = (
                self.metric.format_change_interval(*self.interval),
                (self.interval[1] - self.interval[0]) / 2,
            )
        test = self.log_test or self.value_test
        if test is not None:
            uncertainty = f"p {format_p_value(test.p)}, Holm {format_p_value(test.holm_p)}"
        worse_mark = WORSE_MARK if self.verdict == "worse" else ""
        return (
            f"{self.metric.format_change(self.change, half_width)} "
            f"{uncertainty}{format_partial_seeds(self.partial_num_seeds)}{worse_mark}"
        )


def compare_methods(table: ComparisonTable, against: str) -> list[MethodComparison]:
    """Compare every method of a table with one of them, at every place where both have runs of the same seed.

    Predictors that learned nothing have no seeds, and are left out.

    Args:
        table: the table.
        against: the method that the others are compared with.

    Returns:
        By method, then place. Over one seed an interval, if the records keep the sums of their blocks; over more,
        tests.

    Raises:
        UserError: the table has no such method.
    """
    if against not in table.methods:
        raise UserError(
            f"--against {against}: no such method in {table.title}; {format_choices(against, table.methods)}"
        )
    records_by_cell: dict[tuple[str, float], list[Record]] = {}
    for record in table.records:
        if not record.is_trivial_baseline:
            records_by_cell.setdefault((record.method, record.x_value), []).append(record)
    comparisons = []
    for method in table.methods:
        for x in table.x_values:
            pairs = pair_by_seed(records_by_cell.get((method, x), ()), records_by_cell.get((against, x), ()))
            if method != against and pairs:
                method_records, against_records = zip(*pairs, strict=True)
                comparisons.append(_compare_pairs(table.metric, method_records, against_records))
    max_seeds = max((comparison.num_seeds for comparison in comparisons), default=0)
    return _correct_comparisons(
        [
            replace(comparison, partial_num_seeds=comparison.num_seeds if comparison.num_seeds < max_seeds else None)
            for comparison in comparisons
        ]
    )


def _compare_pairs(
    metric: Metric, method_records: Sequence[Record], against_records: Sequence[Record]
) -> MethodComparison:
    """One method against another at one place, by records of the same seeds in the same order."""
    a, b = (np.array([record.value for record in records]) for records in (method_records, against_records))
    is_ratio = metric.comparison == "ratio"
    change = metric.average_changes(
        [
            metric.compute_change(value, against_value)
            for value, against_value in zip(a.tolist(), b.tolist(), strict=True)
        ]
    )
    base = MethodComparison(metric, method_records[0].method, method_records[0].x_value, len(method_records), change)
    if len(method_records) == 1:
        return replace(
            base, interval=bootstrap_ratio_interval(method_records[0], against_records[0]) if is_ratio else None
        )
    return replace(base, value_test=_run_t_test(a, b), log_test=_run_t_test(np.log(a), np.log(b)) if is_ratio else None)


def bootstrap_ratio_interval(record: Record, against_record: Record) -> tuple[float, float] | None:
    """The 95% interval of the ratio of two perplexities on the same blocks, by a paired bootstrap.

    None if the records do not keep the sums of their blocks, or there are fewer than two.
    """
    block_counts = record.tokens_per_block
    if (
        block_counts is None
        or block_counts != against_record.tokens_per_block
        or record.target_digest != against_record.target_digest
    ):
        return None
    samples = draw_bootstrap_means(np.array([record.block_sums, against_record.block_sums]), np.array(block_counts))
    if samples is None:
        return None
    low, high = compute_percentile_interval(samples[0] - samples[1])
    return clamped_exp(low), clamped_exp(high)


def _run_t_test(a: np.ndarray, b: np.ndarray) -> TTest:
    """Of pairs [seeds]. Equal differences are no chance at all (or none to speak of): p is 0, or 1 where all are 0."""
    differences = a - b
    if np.ptp(differences) <= 1e-12 * max(1.0, float(np.abs(a).max())):
        is_zero = abs(float(differences.mean())) <= 1e-12 * max(1.0, float(np.abs(a).max()))
        return TTest(0.0 if is_zero else math.copysign(math.inf, float(differences.mean())), 1.0 if is_zero else 0.0)
    from scipy import stats  # takes a second to import

    result = stats.ttest_rel(a, b)
    return TTest(float(result.statistic), float(result.pvalue))


def apply_holm_correction(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p values, in the order given: the k-th smallest of n times n − k + 1, never falling."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, running_max = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running_max = max(running_max, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = running_max
    return corrected


def _correct_comparisons(comparisons: Sequence[MethodComparison]) -> list[MethodComparison]:
    """With Holm's correction, over all tests on values and, apart, over all on logarithms."""
    results = list(comparisons)
    for field_name in ("value_test", "log_test"):
        tested = [
            (index, test)
            for index, comparison in enumerate(results)
            if (test := getattr(comparison, field_name)) is not None
        ]
        for (index, test), corrected_p in zip(
            tested, apply_holm_correction([test.p for _, test in tested]), strict=True
        ):
            results[index] = replace(results[index], **{field_name: replace(test, holm_p=corrected_p)})
    return results


def format_p_value(value: float) -> str:
    """Two digits, as far as they say something."""
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def build_significance_table(table: ComparisonTable, against: str) -> TextTable:
    """The comparisons of a table. Raises UserError as `compare`."""
    comparisons = {
        (comparison.method, comparison.x_value): comparison for comparison in compare_methods(table, against)
    }
    methods = [method for method in table.methods if method != against and method not in table.trivial_baselines]
    max_seeds = max((comparison.num_seeds for comparison in comparisons.values()), default=0)
    change_kind = "ratio to" if table.metric.comparison == "ratio" else "difference from"
    mean_note = f": the {table.metric.mean_kind} over the seeds that both have" if max_seeds > 1 else ""
    notes = [f"The {change_kind} {against}{mean_note}."]
    if any(comparison.partial_num_seeds is not None for comparison in comparisons.values()):
        notes.append(f"{max_seeds} seeds are paired, where there is no n.")
    has_intervals = any(comparison.interval is not None for comparison in comparisons.values())
    has_tests = any(comparison.value_test is not None for comparison in comparisons.values())
    if has_intervals:
        notes.append("Intervals: 95%, paired bootstrap over blocks of the text; another training may differ more.")
    if has_tests:
        scale = "logarithms" if table.metric.comparison == "ratio" else "values"
        notes.append(
            f"p: paired two-sided t-test over {max_seeds} seeds, of {scale}; Holm: corrected for all tests of this "
            f"table."
        )
    test_scales = " of values and of logarithms" if table.metric.comparison == "ratio" and max_seeds > 1 else ""
    if has_intervals or has_tests:
        notes.append(
            f"{WORSE_MARK} worse than {against} beyond chance: 5%{test_scales}, uncorrected as in KERPLE's tables."
        )
    else:
        notes.append(
            "What could be chance is not known: it takes several seeds in common, or sums of blocks beside one."
        )
    return TextTable(
        title=f"{table.title}: compared with {against}",
        corner_header="method",
        column_headers=tuple(join_headers(*heads) for heads in table.get_column_headers()),
        rows=tuple(
            (
                method,
                tuple(
                    str(comparisons.get((method, x)) or _explain_missing_pair(table, (method, against), x))
                    for x in table.x_values
                ),
            )
            for method in methods
        ),
        notes=tuple(notes),
    )


def _explain_missing_pair(table: ComparisonTable, methods: Sequence[str], x: float) -> str:
    """What stands where two methods are not compared: why one of them has no number, or that they share no seed."""
    missing_methods = [method for method in methods if (method, x) not in table.cells]
    return table.get_missing_text(missing_methods[0], x) if missing_methods else "no seed in common"

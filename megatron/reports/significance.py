"""Significance of differences between methods, defined once for tables, pages, and sentences.

Claims about methods are claims over seeds. Two methods are compared on the same targets over the seeds that both have,
by a two-sided t-test of their values, or of their logarithms if means are geometric (an exploding perplexity is skewed,
its nll is not). Their variances are those of `megatron.reports.uncertainty`: of two methods alone it is the paired
t-test of KERPLE's tables 3 and 9 (2205.09921); of many, variances are shared. The degrees of freedom are the smaller
ones of the two methods, which is conservative.

Some of many tests are significant by chance. A difference is significant if p is below 5% after Holm's correction (Holm
1979, A simple sequentially rejective multiple test procedure) over all tests that are shown: those of a table against
one method (`compare_methods`), or all of a page (`correct_together`). A method that is chosen for its result, such as
the best, is compared with the others only within the family of all pairs (`list_pairs_with_best`).

Two models with the same seed get an interval instead, by a paired bootstrap over blocks of the text. It measures the
uncertainty of their ratio on other texts, not a difference between methods: other training runs may differ more.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron.reports.axes import join_headers
from megatron.reports.comparison_table import ComparisonTable, format_partial_seeds, pair_by_seed
from megatron.reports.method_rows import describe_unequal_training
from megatron.reports.metrics import Metric, compute_clamped_exp
from megatron.reports.records import Record
from megatron.reports.table_formats import TextTable
from megatron.reports.uncertainty import (
    SeedVariance,
    compute_percentile_interval,
    draw_bootstrap_means,
    estimate_seed_variances,
)
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices

SIGNIFICANCE_LEVEL = 0.05
WORSE_MARK = "†"
NOT_SIGNIFICANT, NOT_TESTED = "not significant", "not tested"


@dataclass(frozen=True)
class TTest:
    t: float
    p: float
    holm_p: float = math.nan
    """p value corrected for all tests of its family."""


@dataclass(frozen=True)
class MethodComparison:
    """Comparison of two methods at one x value."""

    metric: Metric
    method: str
    x_value: float
    num_seeds: int
    """Number of seeds that both methods have there."""
    change: float
    """Change from the other method: over seeds the geometric mean of ratios, or the mean of differences."""
    partial_num_seeds: int | None = None
    """Number of seeds, if other comparisons of the table have more."""
    test: TTest | None = None
    is_variance_shared: bool = False
    """True if the test's variances are moderated by those of other methods."""
    single_pair: tuple[Record, Record] | None = field(default=None, repr=False)
    """Records of the only seed that both methods have."""

    @property
    def is_tested(self) -> bool:
        """True if the methods share at least two seeds."""
        return self.test is not None

    @property
    def p(self) -> float:
        """Return the p value before correction; NaN without a test."""
        return math.nan if self.test is None else self.test.p

    @property
    def holm_p(self) -> float:
        """Return the p value after Holm's correction; NaN without a test."""
        return math.nan if self.test is None else self.test.holm_p

    @cached_property
    def text_interval(self) -> tuple[float, float] | None:
        """95% interval of the change over blocks of the text, for models of one seed; None if unknown."""
        if self.single_pair is None or self.metric.comparison != "ratio":
            return None
        return bootstrap_ratio_interval(*self.single_pair)

    @property
    def verdict(self) -> str:
        """Either better, worse, not significant, or not tested."""
        if not self.is_tested:
            return NOT_TESTED
        if not self.holm_p < SIGNIFICANCE_LEVEL:
            return NOT_SIGNIFICANT
        return (
            "better"
            if self.metric.get_sort_key(self.change) < self.metric.get_sort_key(self.metric.neutral_change)
            else "worse"
        )

    def __str__(self) -> str:
        """Format a cell: the change, its uncertainty, and † if the method is significantly worse."""
        uncertainty, half_width = "one seed", None
        if self.text_interval is not None:
            low, high = self.text_interval
            uncertainty, half_width = self.metric.format_change_interval(low, high), (high - low) / 2
        if self.is_tested:
            uncertainty = f"p {format_p_value(self.p)}, Holm {format_p_value(self.holm_p)}"
        worse_mark = WORSE_MARK if self.verdict == "worse" else ""
        return (
            f"{self.metric.format_change(self.change, half_width)} "
            f"{uncertainty}{format_partial_seeds(self.partial_num_seeds)}{worse_mark}"
        )


def compare_methods(table: ComparisonTable, against: str) -> list[MethodComparison]:
    """Compare every method of a table with one method, at every x value where both have runs of the same seed.

    Trivial baselines have no seeds, and are skipped.

    Args:
        table: table of the methods.
        against: method to compare with.

    Returns:
        Comparisons by method, then x value. Tests need at least two seeds.

    Raises:
        UserError: the table does not contain the method.
    """
    if against not in table.methods:
        raise UserError(
            f"--against {against}: no such method in {table.title}; {format_choices(against, table.methods)}"
        )
    methods = [method for method in table.methods if method != against]
    pairs = [(method, against, x) for method in methods for x in table.x_values]
    comparisons = list(compare_pairs(table, pairs).values())
    max_seeds = max((comparison.num_seeds for comparison in comparisons), default=0)
    (corrected,) = correct_together(
        [
            replace(comparison, partial_num_seeds=comparison.num_seeds if comparison.num_seeds < max_seeds else None)
            for comparison in comparisons
        ]
    )
    return corrected


def compare_pairs(
    table: ComparisonTable, pairs: Iterable[tuple[str, str, float]]
) -> dict[tuple[str, str, float], MethodComparison]:
    """Compare pairs of methods, without correction (`correct_together`).

    Args:
        pairs: (method, method to compare with, x value). Pairs without a common seed are left out.
    """
    seeds = _SeedTable(table)
    return {pair: comparison for pair in pairs if (comparison := seeds.compare(*pair)) is not None}


def list_pairs_with_best(
    table: ComparisonTable, x: float, excluded: Collection[str] = ()
) -> list[tuple[str, str, float]]:
    """Return all pairs of methods at one x value, as a family of tests that contains those with the best method.

    The best method is selected by its result, which biases its comparisons. Corrected for all pairs, they remain valid.
    """
    means = {method: cell.mean for (method, at), cell in table.cells.items() if at == x}
    methods = [m for m in table.methods if m in means and m not in table.trivial_baselines and m not in excluded]
    best = table.metric.select_best(means[method] for method in methods) if methods else None
    methods.sort(key=lambda method: means[method] != best)
    return [(method, other, x) for other, method in itertools.combinations(methods, 2)]


def get_seed_variances(table: ComparisonTable, x: float) -> dict[str, SeedVariance]:
    """Return the variances of methods over seeds at one x value, of logarithms if the metric is compared by ratios."""
    is_ratio = table.metric.comparison == "ratio"
    values: dict[str, dict[int | None, float]] = {}
    for record in table.records:
        if record.x_value == x and not record.is_trivial_baseline:
            value = math.log(record.value) if is_ratio else record.value
            values.setdefault(record.method, {})[record.seed] = value
    return estimate_seed_variances(values, is_moderated=is_ratio)


class _SeedTable:
    """Records of a table by method, x value, and seed, with the variances of methods over seeds."""

    def __init__(self, table: ComparisonTable) -> None:
        self.metric = table.metric
        self.is_ratio = table.metric.comparison == "ratio"
        self.records: dict[tuple[str, float], dict[int | None, Record]] = {}
        for record in table.records:
            if not record.is_trivial_baseline:
                self.records.setdefault((record.method, record.x_value), {})[record.seed] = record
        self.variances = {x: get_seed_variances(table, x) for x in table.x_values}

    def _scale(self, value: float) -> float:
        return math.log(value) if self.is_ratio else value

    def compare(self, method: str, against: str, x: float) -> MethodComparison | None:
        """Compare two methods over their common seeds, without correction; None if they have no common seed."""
        pairs = pair_by_seed(self.records.get((method, x), {}).values(), self.records.get((against, x), {}).values())
        if not pairs:
            return None
        changes = [self.metric.compute_change(own.value, other.value) for own, other in pairs]
        base = MethodComparison(self.metric, method, x, len(pairs), self.metric.average_changes(changes))
        if len(pairs) == 1:
            return replace(base, single_pair=pairs[0])
        differences = [self._scale(own.value) - self._scale(other.value) for own, other in pairs]
        size = max(abs(self._scale(record.value)) for pair in pairs for record in pair)
        variances = [self.variances[x][name] for name in (method, against)]
        is_shared = any(
            each.degrees_of_freedom > len(self.records[name, x]) - 1
            for each, name in zip(variances, (method, against), strict=True)
        )
        return replace(base, test=_run_t_test(differences, variances, size), is_variance_shared=is_shared)


def bootstrap_ratio_interval(record: Record, against_record: Record) -> tuple[float, float] | None:
    """Compute the 95% interval of the ratio of two perplexities on the same blocks, by a paired bootstrap.

    Return None if the records lack the sums of their blocks, or there are fewer than two blocks.
    """
    interval = bootstrap_loss_interval(record, against_record)
    return None if interval is None else (compute_clamped_exp(interval[0]), compute_clamped_exp(interval[1]))


def bootstrap_loss_interval(record: Record, against_record: Record) -> tuple[float, float] | None:
    """Compute the 95% interval of the difference of two losses on the same blocks, in nats per token.

    Return None if the records lack the sums of their blocks, or there are fewer than two blocks.
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
    return compute_percentile_interval(samples[0] - samples[1])


def _run_t_test(differences: Sequence[float], variances: Sequence[SeedVariance], size: float) -> TTest:
    """Run a two-sided t-test of the mean of differences [seeds].

    If all differences are equal, up to the rounding of values as large as `size`, p is 0, or 1 if all of them are 0.
    """
    mean, rounding = statistics.fmean(differences), 1e-12 * max(1.0, size)
    if max(differences) - min(differences) <= rounding:
        return TTest(0.0, 1.0) if abs(mean) <= rounding else TTest(math.copysign(math.inf, mean), 0.0)
    from scipy import stats  # imports slowly (about one second)

    t = mean / math.sqrt(sum(each.variance for each in variances) / len(differences))
    return TTest(t, 2 * float(stats.t.sf(abs(t), min(each.degrees_of_freedom for each in variances))))


def apply_holm_correction(p_values: Sequence[float]) -> list[float]:
    """Apply Holm's correction, and return p values in the same order.

    The k-th smallest of n values is multiplied by n − k + 1; the results are made monotone.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, running_max = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running_max = max(running_max, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = running_max
    return corrected


def correct_together(*families: Sequence[MethodComparison]) -> list[list[MethodComparison]]:
    """Apply Holm's correction within each family, and Bonferroni's over families, so that 5% holds for all together.

    The many pairs from which a best method was selected thus do not reduce the power of a few planned comparisons.
    """
    num_families = sum(any(comparison.is_tested for comparison in family) for family in families)
    results = []
    for family in families:
        corrected = iter(apply_holm_correction([each.test.p for each in family if each.test is not None]))
        results.append(
            [_set_holm_p(each, min(1.0, num_families * next(corrected))) if each.is_tested else each for each in family]
        )
    return results


def _set_holm_p(comparison: MethodComparison, holm_p: float) -> MethodComparison:
    if comparison.test is None:
        return comparison
    return replace(comparison, test=replace(comparison.test, holm_p=holm_p))


def format_p_value(value: float) -> str:
    """Format a p value with two digits."""
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def build_significance_table(table: ComparisonTable, against: str) -> TextTable:
    """Build the table of comparisons with one method.

    Raises:
        UserError: as for `compare_methods`.
    """
    comparisons = {
        (comparison.method, comparison.x_value): comparison for comparison in compare_methods(table, against)
    }
    methods = [method for method in table.methods if method != against and method not in table.trivial_baselines]
    max_seeds = max((comparison.num_seeds for comparison in comparisons.values()), default=0)
    change_kind = "Ratio to" if table.metric.comparison == "ratio" else "Difference from"
    mean_note = f": {table.metric.mean_kind} over the seeds that both methods have" if max_seeds > 1 else ""
    notes = [f"{change_kind} {against}{mean_note}."]
    if any(comparison.partial_num_seeds is not None for comparison in comparisons.values()):
        notes.append(f"Unless n is shown, {max_seeds} seeds are paired.")
    if any(comparison.text_interval is not None for comparison in comparisons.values()):
        notes.append(
            "Intervals: 95%, paired bootstrap over blocks of the text, for two models with the same seed; other "
            "training runs may differ more."
        )
    if any(comparison.is_tested for comparison in comparisons.values()):
        scale = " of logarithms" if table.metric.comparison == "ratio" else ""
        is_shared = any(comparison.is_variance_shared for comparison in comparisons.values())
        shared = ", with variances moderated across methods" if is_shared else ""
        notes += [
            f"p: paired two-sided t-test{scale} over {max_seeds} seeds{shared}; Holm: corrected for all tests of this "
            "table.",
            f"{WORSE_MARK} significantly worse than {against}: Holm's p is below {SIGNIFICANCE_LEVEL:.0%}.",
        ]
    else:
        notes.append("Significance unknown: a test needs two seeds that both methods have.")
    notes += filter(None, [describe_unequal_training(table.records)])
    return TextTable(
        title=f"{table.title}: compared with {against}",
        corner_header="method",
        column_headers=tuple(join_headers(*heads) for heads in table.get_column_headers()),
        rows=tuple(
            (
                method,
                tuple(
                    str(comparisons.get((method, x)) or _describe_missing_pair(table, (method, against), x))
                    for x in table.x_values
                ),
            )
            for method in methods
        ),
        notes=tuple(notes),
    )


def _describe_missing_pair(table: ComparisonTable, methods: Sequence[str], x: float) -> str:
    """Return the text for a missing comparison: a method without a value, or no common seed."""
    missing_methods = [method for method in methods if (method, x) not in table.cells]
    return table.get_missing_text(missing_methods[0], x) if missing_methods else "no seed in common"

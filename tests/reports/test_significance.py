"""Significance tests, compared with explicit formulas, tables of the t distribution, and plain loops."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.records import Record
from megatron.reports.significance import (
    MethodComparison,
    apply_holm_correction,
    build_significance_table,
    compare_methods,
    compare_pairs,
    correct_together,
    list_pairs_with_best,
)
from megatron.utils.errors import UserError

from .conftest import record

LOG, T5 = [4.9, 5.0, 5.1, 4.95, 5.05], [5.2, 5.4, 5.3, 5.35, 5.45]


def runs(method: str, values: list[float], length: int = 64) -> list[Record]:
    return [record(method, length, value, seed=seed) for seed, value in enumerate(values)]


def one(records: list[Record], against: str = "log") -> MethodComparison:
    (layout,) = build_comparison_tables(records)
    (found,) = compare_methods(layout, against)
    return found


def test_a_paired_t_test_by_the_formula() -> None:
    """Paired t test: t = mean d / (s / √n); two-sided p with 4 degrees of freedom in closed form."""
    found = one(runs("log", LOG) + runs("t5", T5))
    differences = [math.log(a) - math.log(b) for a, b in zip(T5, LOG, strict=True)]
    t = statistics.fmean(differences) / (statistics.stdev(differences) / math.sqrt(5))
    # Student's distribution with 4 degrees of freedom: F(t) = 1/2 + x (1 − x²/3) · 3/4 with x = t/√(t² + 4).
    x = t / math.sqrt(t * t + 4)
    assert found.test.t == pytest.approx(t)
    assert found.p == pytest.approx(2 * (0.5 - 0.75 * x * (1 - x * x / 3)), rel=1e-6)
    assert found.holm_p == found.p, "a single test needs no correction"
    assert found.verdict == "worse"
    assert str(found).endswith("†")
    assert found.change == pytest.approx(math.prod(T5) ** 0.2 / math.prod(LOG) ** 0.2)


@pytest.mark.parametrize(("seeds", "critical"), [(5, 2.776), (3, 4.303)])
def test_the_critical_values_of_the_papers(seeds: int, critical: float) -> None:
    """Critical values for KERPLE's five seeds: |t| > 2.776; for three seeds: 4.303."""
    for factor, verdict in ((0.99, "not significant"), (1.01, "worse")):
        deviations = np.linspace(-1, 1, seeds)
        spread = deviations / deviations.std(ddof=1)
        shift = factor * critical / math.sqrt(seeds)
        differences = 1e-6 * (spread + shift)  # so small that logarithms equal values
        found = one(runs("log", [5.0] * seeds) + runs("t5", [5.0 + each for each in differences]))
        assert found.test.t == pytest.approx(factor * critical, rel=1e-6)
        assert found.verdict == verdict


def test_worse_and_not_significant_are_distinguished() -> None:
    assert one(runs("log", LOG) + runs("t5", [5.0, 5.05, 5.0, 5.1, 4.9])).verdict == "not significant"
    assert one(runs("log", T5) + runs("t5", LOG)).verdict == "better"
    assert "†" not in str(one(runs("log", T5) + runs("t5", LOG)))


def test_a_perplexity_that_explodes_is_tested_by_its_logarithm() -> None:
    found = one(runs("log", LOG) + runs("rotary", [30.0, 500.0, 2000.0, 90.0, 40.0]))
    assert stats.ttest_rel([30.0, 500.0, 2000.0, 90.0, 40.0], LOG).pvalue > 0.05 > found.p
    assert found.verdict == "worse"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_equals_its_stepwise_procedure(values: list[float]) -> None:
    """Holm's procedure: the smallest p against α/n, the next against α/(n − 1), until one is not rejected."""
    corrected = apply_holm_correction(values)
    for alpha in (0.01, 0.05, 0.3):
        order = sorted(range(len(values)), key=lambda index: values[index])
        rejected: set[int] = set()
        for rank, index in enumerate(order):
            if values[index] * (len(values) - rank) > alpha:
                break
            rejected.add(index)
        assert {index for index, p in enumerate(corrected) if p <= alpha} == rejected
    assert all(p >= raw for p, raw in zip(corrected, values, strict=True))


def test_holm_is_over_the_whole_table() -> None:
    records = runs("log", LOG) + runs("t5", T5) + runs("alibi", [5.0, 5.1, 5.2, 5.0, 5.3])
    (layout,) = build_comparison_tables(records)
    t5, alibi = compare_methods(layout, "log")
    assert t5.holm_p == pytest.approx(2 * t5.p)
    assert alibi.holm_p == pytest.approx(max(alibi.p, t5.holm_p))


def test_verdicts_and_daggers_follow_the_corrected_test() -> None:
    """Verdicts use the corrected test: p = 0.03 is significant alone, but not among eight methods."""
    worse = [5.0, 5.3, 5.2, 5.0, 5.3]
    alone = one(runs("log", LOG) + runs("t5", worse))
    assert alone.holm_p == alone.p < 0.05
    assert (alone.verdict, str(alone)[-1]) == ("worse", "†")
    noise = [0.01, -0.01, 0.0, 0.0, 0.0]
    others = [row for index in range(7) for row in runs(f"m{index}", [a + b for a, b in zip(LOG, noise, strict=True)])]
    (layout,) = build_comparison_tables(runs("log", LOG) + runs("t5", worse) + others)
    among = next(found for found in compare_methods(layout, "log") if found.method == "t5")
    assert (among.p < 0.05 < among.holm_p, among.verdict) == (True, "not significant")
    assert "†" not in str(among)
    grid = build_significance_table(layout, "log")
    assert "† significantly worse than log: Holm's p is below 5%." in grid.notes
    assert not any("†" in cell for _, cells in grid.rows for cell in cells)


def test_all_pairs_are_one_family() -> None:
    """A best method is compared within all pairs, since it was chosen for its result."""
    values = {"log": LOG, "t5": T5, "best": [4.5, 4.7, 4.6, 4.5, 4.55], "fire": [6.0, 6.1, 5.8, 6.2, 5.9]}
    (layout,) = build_comparison_tables([row for method, each in values.items() for row in runs(method, each)])
    listed = list_pairs_with_best(layout, 64)
    assert len(listed) == 6
    assert {method for method, against, _ in listed if against == "best"} == {"log", "t5", "fire"}
    found = compare_pairs(layout, listed)
    (corrected,) = correct_together(list(found.values()))
    smallest = min(corrected, key=lambda each: each.p)
    assert smallest.holm_p == pytest.approx(6 * smallest.p)
    turned = compare_pairs(layout, [("best", "log", 64)])["best", "log", 64]
    assert turned.change == pytest.approx(1 / found["log", "best", 64].change)
    assert turned.test.t == pytest.approx(-found["log", "best", 64].test.t)


def test_families_share_the_error() -> None:
    (layout,) = build_comparison_tables(runs("log", LOG) + runs("t5", T5) + runs("alibi", [5.0, 5.1, 5.2, 5.0, 5.3]))
    (one_family,) = correct_together(compare_methods(layout, "log"))
    two, _ = correct_together(compare_methods(layout, "log"), compare_methods(layout, "t5"))
    assert [each.holm_p for each in two] == [pytest.approx(min(1, 2 * each.holm_p)) for each in one_family]
    untested = correct_together(compare_methods(layout, "log"), [])
    assert [each.holm_p for each in untested[0]] == [each.holm_p for each in one_family]


def test_one_seed_is_compared_by_blocks() -> None:
    sums = {"log": [3.0, 9.0, 2.0, 5.5], "t5": [3.2, 9.9, 2.1, 6.0]}
    tokens = [2, 3, 1, 2]
    records = [
        record(name, 64, math.exp(sum(each) / 8), tokens=8, target_digest="a", block_sums=each, block_tokens=tokens)
        for name, each in sums.items()
    ]
    found = one(records)
    drawn = []
    for chosen in itertools.product(range(4), repeat=4):
        drawn.append(sum(sums["t5"][b] - sums["log"][b] for b in chosen) / sum(tokens[b] for b in chosen))
    drawn.sort()
    low, high = found.text_interval
    # 256 equally likely resamples: the limits are between neighbors of the 2.5% and 97.5% quantiles.
    assert math.exp(drawn[3]) - 1e-9 <= low <= math.exp(drawn[10]) + 1e-9
    assert math.exp(drawn[-11]) - 1e-9 <= high <= math.exp(drawn[-4]) + 1e-9
    # The interval excludes 1, but compares two models; another seed may differ.
    assert low > 1
    assert (found.verdict, math.isnan(found.holm_p)) == ("not tested", True)
    assert "†" not in str(found)
    grid = build_significance_table(build_comparison_tables(records)[0], "log")
    assert any(note.startswith("Intervals: 95%, paired bootstrap over blocks of the text") for note in grid.notes)
    assert "Significance unknown: a test needs two seeds that both methods have." in grid.notes
    assert found.change == pytest.approx(math.exp((21.2 - 19.5) / 8))


def test_without_pairs_nothing_is_claimed() -> None:
    (layout,) = build_comparison_tables([record("log", 64, 5.0), record("t5", 64, 6.0)])
    (found,) = compare_methods(layout, "log")
    assert (found.text_interval, found.test, found.verdict) == (None, None, "not tested")
    (layout,) = build_comparison_tables([record("log", 64, 5.0, seed=1), record("t5", 64, 6.0, seed=2)])
    assert compare_methods(layout, "log") == []
    with pytest.raises(UserError, match=r"--against lag: no such method .* did you mean log"):
        compare_methods(layout, "lag")


def test_differences_that_are_all_equal() -> None:
    same = one(runs("log", LOG) + runs("t5", LOG))
    assert (same.p, same.verdict) == (1.0, "not significant")
    (record_,) = {one(runs("log", [5.0, 5.5, 6.0]) + runs("t5", [1.05 * each for each in (5.0, 5.5, 6.0)])).p}
    assert record_ == 0.0

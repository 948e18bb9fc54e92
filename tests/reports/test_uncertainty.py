"""Bootstrap intervals, compared with a plain loop, with all resamples and by coverage; and variances over seeds."""

import itertools
import math
import random
import statistics
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from megatron.reports import uncertainty
from megatron.reports.uncertainty import (
    CONFIDENCE_LEVEL,
    MIN_METHODS,
    NUM_RESAMPLES,
    SeedVariance,
    draw_bootstrap_means,
    estimate_seed_variances,
    find_detectable_difference,
)


class Intervals(NamedTuple):
    nll: np.ndarray  # [K, 2]
    change: np.ndarray  # of each row from the first


def intervals(sums: np.ndarray, counts: np.ndarray, **choices: int) -> Intervals | None:
    """Return the intervals of each row's mean, and of its difference from the first row."""
    draws = draw_bootstrap_means(sums, counts, **choices)
    if draws is None:
        return None
    return Intervals(
        *(
            np.array([uncertainty.compute_percentile_interval(row) for row in rows])
            for rows in (draws, draws - draws[0])
        )
    )


def quantiles(values: list[float], weights: list[float]) -> tuple[float, float]:
    """Return the smallest values with at least 2.5% and 97.5% of the cumulative weight."""
    ordered = sorted(zip(values, weights, strict=True))
    reached = list(itertools.accumulate(weight for _, weight in ordered))
    low, high = (
        next(value for (value, _), sum_ in zip(ordered, reached, strict=True) if sum_ >= share * reached[-1])
        for share in ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2)
    )
    return low, high


def test_against_every_possible_resample() -> None:
    sums, counts = [[3.0, 9.0, 2.0, 5.5], [2.0, 9.5, 4.0, 7.0]], [2, 3, 1, 2]
    means: list[list[float]] = [[], []]
    for drawn in itertools.product(range(4), repeat=4):
        for length in range(2):
            means[length].append(sum(sums[length][b] for b in drawn) / sum(counts[b] for b in drawn))
    differences = [after - before for before, after in zip(*means, strict=True)]
    found = intervals(np.array(sums), np.array(counts), num_resamples=200_000)
    alike = [1.0] * 4**4
    # 256 resamples have probabilities of at least 1/256, so a quantile is exact except at a jump.
    assert found.nll[0] == pytest.approx(quantiles(means[0], alike))
    assert found.nll[1] == pytest.approx(quantiles(means[1], alike))
    assert found.change[1] == pytest.approx(quantiles(differences, alike))
    assert found.change[0].tolist() == [0, 0]


def test_the_bootstrap_equals_a_plain_loop() -> None:
    generator = random.Random(1)
    counts = [generator.randint(1, 9) for _ in range(20)]
    sums = [[generator.gauss(2, 0.5) * count for count in counts] for _ in range(3)]
    drawn: list[list[float]] = [[], [], []]
    for _ in range(20_000):
        chosen = [generator.randrange(20) for _ in range(20)]
        for length in range(3):
            drawn[length].append(sum(sums[length][b] for b in chosen) / sum(counts[b] for b in chosen))
    found = intervals(np.array(sums), np.array(counts))
    for length in range(3):
        pairs = [(found.nll[length], drawn[length])]
        if length:
            pairs.append((found.change[length], [a - b for a, b in zip(drawn[length], drawn[0], strict=True)]))
        for ends, values in pairs:
            # A quantile q of n draws has standard error √(q(1 − q)/n)/density; the density at 2.5% of a normal is
            # 0.058/σ.
            scatter = math.sqrt(0.025 * 0.975 * (1 / NUM_RESAMPLES + 1 / 20_000)) / 0.058 * statistics.stdev(values)
            ordered = sorted(values)
            assert ends == pytest.approx([ordered[500], ordered[-500]], abs=5 * scatter)


def test_the_truth_is_covered_as_often_as_promised() -> None:
    generator = np.random.default_rng(3)
    repetitions, blocks = 400, 64
    covered = np.zeros(2)
    for _ in range(repetitions):
        hard = generator.normal(2, 0.4, blocks)  # of a block, at both lengths
        counts = generator.integers(40, 65, blocks)
        before, after = hard, hard + generator.normal(0.03, 0.1, blocks)
        found = intervals(np.array([before * counts, after * counts]), counts, num_resamples=1000)
        covered += [found.nll[0, 0] < 2 < found.nll[0, 1], found.change[1, 0] < 0.03 < found.change[1, 1]]
    # A fraction of 400 has standard error √(0.95 · 0.05/400) = 1.1%; with 64 blocks the percentile method is 1% too
    # low.
    assert np.all(np.abs(covered / repetitions - CONFIDENCE_LEVEL) < 0.01 + 3 * 0.011)


def test_difficulty_that_both_lengths_share_cancels() -> None:
    generator = np.random.default_rng(4)
    counts = np.full(30, 8)
    gain = generator.normal(-0.02, 0.01, 30)
    narrow, wide = (
        intervals(np.array([hard * 8, (hard + gain) * 8]), counts)
        for hard in (generator.normal(2, 0.01, 30), generator.normal(2, 1.0, 30))
    )
    assert np.ptp(wide.nll[0]) > 50 * np.ptp(narrow.nll[0])
    assert wide.change[1] == pytest.approx(narrow.change[1], abs=1e-12)
    assert wide.change[1, 1] < 0  # so the improvement is detected, at 1/50 of the spread of blocks


@given(
    st.integers(2, 12).flatmap(
        lambda blocks: st.tuples(
            st.lists(st.floats(0, 50), min_size=2 * blocks, max_size=2 * blocks),
            st.lists(st.integers(0, 20), min_size=blocks, max_size=blocks).filter(lambda n: sum(map(bool, n)) > 1),
        )
    )
)
def test_intervals_are_ordered_repeatable_and_within_the_blocks(drawn: tuple[list[float], list[int]]) -> None:
    losses, counts = np.array(drawn[0]).reshape(2, -1), np.array(drawn[1])
    first = intervals(losses * counts, counts, num_resamples=200)
    second = intervals(losses * counts, counts, num_resamples=200)
    assert np.array_equal(first.nll, second.nll)
    assert np.array_equal(first.change, second.change)
    assert np.all(first.nll[:, 0] <= first.nll[:, 1])
    for row, of_length in zip(first.nll, losses[:, counts > 0], strict=True):
        assert of_length.min() - 1e-9 <= row[0]
        assert row[1] <= of_length.max() + 1e-9


def test_chunked_draws_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, counts = np.random.default_rng(5).random((3, 40)) * 9, np.full(40, 4)
    whole = intervals(sums, counts)
    monkeypatch.setattr(uncertainty, "MAX_DRAWS_PER_CHUNK", 40 * 77)
    pieces = intervals(sums, counts)
    assert np.array_equal(whole.nll, pieces.nll)
    assert np.array_equal(whole.change, pieces.change)


def test_one_block_has_no_interval() -> None:
    assert intervals(np.ones((2, 1)), np.array([4])) is None
    assert intervals(np.array([[1.0, 0.0, 0.0]]), np.array([4, 0, 0])) is None
    assert intervals(np.array([[1.0, 0.0, 2.0]]), np.array([4, 0, 3])) is not None


def tabulate(values: np.ndarray) -> dict[str, dict[int | None, float]]:
    """Convert values [methods, seeds] to the form of the function."""
    return {f"m{index}": dict(enumerate(row.tolist())) for index, row in enumerate(values)}


def test_two_methods_have_the_variances_of_a_paired_test() -> None:
    values = np.array([[1.0, 2.0, 4.0, 3.5], [1.5, 2.1, 4.9, 3.6]])
    found = estimate_seed_variances(tabulate(values), is_moderated=True)
    variance = (values[0] - values[1]).var(ddof=1)
    assert found["m0"].variance + found["m1"].variance == pytest.approx(variance)
    assert {each.degrees_of_freedom for each in found.values()} == {3}


def test_common_effects_of_a_seed_are_removed() -> None:
    noise = np.random.default_rng(0).normal(size=(40, 5))
    plain, shifted = (
        estimate_seed_variances(tabulate(noise + shift), is_moderated=False)
        for shift in (np.zeros(5), np.array([0.0, 30.0, -7.0, 2.0, 100.0]))
    )
    for method in plain:
        assert shifted[method].variance == pytest.approx(plain[method].variance)
    assert np.mean([each.variance for each in plain.values()]) == pytest.approx(1, abs=0.2)


def test_methods_with_one_seed_or_seeds_of_their_own() -> None:
    found = estimate_seed_variances({"one": {1: 2.0}, "own": {2: 1.0, 3: 3.0}, "none": {}}, is_moderated=True)
    assert found == {"own": SeedVariance(2.0, 1)}


def test_the_prior_is_recovered() -> None:
    """Variances drawn around a trend give its degrees of freedom, level and slope."""
    rng = np.random.default_rng(1)
    means = rng.uniform(1, 3, 20_000)
    true = 0.01 * np.exp(2 * means) * 5 / rng.chisquare(5, len(means))
    sampled = true * rng.chisquare(2, len(means)) / 2
    prior_df, (intercept, slope, low, high) = uncertainty._fit_prior(sampled, np.full(len(means), 2.0), means)
    assert prior_df == pytest.approx(5, rel=0.1)
    assert (intercept, slope) == (pytest.approx(math.log(0.01), abs=0.1), pytest.approx(2, abs=0.05))
    assert (low, high) == (means.min(), means.max())


@pytest.mark.parametrize("value", [1e-4, 0.3, 1.0, 20.0, 1e6])
def test_trigamma_is_inverted(value: float) -> None:
    assert special.polygamma(1, uncertainty._invert_trigamma(value)) == pytest.approx(value, rel=1e-6)


def test_moderated_variances_lie_between_their_own_and_the_prior() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=(30, 3)) * np.sqrt(4 / rng.chisquare(4, (30, 1))) * 0.1
    plain, moderated = (estimate_seed_variances(tabulate(values), is_moderated=flag) for flag in (False, True))
    spread = [np.ptp(np.log([each.variance for each in found.values()])) for found in (plain, moderated)]
    assert spread[1] < spread[0]
    assert {each.degrees_of_freedom for each in plain.values()} == {2}
    (degrees,) = {each.degrees_of_freedom for each in moderated.values()}
    assert 2 < degrees <= 60
    few = tabulate(values[: MIN_METHODS - 1])
    assert estimate_seed_variances(few, is_moderated=True) == estimate_seed_variances(few, is_moderated=False)


@pytest.mark.parametrize("kind", ["equal", "unequal", "two groups"])
def test_the_family_wise_error_is_kept(kind: str) -> None:
    """At most 5% (and three standard errors) of 400 tables without a difference show one among all pairs."""
    rng, num_methods, num_seeds, num_tables = np.random.default_rng(3), 12, 3, 400
    wrong = 0
    for _ in range(num_tables):
        variances = {
            "equal": np.full(num_methods, 1e-3),
            "unequal": 4e-3 / rng.chisquare(4, num_methods),
            "two groups": np.where(rng.random(num_methods) < 0.2, 0.1, 1e-3),
        }[kind]
        noise = rng.normal(size=(num_methods, num_seeds)) * np.sqrt(variances)[:, None]
        values = noise + rng.normal(size=num_seeds) * 0.05
        found = estimate_seed_variances(tabulate(values), is_moderated=True)
        own = np.array([each.variance for each in found.values()])
        means = values.mean(axis=1)
        t = abs(means[:, None] - means) / np.sqrt((own[:, None] + own + 1e-300) / num_seeds)
        degrees = min(each.degrees_of_freedom for each in found.values())
        smallest = 2 * stats.t.sf(t.max(), degrees)
        wrong += smallest * num_methods * (num_methods - 1) / 2 < 0.05
    assert wrong <= num_tables * (0.05 + 3 * math.sqrt(0.05 * 0.95 / num_tables))


def test_shared_variances_show_what_three_seeds_alone_cannot() -> None:
    """A method 20% worse than the best of 30, at a deviation of 2%, is found among all pairs."""
    rng = np.random.default_rng(4)
    values = rng.normal(0, 0.02, size=(30, 3))
    values[7] += 0.2
    p_values = {}
    for flag in (False, True):
        found = estimate_seed_variances(tabulate(values), is_moderated=flag)
        variance = (found["m7"].variance + found["m0"].variance) / 3
        t = (values[7].mean() - values[0].mean()) / math.sqrt(variance)
        p_values[flag] = 2 * stats.t.sf(t, found["m7"].degrees_of_freedom) * 435
    assert p_values[True] < 0.05 < p_values[False]


def test_the_detectable_difference_is_found_as_often_as_stated() -> None:
    """80% of simulated t-tests at that difference are significant."""
    rng, num_tables = np.random.default_rng(5), 20_000
    difference = find_detectable_difference(SeedVariance(0.04, 8), 5, 1e-3, 0.8)
    samples = rng.normal(0, 0.2, (2, num_tables, 5))
    samples[1] += difference
    p_values = stats.ttest_ind(samples[0], samples[1], axis=1).pvalue
    assert np.mean(p_values < 1e-3) == pytest.approx(0.8, abs=0.015)

"""Variances over seeds, compared with explicit formulas and with the error rates that they must keep."""

import math

import numpy as np
import pytest
from scipy import special, stats

from megatron.reports import seed_variances
from megatron.reports.seed_variances import (
    MIN_METHODS,
    SeedVariance,
    estimate_seed_variances,
    find_detectable_difference,
)


def tabulate(values: np.ndarray) -> dict[str, dict[int | None, float]]:
    """Convert values [methods, seeds] to the form of the function."""
    return {f"m{index}": dict(enumerate(row.tolist())) for index, row in enumerate(values)}


def test_two_methods_have_the_variances_of_a_paired_test() -> None:
    values = np.array([[1.0, 2.0, 4.0, 3.5], [1.5, 2.1, 4.9, 3.6]])
    found = estimate_seed_variances(tabulate(values), is_moderated=True)
    variance = (values[0] - values[1]).var(ddof=1)
    assert found["m0"].variance + found["m1"].variance == pytest.approx(variance)
    assert {each.degrees_of_freedom for each in found.values()} == {3}


def test_what_a_seed_does_to_all_methods_is_no_variance() -> None:
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


def test_a_prior_is_found_again() -> None:
    """Variances drawn around a trend give its degrees of freedom, level and slope."""
    rng = np.random.default_rng(1)
    means = rng.uniform(1, 3, 20_000)
    true = 0.01 * np.exp(2 * means) * 5 / rng.chisquare(5, len(means))
    sampled = true * rng.chisquare(2, len(means)) / 2
    prior_df, (intercept, slope, low, high) = seed_variances._fit_prior(sampled, np.full(len(means), 2.0), means)
    assert prior_df == pytest.approx(5, rel=0.1)
    assert (intercept, slope) == (pytest.approx(math.log(0.01), abs=0.1), pytest.approx(2, abs=0.05))
    assert (low, high) == (means.min(), means.max())


@pytest.mark.parametrize("value", [1e-4, 0.3, 1.0, 20.0, 1e6])
def test_trigamma_is_inverted(value: float) -> None:
    assert special.polygamma(1, seed_variances._invert_trigamma(value)) == pytest.approx(value, rel=1e-6)


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

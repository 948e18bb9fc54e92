"""Uncertainty of results: over the blocks of a text by the bootstrap, and over seeds by variances that methods share.

Blocks (the targets of a window in `last`) are the independent samples; tokens within a block are not independent. A
resample draws as many blocks as there are, with replacement. Its nll is the mean over all tokens of the drawn blocks:

    nll*(L) = Σ_b sum_b(L) / Σ_b count_b          b over the drawn blocks
    interval of the perplexity                    exp of the 2.5% and 97.5% quantiles of nll*(L)
    interval of the change ppl(L)/ppl(L0)         exp of those of nll*(L) − nll*(L0), the same blocks drawn for both

Every length scores the same targets, so drawing the same blocks pairs the lengths. A block that is hard at every length
accounts for most of the interval of a perplexity, but cancels in the change. The percentile method is due to Efron
(Efron and Tibshirani 1993, An introduction to the bootstrap, chapter 13). K lengths, B blocks.

Three runs determine a variance over seeds poorly: a t-test with two degrees of freedom that is corrected for a hundred
comparisons finds nothing smaller than a factor of several. Methods of one table resemble each other, however, so their
variances are estimated together.

Model of the value x (a logarithm, if the metric is compared by ratios) of method m with seed s:

    x[m, s] = a[m] + b[s] + e[m, s]        e[m, s] normal with variance σ²[m]

b[s] is the effect of a seed on all methods, estimated by the median over methods. A method's residual variance v[m] has
n[m] − 1 degrees of freedom for n[m] seeds. With K methods it is multiplied by K/(K − 1), for the share of e in b. For
two methods this is exactly a paired t-test.

With `MIN_METHODS` or more methods of at least three seeds, their variances are moderated. 1/σ²[m] follows a scaled χ²
distribution with d0 degrees of freedom around a trend s0²(a[m]), log-linear in the mean, since methods whose perplexity
explodes also vary most:

    ṽ[m] = (d0·s0²(a[m]) + (n[m] − 1)·v[m]) / (d0 + n[m] − 1)        with d0 + n[m] − 1 degrees of freedom

(Smyth 2004, Linear models and empirical Bayes methods for assessing differential expression, equations in sections 3
and 6.2; the trend is that of Sartor et al. 2006, Intensity-based hierarchical Bayes method improves testing.)
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

NUM_RESAMPLES = 10_000
CONFIDENCE_LEVEL = 0.95
BOOTSTRAP_SEED = 20_230_917
"""Fixed seed, so that the same losses give the same intervals on every machine."""

MAX_DRAWS_PER_CHUNK = 1 << 22
"""Number of drawn blocks in memory at a time: an int64 and a float64 for each."""


def draw_bootstrap_means(
    block_sums: np.ndarray, block_counts: np.ndarray, *, num_resamples: int = NUM_RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> np.ndarray | None:
    """Draw means over blocks with replacement, using the same blocks in every row.

    Functions of the means of two rows, such as their difference, are therefore paired.

    Args:
        block_sums: summed losses of each block, float64 [K, B].
        block_counts: number of counted tokens in each block, int [B].
        num_resamples: number of resamples.
        seed: random seed.

    Returns:
        float64 [K, resamples], or None if fewer than two blocks have counted tokens, because one sample has no
        variance.
    """
    has_tokens = block_counts > 0  # blocks without tokens would only change the number of draws
    block_sums, block_counts = block_sums[:, has_tokens], block_counts[has_tokens]
    num_blocks = len(block_counts)
    if num_blocks < 2:
        return None
    generator = np.random.Generator(np.random.PCG64(seed))
    means = np.empty((len(block_sums), num_resamples))
    chunk_size = max(1, MAX_DRAWS_PER_CHUNK // num_blocks)
    for start in range(0, num_resamples, chunk_size):
        block_indices = generator.integers(num_blocks, size=(min(chunk_size, num_resamples - start), num_blocks))
        chunk = slice(start, start + len(block_indices))
        for row_means, row_sums in zip(means, block_sums, strict=True):
            row_means[chunk] = row_sums[block_indices].sum(axis=1)
        means[:, chunk] /= block_counts[block_indices].sum(axis=1)
    return means


def draw_bootstrap_curves(
    block_sums: np.ndarray, block_counts: np.ndarray, *, num_resamples: int = 2000, seed: int = BOOTSTRAP_SEED
) -> np.ndarray | None:
    """Draw means for many points at once, each with its own counts, using the same blocks for all points.

    Args:
        block_sums, block_counts: float64 [B, points].

    Returns:
        float64 [resamples, points], or None if there are fewer than two blocks. If no drawn block has a token for a
        point, its value is the mean over all blocks.
    """
    num_blocks = len(block_sums)
    if num_blocks < 2:
        return None
    generator = np.random.Generator(np.random.PCG64(seed))
    overall = block_sums.sum(axis=0) / block_counts.sum(axis=0)
    draws = np.empty((num_resamples, block_sums.shape[1]))
    chunk_size = max(1, MAX_DRAWS_PER_CHUNK // num_blocks)
    for start in range(0, num_resamples, chunk_size):
        # The number of times that each block is drawn determines the sums.
        size = min(chunk_size, num_resamples - start)
        weights = generator.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), size=size).astype(np.float64)
        counts = weights @ block_counts
        means = weights @ block_sums / np.maximum(counts, 1.0)
        draws[start : start + size] = np.where(counts > 0, means, overall)
    return draws


def compute_percentile_interval(samples: np.ndarray) -> tuple[float, float]:
    """Compute the 95% percentile interval of samples [resamples]."""
    low, high = np.quantile(samples, ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2))
    return float(low), float(high)


def build_interval_fields(
    draws: np.ndarray | None, prefix: str = "", transform: Callable[[float], float] = float
) -> dict[str, Any]:
    """Return the fields of a record with the interval of draws: `low` and `high`, after a prefix.

    Args:
        draws: samples [resamples], or None for no fields.
        prefix: beginning of the names.
        transform: function of both ends of the interval.
    """
    if draws is None:
        return {}
    low, high = map(transform, compute_percentile_interval(draws))
    return {f"{prefix}low": low, f"{prefix}high": high}


MIN_METHODS = 10
"""Minimum number of methods with at least `MIN_SEEDS` seeds for a prior of their variances: it has three parameters."""
MIN_SEEDS = 3
"""Minimum number of seeds of a moderated variance. With two, simulated family-wise errors reached 10% instead of 5%."""
SMALLEST_VARIANCE = 1e-24
"""Variance below which runs are equal up to rounding. The prior is estimated without them."""


class SeedVariance(NamedTuple):
    """Variance of a method over seeds."""

    variance: float
    degrees_of_freedom: float


def estimate_seed_variances(
    values: Mapping[str, Mapping[int | None, float]], *, is_moderated: bool
) -> dict[str, SeedVariance]:
    """Estimate the variance over seeds of each method that has at least two.

    Args:
        values: method → seed → value of the run.
        is_moderated: True to share variances between methods. The prior assumes unbounded values, so it does not fit
            accuracies.
    """
    several = {method: dict(runs) for method, runs in values.items() if len(runs) > 1}
    variances = _measure_residual_variances(several)
    unmoderated = {method: SeedVariance(v, len(several[method]) - 1) for method, v in variances.items()}
    moderated = {method: own for method, own in unmoderated.items() if len(several[method]) >= MIN_SEEDS}
    fitted = [method for method, own in moderated.items() if own.variance > SMALLEST_VARIANCE]
    if not is_moderated or len(fitted) < MIN_METHODS:
        return unmoderated
    means = {method: float(np.mean(list(runs.values()))) for method, runs in several.items()}
    prior_df, trend = _fit_prior(
        np.array([variances[method] for method in fitted]),
        np.array([len(several[method]) - 1 for method in fitted], dtype=float),
        np.array([means[method] for method in fitted]),
    )
    max_df = float(sum(own.degrees_of_freedom for own in moderated.values()))
    results = dict(unmoderated)
    for method, own in moderated.items():
        weight = 1.0 if math.isinf(prior_df) else prior_df / (prior_df + own.degrees_of_freedom)
        prior = math.exp(trend[0] + trend[1] * min(max(means[method], trend[2]), trend[3]))
        results[method] = SeedVariance(
            weight * prior + (1 - weight) * own.variance, min(prior_df + own.degrees_of_freedom, max_df)
        )
    return results


def find_detectable_difference(variance: SeedVariance, num_seeds: int, significance: float, power: float) -> float:
    """Compute the smallest difference of two methods that a two-sided t-test finds with a given probability.

    Args:
        variance: variance of either method over seeds.
        num_seeds: number of seeds of each.
        significance: p value below which a difference counts, corrected for the number of tests.
        power: probability of finding the difference.

    Returns:
        The difference, on the scale of the variance.
    """
    from scipy import optimize, stats  # imports slowly (about one second)

    degrees_of_freedom = variance.degrees_of_freedom
    critical = float(stats.t.isf(significance / 2, degrees_of_freedom))

    def find_missing_power(log_noncentrality: float) -> float:
        return float(stats.nct.sf(critical, degrees_of_freedom, math.exp(log_noncentrality))) - power

    noncentrality = math.exp(optimize.brentq(find_missing_power, math.log(1e-3), math.log(100 * critical)))
    return noncentrality * math.sqrt(2 * variance.variance / num_seeds)


def count_seeds_needed(
    deviation: float, difference: float, significance: float, power: float, max_seeds: int
) -> int | None:
    """Count the seeds with which a paired two-sided t-test finds a difference with a given probability.

    Args:
        deviation: standard deviation of the difference over seeds.
        difference: true size of the difference.
        significance: p value below which a difference counts.
        power: probability of finding the difference.
        max_seeds: maximum number of seeds.

    Returns:
        The smallest number of seeds, at least 2, or None if it exceeds `max_seeds`.
    """
    from scipy import stats  # imports slowly (about one second)

    if deviation <= 0:
        return 2 if difference > 0 else None
    for num_seeds in range(2, max_seeds + 1):
        critical = float(stats.t.isf(significance / 2, num_seeds - 1))
        noncentrality = difference / deviation * math.sqrt(num_seeds)
        # The tail on the other side adds to the power only if the power is small.
        if float(stats.nct.sf(critical, num_seeds - 1, noncentrality)) >= power:
            return num_seeds
    return None


def _measure_residual_variances(values: Mapping[str, Mapping[int | None, float]]) -> dict[str, float]:
    """Compute the variance of each method around its mean and the seeds' common effects."""
    centered = {
        method: {seed: value - float(np.mean(list(runs.values()))) for seed, value in runs.items()}
        for method, runs in values.items()
    }
    by_seed: dict[int | None, list[float]] = {}
    for runs in centered.values():
        for seed, value in runs.items():
            by_seed.setdefault(seed, []).append(value)
    medians = {seed: float(np.median(values)) for seed, values in by_seed.items()}
    variances = {}
    for method, runs in centered.items():
        residuals, factors = [], []
        for seed, value in runs.items():
            num_methods = len(by_seed[seed])
            residuals.append(value - (medians[seed] if num_methods > 1 else 0.0))
            factors.append(num_methods / (num_methods - 1) if num_methods > 1 else 1.0)
        deviations = np.array(residuals) - np.mean(residuals)
        variances[method] = float((np.array(factors) * deviations**2).sum() / (len(runs) - 1))
    return variances


def _fit_prior(
    variances: np.ndarray, degrees_of_freedom: np.ndarray, means: np.ndarray
) -> tuple[float, tuple[float, float, float, float]]:
    """Fit the prior of variances [methods] by the moments of their logarithms.

    Returns:
        d0, infinite if the variances differ no more than by chance; and the trend of ln s0², as an intercept, a slope,
        and the range of means within which it is valid.
    """
    from scipy import special  # imports slowly (about one second)

    logs = np.log(variances) - special.digamma(degrees_of_freedom / 2) + np.log(degrees_of_freedom / 2)
    design = np.stack([np.ones_like(means), means], axis=1)
    (intercept, slope), *_ = np.linalg.lstsq(design, logs, rcond=None)
    residuals = logs - design @ np.array([intercept, slope])
    excess = (residuals**2).sum() / (len(logs) - 2) - special.polygamma(1, degrees_of_freedom / 2).mean()
    prior_df = math.inf
    if excess > 0:
        prior_df = 2 * _invert_trigamma(float(excess))
        intercept += float(special.digamma(prior_df / 2) - math.log(prior_df / 2))
    return prior_df, (float(intercept), float(slope), float(means.min()), float(means.max()))


def _invert_trigamma(value: float) -> float:
    """Solve ψ′(x) = value by Newton's method on 1/ψ′, which is nearly linear (Smyth 2004, appendix)."""
    from scipy import special

    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(special.polygamma(1, x))
        step = trigamma * (1 - trigamma / value) / float(special.polygamma(2, x))
        x += step
        if abs(step) < 1e-10 * x:
            break
    return x

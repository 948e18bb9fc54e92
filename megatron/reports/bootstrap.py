"""Percentile bootstrap over blocks of text: confidence intervals of perplexities and of their changes with length.

Blocks (the targets of a window in `last`) are the independent samples; tokens within a block are not independent. A
resample draws as many blocks as there are, with replacement. Its nll is the mean over all tokens of the drawn blocks:

    nll*(L) = Σ_b sum_b(L) / Σ_b count_b          b over the drawn blocks
    interval of the perplexity                    exp of the 2.5% and 97.5% quantiles of nll*(L)
    interval of the change ppl(L)/ppl(L0)         exp of those of nll*(L) − nll*(L0), the same blocks drawn for both

Every length scores the same targets, so drawing the same blocks pairs the lengths. A block that is hard at every length
accounts for most of the interval of a perplexity, but cancels in the change. The percentile method is due to Efron
(Efron and Tibshirani 1993, An introduction to the bootstrap, chapter 13).

K lengths, B blocks.
"""

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

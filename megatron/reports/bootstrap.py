"""Percentile bootstrap over blocks of text: how far a perplexity, and its change with length, could be chance.

Blocks (the windows' targets in `last`) are the independent samples; tokens inside one are not. A resample draws as many
blocks as there are, with replacement, and its nll is the mean over all tokens of the blocks drawn:

    nll*(L) = Σ_b sum_b(L) / Σ_b count_b          b over the drawn blocks
    interval of the perplexity                    exp of the 2.5% and 97.5% quantiles of nll*(L)
    interval of the change ppl(L)/ppl(L0)         exp of those of nll*(L) − nll*(L0), the same blocks drawn for both

Every length scores the same targets, so drawing the same blocks for both pairs them: a block that is hard at every
length, which is most of what a perplexity's own interval is made of, leaves the change alone. The percentile method is
Efron's (Efron and Tibshirani 1993, An introduction to the bootstrap, chapter 13).

K lengths, B blocks.
"""

import numpy as np

NUM_RESAMPLES = 10_000
CONFIDENCE_LEVEL = 0.95
BOOTSTRAP_SEED = 20_230_917
"""Fixed, so that the same losses have the same intervals on every machine."""

MAX_DRAWS_PER_CHUNK = 1 << 22
"""Drawn blocks held at a time: an int64 and a float64 each."""


def draw_bootstrap_means(
    block_sums: np.ndarray, block_counts: np.ndarray, *, num_resamples: int = NUM_RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> np.ndarray | None:
    """Means over blocks that were drawn with replacement, the same blocks in every row.

    What is made of the means of two rows, their difference for example, is therefore paired.

    Args:
        block_sums: summed losses of each block, float64 [K, B].
        block_counts: tokens counted in each block, int [B].
        num_resamples: how many to draw.
        seed: of the draws.

    Returns:
        float64 [K, resamples]; None if fewer than two blocks have a token that counts: one sample says nothing of its
        own scatter.
    """
    has_tokens = block_counts > 0  # the others would change nothing but the number of draws
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
    """The same of many points at once, each of which has its own counts: the same blocks are drawn for all points.

    Args:
        block_sums, block_counts: float64 [B, points].

    Returns:
        float64 [resamples, points]; None for fewer than two blocks. A point of which no drawn block counts a token has
        the mean of all blocks.
    """
    num_blocks = len(block_sums)
    if num_blocks < 2:
        return None
    generator = np.random.Generator(np.random.PCG64(seed))
    overall = block_sums.sum(axis=0) / block_counts.sum(axis=0)
    draws = np.empty((num_resamples, block_sums.shape[1]))
    chunk_size = max(1, MAX_DRAWS_PER_CHUNK // num_blocks)
    for start in range(0, num_resamples, chunk_size):
        # How often each block is drawn, which is all that a sum needs to know.
        size = min(chunk_size, num_resamples - start)
        weights = generator.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), size=size).astype(np.float64)
        counts = weights @ block_counts
        means = weights @ block_sums / np.maximum(counts, 1.0)
        draws[start : start + size] = np.where(counts > 0, means, overall)
    return draws


def compute_percentile_interval(samples: np.ndarray) -> tuple[float, float]:
    """The ends of the 95% interval that draws [resamples] amount to."""
    low, high = np.quantile(samples, ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2))
    return float(low), float(high)

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

RESAMPLES = 10_000
LEVEL = 0.95
SEED = 20_230_917
"""Fixed, so that the same losses have the same intervals on every machine."""

CHUNK = 1 << 22
"""Drawn blocks held at a time: an int64 and a float64 each."""


def resampled(
    sums: np.ndarray, counts: np.ndarray, *, resamples: int = RESAMPLES, seed: int = SEED
) -> np.ndarray | None:
    """Means over blocks that were drawn with replacement, the same blocks in every row.

    What is made of the means of two rows, their difference for example, is therefore paired.

    Args:
        sums: summed losses of each block, float64 [K, B].
        counts: tokens counted in each block, int [B].
        resamples: how many to draw.
        seed: of the draws.

    Returns:
        float64 [K, resamples]; None if fewer than two blocks have a token that counts: one sample says nothing of its
        own scatter.
    """
    with_tokens = counts > 0  # the others would change nothing but the number of draws
    sums, counts = sums[:, with_tokens], counts[with_tokens]
    blocks = len(counts)
    if blocks < 2:
        return None
    generator = np.random.Generator(np.random.PCG64(seed))
    means = np.empty((len(sums), resamples))
    step = max(1, CHUNK // blocks)
    for begin in range(0, resamples, step):
        drawn = generator.integers(blocks, size=(min(step, resamples - begin), blocks))
        taken = slice(begin, begin + len(drawn))
        for row, of_row in zip(means, sums, strict=True):
            row[taken] = of_row[drawn].sum(axis=1)
        means[:, taken] /= counts[drawn].sum(axis=1)
    return means


def quantiles(draws: np.ndarray) -> tuple[float, float]:
    """The ends of the 95% interval that draws [resamples] amount to."""
    low, high = np.quantile(draws, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)

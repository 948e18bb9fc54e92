"""Consecutive tokens of a sequence: their indices, and the positions that an encoding is told.

The two are the same unless positions are randomized. Then T tokens stand at T distinct positions sampled from
0 … limit − 1, in ascending order, so that training on short sequences meets distances up to limit − 1, and only the
order of positions is tied to the text (Ruoss et al. 2023, Randomized positional encodings boost length generalization
of transformers, section 3). All sequences of a batch share one sample. Longer sequences are read with sampled positions
too, as in the paper. A sample follows from its seed alone, so that it can be repeated, and so that all ranks that share
a batch make the same one.

Continuous positions are real numbers, drawn uniformly from 0 … limit − 1 and put in order (2602.14050): then distances
below 1 occur too, and training meets each distance with probability 0, so that nothing is learned of single ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ALL_HEADS = slice(None)
"""The heads of a layer, where a rank holds them all."""


def select_heads(x: Tensor, heads: slice) -> Tensor:
    """Some of the heads, the first dimension of x. All of them are x itself: the gradient of a slice fills a tensor."""
    return x if heads == ALL_HEADS else x[heads]


@dataclass(frozen=True, eq=False)
class SampledPositions:
    """Positions that stand in for the indices 0, 1, … of a sequence's tokens."""

    values: Tensor
    """int64 [T], strictly increasing, in 0 … limit − 1; continuous ones float64, increasing."""
    limit: int

    @property
    def are_continuous(self) -> bool:
        """Are they real numbers?"""
        return self.values.is_floating_point()


def sample_positions(length: int, limit: int, seed: int, *, continuous: bool = False) -> SampledPositions:
    """Positions for `length` tokens.

    Args:
        length: T.
        limit: positions to choose from.
        seed: of the sample.
        continuous: real numbers instead of integers.

    Raises:
        ValueError: there are fewer positions than tokens.
    """
    if length > limit:
        raise ValueError(f"randomized_positions offers {limit} positions, but a sequence of length {length} was given")
    generator = torch.Generator().manual_seed(seed)
    if continuous:
        drawn = torch.rand(length, generator=generator, dtype=torch.float64) * (limit - 1)
    else:
        drawn = torch.randperm(limit, generator=generator)[:length]
    values = drawn.sort().values
    return SampledPositions(values, limit)


@dataclass(frozen=True)
class TokenRange:
    """The tokens with the indices start, start + 1, …, start + length − 1 of a sequence.

    Query rows and key columns are given as ranges, never as the indices of a tensor, so a full forward pass, a block
    of rows and a step of decoding are the same code. Python integers keep them exact and off the device.

    Who may see whom is decided by indices; what a position encoding is told are positions: the indices themselves, or
    the positions sampled for them.
    """

    start: int
    length: int
    sampled: SampledPositions | None = None
    sequence_length: int | None = None
    """Tokens that the sequence will have, where the range may not be its end: in a step of decoding, or a rank's
    chunk."""

    @property
    def is_continuous(self) -> bool:
        """Are its positions real numbers?"""
        return self.sampled is not None and self.sampled.are_continuous

    @property
    def known_length(self) -> int:
        """The length that the sequence reaches, as far as is known."""
        return self.stop if self.sequence_length is None else self.sequence_length

    @property
    def reach(self) -> int:
        """A bound of the positions of all tokens that the sequence has or will have: the same in each step of
        decoding."""
        if self.sampled is None:
            return self.known_length
        return max(self.sampled.limit, self.sequence_length or 0)

    @property
    def stop(self) -> int:
        """The first index after the range."""
        return self.start + self.length

    @property
    def position_limit(self) -> int:
        """All positions of the range are smaller."""
        return self.stop if self.sampled is None else self.sampled.limit

    def indices(self, device: torch.device | str | None = None) -> Tensor:
        """The indices as int64 [length]."""
        return torch.arange(self.start, self.stop, device=device)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """The positions as int64 [length]; continuous ones as float64."""
        if self.sampled is None:
            return self.indices(device)
        return self.sampled.values[self.start : self.stop].to(device)


def count_distances(query: TokenRange, key: TokenRange) -> int:
    """The number of distances n = i − j ≥ 0 that a table must hold for these rows and columns."""
    return max(query.position_limit - (key.start if key.sampled is None else 0), 1)


def causal_mask(
    query: TokenRange, key: TokenRange, device: torch.device | str | None = None, window: int | None = None
) -> Tensor:
    """Bool [R, C]: may the query row see the key column? With a window, only the last `window` keys, its own too."""
    distance = query.indices(device)[:, None] - key.indices(device)[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)

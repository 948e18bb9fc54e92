"""Ranges of consecutive tokens: their indices, and the positions that an encoding receives.

The two are the same unless positions are randomized. Then T tokens get T distinct positions sampled from 0 … limit − 1
in ascending order. Training on short sequences thus covers distances up to limit − 1, and only the order of positions
is tied to the text (Ruoss et al. 2023, Randomized positional encodings boost length generalization of transformers,
section 3). All sequences of a batch share one sample. Longer sequences are read with sampled positions too, as in the
paper. A sample depends only on its seed, so it is reproducible and identical on all ranks that share a batch.

Continuous positions are real numbers, drawn uniformly from 0 … limit − 1 and sorted (2602.14050). Distances below 1
occur too, and any single distance has probability 0, so the model cannot learn values for single distances.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ALL_HEADS = slice(None)
"""All heads of a layer, on a rank that has them all."""


def select_heads(x: Tensor, heads: slice) -> Tensor:
    """Select heads, the first dimension of x.

    Returns x itself for all heads, because the gradient of a slice fills a tensor.
    """
    return x if heads == ALL_HEADS else x[heads]


@dataclass(frozen=True, eq=False)
class SampledPositions:
    """Positions that replace the indices 0, 1, … of the tokens of a sequence."""

    values: Tensor
    """int64 [T], strictly increasing, in 0 … limit − 1; float64, increasing, if continuous."""
    limit: int

    @property
    def are_continuous(self) -> bool:
        """True if positions are real numbers."""
        return self.values.is_floating_point()


def sample_positions(length: int, limit: int, seed: int, *, continuous: bool = False) -> SampledPositions:
    """Sample positions for `length` tokens.

    Args:
        length: T.
        limit: number of positions to sample from.
        seed: seed of the sample.
        continuous: sample real numbers instead of integers.

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
    """Tokens with the indices start, start + 1, …, start + length − 1 of a sequence.

    Query rows and key columns are given as ranges, never as index tensors, so that a full forward pass, a row block
    and a decoding step use the same code. Python integers are exact and need no device memory.

    Indices determine which keys a row sees. Position encodings receive positions: the indices, or the positions sampled
    for them.
    """

    start: int
    length: int
    sampled: SampledPositions | None = None
    sequence_length: int | None = None
    """Final length of the sequence in tokens, if the range may end before it: in a decoding step, or in the chunk of a
    rank."""

    @property
    def is_continuous(self) -> bool:
        """True if the positions are real numbers."""
        return self.sampled is not None and self.sampled.are_continuous

    @property
    def known_length(self) -> int:
        """Final length of the sequence in tokens, or the end of the range if it is unknown."""
        return self.stop if self.sequence_length is None else self.sequence_length

    @property
    def position_bound(self) -> int:
        """Bound of the positions of all present and future tokens of the sequence, the same in every decoding step."""
        if self.sampled is None:
            return self.known_length
        return max(self.sampled.limit, self.sequence_length or 0)

    @property
    def stop(self) -> int:
        """First index after the range."""
        return self.start + self.length

    @property
    def position_limit(self) -> int:
        """Exclusive upper bound of the positions in the range."""
        return self.stop if self.sampled is None else self.sampled.limit

    def indices(self, device: torch.device | str | None = None) -> Tensor:
        """Return the indices as int64 [length]."""
        return torch.arange(self.start, self.stop, device=device)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return the positions as int64 [length], or float64 if continuous."""
        if self.sampled is None:
            return self.indices(device)
        return self.sampled.values[self.start : self.stop].to(device)


def count_distances(query: TokenRange, key: TokenRange) -> int:
    """Return the number of distances n = i − j ≥ 0 that a table needs for these rows and columns."""
    return max(query.position_limit - (key.start if key.sampled is None else 0), 1)


def build_causal_mask(
    query: TokenRange, key: TokenRange, device: torch.device | str | None = None, window: int | None = None
) -> Tensor:
    """Return the causal mask, bool [R, C]: True if the row sees the key.

    With a window, a row sees only the last `window` keys, including its own.
    """
    distance = query.indices(device)[:, None] - key.indices(device)[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)

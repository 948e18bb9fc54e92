"""Randomized positions: a short training sequence meets the positions of long ones.

T tokens stand at T distinct positions drawn from 0 … limit − 1, in ascending order: training meets distances up to
limit − 1, and only the order of positions is tied to the text (Ruoss et al. 2023, Randomized positional encodings boost
length generalization of transformers, section 3). All sequences of a batch share one draw. Longer sequences are read
with drawn positions too, as in the paper. A draw follows from its seed alone, so that it can be repeated, and so that
all ranks that share a batch make the same one.
"""

import torch

from .shape import SampledPositions


def sample_positions(length: int, limit: int, seed: int) -> SampledPositions:
    """Positions for `length` tokens.

    Args:
        length: T.
        limit: positions to choose from.
        seed: of the draw.

    Raises:
        ValueError: there are fewer positions than tokens.
    """
    if length > limit:
        raise ValueError(f"randomized_positions offers {limit} positions, but a sequence of length {length} was given")
    values = torch.randperm(limit, generator=torch.Generator().manual_seed(seed))[:length].sort().values
    return SampledPositions(values, limit)

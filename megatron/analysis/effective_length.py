"""KERPLE's effective length of a head: the least distance at which its bias is below −2 (Chi et al. 2022, A.5).

e^−2 = 0.135, so that a key there counts for about a seventh of one at hand with the same score. It is defined for
biases that never rise with the distance; what is asked of others has no answer.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.analysis.bias import compute_terms, to_float64
from megatron.position.encoding import Encoding

THRESHOLD = -2.0
FAR = 20_480
"""Where KERPLE's figure ends."""
MAX_DISTANCE = 2**53


@torch.no_grad()
def compute_effective_lengths(encoding: Encoding, window: int | None = None) -> list[float | None]:
    """Of each head: a whole number, infinite if the bias stays above −2 at every distance up to 2^53, or None if it
    rises somewhere up to 20,480, or is no function of the distance.

    Args:
        encoding: as the model has it.
        window: every token sees the last `window` keys only, as if the bias were −∞ from that distance on.
    """
    most = math.inf if window is None else window
    if not encoding.adds_bias:
        return [most] * encoding.dims.num_heads
    if not type(encoding).overrides_hook("table"):
        return [None] * encoding.dims.num_heads
    double = to_float64(encoding)

    def bias(distances: Tensor) -> Tensor:
        found = compute_terms(double, distances).bias
        assert found is not None
        return found

    near = bias(torch.arange(FAR + 1, dtype=torch.float64))
    falls = (near.diff(dim=-1) <= 0).all(-1).tolist()
    heads = len(falls)
    low = torch.full((heads,), -1.0, dtype=torch.float64)  # the bias is not below −2 here, nor before
    high = torch.full((heads,), float(MAX_DISTANCE), dtype=torch.float64)
    own = torch.arange(heads)
    reached = bias(high)[own, own] < THRESHOLD
    while bool((high - low > 1).any()):
        middle = ((low + high) / 2).floor()
        below = bias(middle)[own, own] < THRESHOLD
        low, high = torch.where(below, low, middle), torch.where(below, middle, high)
    return [
        None if not fall else min(length, most) if reach else most
        for fall, reach, length in zip(falls, reached.tolist(), high.tolist(), strict=True)
    ]


def accumulate_by_length(lengths: Sequence[float], far: int = FAR) -> list[tuple[int, int]]:
    """KERPLE's curve, #{heads : effective length ≤ x}, as (x, heads) at 0, wherever it rises, and at `far`."""
    within = sorted(length for length in lengths if length <= far)
    rises = [(int(length), sum(each <= length for each in within)) for length in dict.fromkeys(within)]
    return [*([] if rises and rises[0][0] == 0 else [(0, 0)]), *rises, (far, len(within))]

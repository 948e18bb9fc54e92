"""ALiBi: a fixed linear penalty on distance, with a slope for each head."""

import math
from functools import cache

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import EncodingCost
from megatron.position.series_tails import SeriesTail, exponential_tail


def compute_slopes(num_heads: int) -> list[float]:
    """Return the slopes m_h for h = 1 … H, by the rule of the released code.

    They are 2^(−8h/H) if H is a power of two. Otherwise they are the slopes of the power of two P below H, followed by
    the 1st, 3rd, 5th … slope of 2P heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    result = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return result + between[: num_heads - power]


@cache
def cache_slopes(num_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the slopes on a device, cached. Do not modify the result."""
    with torch.inference_mode(False):
        return torch.tensor(compute_slopes(num_heads), dtype=dtype, device=device)


class Alibi(Encoding):
    formula = "−m_h·n, m_h = 2^(−8h/P) for h ≤ P = 2^⌊log₂ H⌋, and 2^(−4·(2(h − P) − 1)/P) beyond"
    source = "Press et al. 2022, section 3; released code for numbers of heads that are not a power of two"
    advice = (
        "Use it only if necessary, because it soon becomes local attention as the sequence grows (DAPE V2, appendix "
        "A). Its perplexity stays flat beyond the training length. There kerple_log has a lower perplexity in KERPLE's "
        "table 3. In DAPE V2's table 2 kerple_log is better at twice the training length (4.09, alibi 4.53) and worse "
        "at eight times (6.95, alibi 4.22)."
    )
    other_names = ("linear_bias", "linear_biases")
    adds_bias = True
    cost = EncodingCost()

    def table(self, distances: Tensor) -> ScoreTerms:
        m = cache_slopes(self.dims.num_heads, torch.float32, distances.device)
        return ScoreTerms(bias=-m[:, None] * distances)

    def bias_tails(self) -> list[SeriesTail]:
        return [exponential_tail(m) for m in compute_slopes(self.dims.num_heads)]

"""A bias whose exponentials 1/(n + 1)² form a convergent series, so the model extrapolates."""

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.encodings.alibi import cache_slopes, compute_slopes
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.series_tails import SeriesTail, power_tail


class ExploringType1(Encoding):
    formula = "−2·ln(n + 1) (released: −ln(1 + (m·n)²), m ALiBi's slopes)"
    source = (
        "Exploring Transformer Extrapolation: Qin et al. 2023, section 3.4, Type 1; `released` is the bias that its "
        "authors' fairseq trains"
    )
    advice = (
        "A fixed bias that is guaranteed to extrapolate, with a longer reach than type2. It is about as good as alibi, "
        "and close to kerple_log (Exploring Transformer Extrapolation, section 4, tables 4 and 5)."
    )
    adds_bias = True
    cost = EncodingCost()

    def __init__(self, dims: AttentionDims, *, released: bool = False) -> None:
        """
        Args:
            released: use the bias that the authors' fairseq trains, in which each head multiplies distances by its
                ALiBi slope.
        """
        super().__init__(dims)
        self.released = released

    def table(self, distances: Tensor) -> ScoreTerms:
        if self.released:
            n = distances * cache_slopes(self.dims.num_heads, torch.float32, distances.device)[:, None]
            return ScoreTerms(bias=-torch.log1p(n.square()))
        bias = -2 * torch.log1p(distances)
        return ScoreTerms(bias=bias.expand(self.dims.num_heads, -1))

    def bias_tails(self) -> list[SeriesTail]:
        if self.released:
            return [power_tail(1.0, m**2, 2.0) for m in compute_slopes(self.dims.num_heads)]
        return [power_tail(2.0)] * self.dims.num_heads

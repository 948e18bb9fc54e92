"""A bias whose exponentials 1/(n + 1) form a divergent series, a counterexample to the convergent ones."""

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.encodings.alibi import cache_slopes, compute_slopes
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.series_tails import SeriesTail, power_tail


class Inverse(Encoding):
    formula = "−ln(n + 1) (released: −ln(1 + m·n), m ALiBi's slopes)"
    source = (
        "Exploring Transformer Extrapolation: Qin et al. 2023, section 4, the diverging example 1/n; `released` is the "
        "bias that its authors' fairseq trains"
    )
    advice = (
        "A counterexample: it favors near tokens, yet its perplexity grows (24.7 at the training length of 512 "
        "tokens, 58.5 at 9,216, on WikiText-103; Exploring Transformer Extrapolation, table 6)."
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
            return ScoreTerms(bias=-torch.log1p(n))
        bias = -torch.log1p(distances)
        return ScoreTerms(bias=bias.expand(self.dims.num_heads, -1))

    def bias_tails(self) -> list[SeriesTail]:
        if self.released:
            return [power_tail(1.0, m) for m in compute_slopes(self.dims.num_heads)]
        return [power_tail(1.0)] * self.dims.num_heads

"""A bias whose exponentials exp(−ln²(n + 1)) form a series that converges faster than type1's, with a shorter reach."""

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.encodings.alibi import compute_slopes
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.series_tails import SeriesTail, squared_log_tail


class ExploringType2(Encoding):
    formula = "−ln²(n + 1) (released: −ln²(3 + m·n), m ALiBi's slopes)"
    source = (
        "Exploring Transformer Extrapolation: Qin et al. 2023, section 3.4, Type 2; `released` is the bias that its "
        "authors' fairseq trains"
    )
    advice = (
        "A fixed bias that is guaranteed to extrapolate, with a shorter reach than type1. type1 is never worse "
        "(Exploring Transformer Extrapolation, section 3.4, tables 4 and 5)."
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
            n = distances * torch.tensor(compute_slopes(self.dims.num_heads), device=distances.device)[:, None]
            return ScoreTerms(bias=-torch.log(3 + n).square())
        bias = -torch.log1p(distances).square()
        return ScoreTerms(bias=bias.expand(self.dims.num_heads, -1))

    def bias_tails(self) -> list[SeriesTail]:
        if self.released:
            return [squared_log_tail(m, 3.0) for m in compute_slopes(self.dims.num_heads)]
        return [squared_log_tail()] * self.dims.num_heads

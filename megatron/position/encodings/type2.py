"""A bias whose exponentials exp(−ln²(n + 1)) form a series that converges faster than type1's: it looks less far."""

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import EncodingCost
from megatron.position.series_tails import SeriesTail, squared_log_tail


class Type2(Encoding):
    formula = "−ln²(n + 1)"
    source = "Exploring Transformer Extrapolation: Qin et al. 2023, section 3.4, Type 2"
    advice = (
        "A fixed bias that is sure to extrapolate and looks less far than type1, which is never worse (Exploring "
        "Transformer Extrapolation, section 3.4, tables 4 and 5)."
    )
    adds_bias = True
    cost = EncodingCost()

    def table(self, distances: Tensor) -> ScoreTerms:
        bias = -torch.log1p(distances).square()
        return ScoreTerms(bias=bias.expand(self.dims.num_heads, -1))

    def bias_tails(self) -> list[SeriesTail]:
        return [squared_log_tail()] * self.dims.num_heads

"""A bias whose exponentials 1/(n + 1)² form a series that converges, so the model extrapolates."""

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import EncodingCost
from megatron.position.series_tails import SeriesTail, power_tail


class Type1(Encoding):
    formula = "−2·ln(n + 1)"
    source = "Exploring Transformer Extrapolation: Qin et al. 2023, section 3.4, Type 1"
    advice = (
        "A fixed bias that is sure to extrapolate and looks further than type2: about as good as alibi, close to "
        "kerple_log (Exploring Transformer Extrapolation, section 4, tables 4 and 5)."
    )
    adds_bias = True
    cost = EncodingCost()

    def table(self, distances: Tensor) -> ScoreTerms:
        bias = -2 * torch.log1p(distances)
        return ScoreTerms(bias=bias.expand(self.dims.num_heads, -1))

    def bias_tails(self) -> list[SeriesTail]:
        return [power_tail(2.0)] * self.dims.num_heads

"""A bias whose exponentials 1/((n + 2)·ln(n + 2)) form a series that barely diverges: no extrapolation."""

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import EncodingCost
from megatron.position.series_tails import SeriesTail


class InverseNLogN(Encoding):
    formula = "−ln((n + 2)·ln(n + 2))"
    source = "Exploring Transformer Extrapolation: Qin et al. 2023, section 4, the diverging example 1/(n ln n)"
    advice = (
        "A counter-example: its series only just diverges, and its perplexity grows more slowly than inverse's (24.6 "
        "at the training length of 512 tokens, 27.6 at 9,216, on WikiText-103; Exploring Transformer Extrapolation, "
        "table 6)."
    )
    adds_bias = True
    cost = EncodingCost()

    def table(self, distances: Tensor) -> ScoreTerms:
        bias = -torch.log((distances + 2) * torch.log(distances + 2))
        return ScoreTerms(bias=bias.expand(self.dims.num_heads, -1))

    def bias_tails(self) -> list[SeriesTail]:
        tail = SeriesTail(False, "b = 1/((n + 2)·ln(n + 2)), whose sum to n grows as ln ln n, without end")
        return [tail] * self.dims.num_heads

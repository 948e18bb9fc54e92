"""A bias whose exponentials 1/(n + 1) form a series that diverges, so the model does not extrapolate."""

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..tails import Tail, power


class Inverse(Encoding):
    formula = "−ln(n + 1)"
    source = "Exploring Transformer Extrapolation: Qin et al. 2023, section 4, the diverging example 1/n"
    advice = (
        "A counter-example: it favours near tokens, yet its perplexity grows (24.7 at the training length of 512 "
        "tokens, 58.5 at 9,216, on WikiText-103; Exploring Transformer Extrapolation, table 6)."
    )

    def table(self, distances: Tensor) -> Terms:
        bias = -torch.log1p(distances)
        return Terms(bias=bias.expand(self.shape.num_heads, -1))

    def tails(self) -> list[Tail]:
        return [power(1.0)] * self.shape.num_heads

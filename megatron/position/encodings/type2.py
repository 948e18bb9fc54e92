"""A bias whose exponentials exp(−ln²(n + 1)) form a series that converges faster than type1's: it looks less far."""

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..tails import Tail, squared_logarithm


class Type2(Encoding):
    formula = "−ln²(n + 1)"
    source = "Exploring Transformer Extrapolation: Qin et al. 2023, section 3.4, Type 2"
    advice = (
        "A fixed bias that is sure to extrapolate and looks less far than type1, which is never worse (Exploring "
        "Transformer Extrapolation, section 3.4, tables 4 and 5)."
    )

    def table(self, distances: Tensor) -> Terms:
        bias = -torch.log1p(distances).square()
        return Terms(bias=bias.expand(self.shape.num_heads, -1))

    def tails(self) -> list[Tail]:
        return [squared_logarithm()] * self.shape.num_heads

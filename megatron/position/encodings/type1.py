"""A bias whose exponentials 1/(n + 1)² form a series that converges, so the model extrapolates."""

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..tails import Tail, power


class Type1(Encoding):
    formula = "−2·ln(n + 1)"
    source = "Exploring Transformer Extrapolation: Qin et al. 2023, section 3.4, Type 1"
    advice = (
        "A fixed bias that is sure to extrapolate and looks further than type2: about as good as alibi, close to "
        "kerple_log (Exploring Transformer Extrapolation, section 4, tables 4 and 5)."
    )

    def table(self, distances: Tensor) -> Terms:
        bias = -2 * torch.log1p(distances)
        return Terms(bias=bias.expand(self.shape.num_heads, -1))

    def tails(self) -> list[Tail]:
        return [power(2.0)] * self.shape.num_heads

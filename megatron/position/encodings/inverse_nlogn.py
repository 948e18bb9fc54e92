"""The series Σ 1/(n ln n) as a bias: it diverges, if barely, and the model does not extrapolate."""

import torch
from torch import Tensor

from ..encoding import Encoding, Terms


class InverseNLogN(Encoding):
    formula = "−ln((n + 2)·ln(n + 2))"
    source = "Exploring Transformer Extrapolation: Qin et al. 2023, section 4, the diverging example 1/(n ln n)"
    advice = (
        "A counter-example: it only just diverges, and perplexity grows more slowly than inverse's (24.6 at 512 "
        "tokens, 27.6 at 9,216; Exploring Transformer Extrapolation, table 6)."
    )

    def table(self, distances: Tensor) -> Terms:
        bias = -torch.log((distances + 2) * torch.log(distances + 2))
        return Terms(bias=bias.expand(self.shape.num_heads, -1))

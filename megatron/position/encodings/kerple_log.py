"""KERPLE's logarithmic kernel, its best: a learned penalty that flattens with distance."""

import math

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import Bounded, uniform
from ..shape import Shape


class KerpleLog(Encoding):
    formula = "−r1·log(1 + r2·n)"
    parameters_text = "r1 [H] ~ U(0, 2) ≥ 0.01; r2 [H] ~ U(0, 1) ≥ 0.01"
    source = "KERPLE: Chi et al. 2022, section 4, logarithmic variant; start values of its released code"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.r1 = Bounded((shape.num_heads,), uniform(0, 2), low=1e-2, high=math.inf)
        self.r2 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)

    def table(self, distances: Tensor) -> Terms:
        r1, r2 = self.r1()[:, None], self.r2()[:, None]
        return Terms(bias=-r1 * torch.log1p(r2 * distances))

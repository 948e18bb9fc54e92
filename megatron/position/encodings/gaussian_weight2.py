"""Scores multiplied by a generalised Gaussian of the distance."""

import math

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import Bounded, uniform
from ..powers import power
from ..shape import Shape


class GaussianWeight2(Encoding):
    formula = "q·k/√d·exp(−r1·n^r2)"
    parameters_text = "r1 [H] ~ U(0, 1) ≥ 0.01; r2 [H] ~ U(0, 2) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 2-para-wht"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.r1 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)
        self.r2 = Bounded((shape.num_heads,), uniform(0, 2), low=1e-2, high=2.0)

    def table(self, distances: Tensor) -> Terms:
        return Terms(weight=torch.exp(-self.r1()[:, None] * power(distances, self.r2()[:, None])))

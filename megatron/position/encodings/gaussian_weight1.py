"""Scores multiplied by a Gaussian of the distance."""

import math

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import Bounded, uniform
from ..shape import Shape


class GaussianWeight1(Encoding):
    formula = "q·k/√d·exp(−r1·n²)"
    parameters_text = "r1 [H] ~ U(0, 1) ≥ 0.01"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 1-para-wht"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.r1 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)

    def table(self, distances: Tensor) -> Terms:
        return Terms(weight=torch.exp(-self.r1()[:, None] * distances.square()))

"""A Gaussian bump added to the scores; it flattens to zero, so far tokens keep their full weight."""

import math

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import Bounded, uniform
from ..shape import Shape


class GaussianBias2(Encoding):
    formula = "+r1·exp(−r2·n²)"
    parameters_text = "r1 [H] ~ U(0, 1) ≥ 0.01; r2 [H] ~ U(0, 1) ≥ 0.01"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 2-para-bias"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.r1 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)
        self.r2 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)

    def table(self, distances: Tensor) -> Terms:
        return Terms(bias=self.r1()[:, None] * torch.exp(-self.r2()[:, None] * distances.square()))

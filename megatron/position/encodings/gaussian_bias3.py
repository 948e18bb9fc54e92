"""A generalised Gaussian bump added to the scores."""

import math

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import Bounded, uniform
from ..powers import power
from ..shape import Shape


class GaussianBias3(Encoding):
    formula = "+r1·exp(−r2·n^r3)"
    parameters_text = "r1 [H] ~ U(0, 1) ≥ 0.01; r2 [H] ~ U(0, 1) ≥ 0.01; r3 [H] ~ U(0, 2) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 3-para-bias"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.r1 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)
        self.r2 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)
        self.r3 = Bounded((shape.num_heads,), uniform(0, 2), low=1e-2, high=2.0)

    def table(self, distances: Tensor) -> Terms:
        r1, r2, r3 = (r()[:, None] for r in (self.r1, self.r2, self.r3))
        return Terms(bias=r1 * torch.exp(-r2 * power(distances, r3)))

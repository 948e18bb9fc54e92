"""KERPLE's three-parameter logarithmic kernel: the distance has a learned exponent inside the logarithm."""

import math

import torch
from torch import Tensor, nn

from ..encoding import Encoding, Terms
from ..parameters import Bounded, uniform
from ..powers import power
from ..shape import Shape


class KerpleLog3(Encoding):
    formula = "−r1·log(1 + r2·n^r3)"
    parameters_text = "r1 [H] ~ U(0, 2) ≥ 0.01; r2 [H] ~ U(0, 1) ≥ 0.01; r3 [H] = 1 in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, section 5.3, 3-para-log"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.r1 = Bounded((shape.num_heads,), uniform(0, 2), low=1e-2, high=math.inf)
        self.r2 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)
        self.r3 = Bounded((shape.num_heads,), nn.init.ones_, low=1e-2, high=2.0)

    def table(self, distances: Tensor) -> Terms:
        r1, r2, r3 = (r()[:, None] for r in (self.r1, self.r2, self.r3))
        return Terms(bias=-r1 * torch.log1p(r2 * power(distances, r3)))

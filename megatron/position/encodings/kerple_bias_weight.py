"""KERPLE's composite kernel: a power bias, and scores that fade with distance."""

import math

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import Bounded, uniform
from ..powers import power
from ..shape import Shape


class KerpleBiasWeight(Encoding):
    formula = "q·k/√d·exp(−r3·n^r4) − r1·n^r2"
    parameters_text = "r1, r3 [H] ~ U(0, 1) ≥ 0.01; r2, r4 [H] ~ U(0, 2) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, section 5.3, bias+wht"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.r1 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)
        self.r2 = Bounded((shape.num_heads,), uniform(0, 2), low=1e-2, high=2.0)
        self.r3 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)
        self.r4 = Bounded((shape.num_heads,), uniform(0, 2), low=1e-2, high=2.0)

    def table(self, distances: Tensor) -> Terms:
        r1, r2, r3, r4 = (r()[:, None] for r in (self.r1, self.r2, self.r3, self.r4))
        weight = torch.exp(-r3 * power(distances, r4))
        return Terms(bias=-r1 * power(distances, r2), weight=weight)

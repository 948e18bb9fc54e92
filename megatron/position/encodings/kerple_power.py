"""KERPLE's power kernel: ALiBi with learned slope and exponent."""

import math

from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import Bounded, uniform
from ..powers import power
from ..shape import Shape


class KerplePower(Encoding):
    formula = "−r1·n^r2"
    parameters_text = "r1 [H] ~ U(0, 1) ≥ 0.01; r2 [H] ~ U(0, 2) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, section 4, power variant; start values of its released code"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.r1 = Bounded((shape.num_heads,), uniform(0, 1), low=1e-2, high=math.inf)
        self.r2 = Bounded((shape.num_heads,), uniform(0, 2), low=1e-2, high=2.0)

    def table(self, distances: Tensor) -> Terms:
        return Terms(bias=-self.r1()[:, None] * power(distances, self.r2()[:, None]))

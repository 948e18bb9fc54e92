"""A Gaussian bump with a learned exponent in place of the square, added to the scores."""

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import per_head
from ..powers import power
from ..shape import Shape
from ..tails import Tail, level


class GaussianBias3(Encoding):
    formula = "+r1·exp(−r2·n^r3)"
    parameters_text = "r1, r2 [H] ~ U(0, r*_below) ≥ 0.01; r3 [H] ~ U(0, r3_below) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 3-para-bias"
    advice = (
        "For comparison: perplexity explodes past the training length (26 at 512 tokens, 189,216 at 8,192 on "
        "OpenWebText2; KERPLE, table 6)."
    )

    def __init__(self, shape: Shape, *, r1_below: float = 1.0, r2_below: float = 1.0, r3_below: float = 2.0) -> None:
        super().__init__(shape)
        self.r1 = per_head("r1_below", shape.num_heads, r1_below)
        self.r2 = per_head("r2_below", shape.num_heads, r2_below)
        self.r3 = per_head("r3_below", shape.num_heads, r3_below, high=2.0)

    def table(self, distances: Tensor) -> Terms:
        r1, r2, r3 = (r()[:, None] for r in (self.r1, self.r2, self.r3))
        return Terms(bias=r1 * torch.exp(-r2 * power(distances, r3)))

    def tails(self) -> list[Tail]:
        return [level(1.0, "the bias flattens to 0")] * self.shape.num_heads

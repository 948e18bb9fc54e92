"""A Gaussian bump added to the scores; it flattens to zero, so far tokens keep their full weight."""

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import per_head
from ..shape import Shape
from ..tails import Tail, level


class GaussianBias2(Encoding):
    formula = "+r1·exp(−r2·n²)"
    parameters_text = "r1 [H] ~ U(0, r1_below) ≥ 0.01; r2 [H] ~ U(0, r2_below) ≥ 0.01"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 2-para-bias"
    advice = (
        "For comparison: it does not extrapolate (perplexity 58 at 512 tokens, 10,829 at 8,192 on "
        "OpenWebText2; KERPLE, table 6). The Gaussian serves better as a weight (KERPLE, appendix A.3)."
    )

    def __init__(self, shape: Shape, *, r1_below: float = 1.0, r2_below: float = 1.0) -> None:
        super().__init__(shape)
        self.r1 = per_head("r1_below", shape.num_heads, r1_below)
        self.r2 = per_head("r2_below", shape.num_heads, r2_below)

    def table(self, distances: Tensor) -> Terms:
        return Terms(bias=self.r1()[:, None] * torch.exp(-self.r2()[:, None] * distances.square()))

    def tails(self) -> list[Tail]:
        return [level(1.0, "the bias flattens to 0")] * self.shape.num_heads

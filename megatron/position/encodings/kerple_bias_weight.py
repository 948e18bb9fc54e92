"""KERPLE's composite kernel: a power bias, and scores that fade with distance."""

import torch
from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import per_head
from ..powers import power
from ..shape import Shape
from ..tails import Tail, exponential


class KerpleBiasWeight(Encoding):
    formula = "q·k/√d·exp(−r3·n^r4) − r1·n^r2"
    parameters_text = "r1, r3 [H] ~ U(0, r*_below) ≥ 0.01; r2, r4 [H] ~ U(0, r*_below) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, section 5.3, bias+wht"
    advice = (
        "For comparison: more parameters and lower speed than kerple_log without an advantage in extrapolation "
        "(KERPLE, sections 4 and 5.3)."
    )

    def __init__(
        self,
        shape: Shape,
        *,
        r1_below: float = 1.0,
        r2_below: float = 2.0,
        r3_below: float = 1.0,
        r4_below: float = 2.0,
    ) -> None:
        super().__init__(shape)
        self.r1 = per_head("r1_below", shape.num_heads, r1_below)
        self.r2 = per_head("r2_below", shape.num_heads, r2_below, high=2.0)
        self.r3 = per_head("r3_below", shape.num_heads, r3_below)
        self.r4 = per_head("r4_below", shape.num_heads, r4_below, high=2.0)

    def table(self, distances: Tensor) -> Terms:
        r1, r2, r3, r4 = (r()[:, None] for r in (self.r1, self.r2, self.r3, self.r4))
        weight = torch.exp(-r3 * power(distances, r4))
        return Terms(bias=-r1 * power(distances, r2), weight=weight)

    def tails(self) -> list[Tail]:
        # The weight is at most 1: scores stay bounded, which is all that the theorem asks of them.
        return [exponential(r1, r2) for r1, r2 in zip(self.r1().tolist(), self.r2().tolist(), strict=True)]

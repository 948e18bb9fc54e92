"""KERPLE's power kernel: ALiBi with learned slope and exponent."""

from torch import Tensor

from ..encoding import Encoding, Terms
from ..parameters import per_head
from ..powers import power
from ..shape import Shape
from ..tails import Tail, exponential


class KerplePower(Encoding):
    formula = "−r1·n^r2"
    parameters_text = "r1 [H] ~ U(0, r1_below) ≥ 0.01; r2 [H] ~ U(0, r2_below) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, section 4, power variant; start values of its released code"
    advice = (
        "For comparison: kerple_log is faster and has the lower perplexity at all lengths (KERPLE, section 5.2). The "
        "learned curves of kerple_power soon reach very negative values, as ALiBi's do, so far tokens count for little "
        "(KERPLE, section 5.4)."
    )

    def __init__(self, shape: Shape, *, r1_below: float = 1.0, r2_below: float = 2.0) -> None:
        super().__init__(shape)
        self.r1 = per_head("r1_below", shape.num_heads, r1_below)
        self.r2 = per_head("r2_below", shape.num_heads, r2_below, high=2.0)

    def table(self, distances: Tensor) -> Terms:
        return Terms(bias=-self.r1()[:, None] * power(distances, self.r2()[:, None]))

    def tails(self) -> list[Tail]:
        return [exponential(r1, r2) for r1, r2 in zip(self.r1().tolist(), self.r2().tolist(), strict=True)]

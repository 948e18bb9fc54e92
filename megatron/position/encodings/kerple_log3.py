"""KERPLE's three-parameter logarithmic kernel: the distance has a learned exponent inside the logarithm."""

import torch
from torch import Tensor

from megatron.position.bounded_parameter import BoundedParameter, build_per_head_parameter, init_constant
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.numerics import pow_with_finite_gradient
from megatron.position.series_tails import SeriesTail, power_tail


class KerpleLog3(Encoding):
    formula = "−r1·log(1 + r2·n^r3)"
    parameters_summary = (
        "r1 [H] ~ U(0, r1_below) ≥ 0.01; r2 [H] ~ U(0, r2_below) ≥ 0.01; r3 [H] = r3_start in [0.01, 2]"
    )
    source = "KERPLE: Chi et al. 2022, section 5.3, 3-para-log"
    advice = (
        "For comparison: its perplexity is slightly lower than kerple_log's, but it is slower, so it has no clear "
        "advantage (KERPLE, sections 4 and 5.3)."
    )
    has_independent_heads = True
    adds_bias = True
    cost = EncodingCost(num_parameters=lambda dims, options: 3 * dims.num_heads, num_saved_tables=4)

    def __init__(
        self, dims: AttentionDims, *, r1_below: float = 2.0, r2_below: float = 1.0, r3_start: float = 1.0
    ) -> None:
        """
        Args:
            r1_below: r1 of each head starts uniformly between 0 and this value.
            r2_below: r2 of each head starts uniformly between 0 and this value.
            r3_start: start value of r3; at 1 the encoding is kerple_log.
        """
        super().__init__(dims)
        self.r1 = build_per_head_parameter("r1_below", dims.num_heads, r1_below)
        self.r2 = build_per_head_parameter("r2_below", dims.num_heads, r2_below)
        if not 1e-2 <= r3_start <= 2:
            raise OptionError("r3_start", f"is {r3_start}; it must be in [0.01, 2]")
        self.r3 = BoundedParameter((dims.num_heads,), init_constant(r3_start), low=1e-2, high=2.0)

    def table(self, distances: Tensor) -> ScoreTerms:
        r1, r2, r3 = (r()[:, None] for r in (self.r1, self.r2, self.r3))
        return ScoreTerms(bias=-r1 * torch.log1p(r2 * pow_with_finite_gradient(distances, r3)))

    def bias_tails(self) -> list[SeriesTail]:
        parameters = zip(*(r().tolist() for r in (self.r1, self.r2, self.r3)), strict=True)
        return [power_tail(r1, r2, r3, decay_name="r1·r3") for r1, r2, r3 in parameters]

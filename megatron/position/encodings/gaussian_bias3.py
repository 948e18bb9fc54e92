"""A Gaussian bump with a learned exponent in place of the square, added to the scores."""

import torch
from torch import Tensor

from megatron.position.bounded_parameter import build_per_head_parameter
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.numerics import pow_with_finite_gradient
from megatron.position.series_tails import SeriesTail, constant_tail


class GaussianBias3(Encoding):
    formula = "+r1·exp(−r2·n^r3)"
    parameters_summary = "r1, r2 [H] ~ U(0, r*_below) ≥ 0.01; r3 [H] ~ U(0, r3_below) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 3-para-bias"
    advice = (
        "For comparison: perplexity explodes beyond the training length (26 at 512 tokens, 189,216 at 8,192 on "
        "OpenWebText2; KERPLE, table 6)."
    )
    has_independent_heads = True
    adds_bias = True
    cost = EncodingCost(num_parameters=lambda dims, options: 3 * dims.num_heads, num_saved_tables=3)

    def __init__(
        self, dims: AttentionDims, *, r1_below: float = 1.0, r2_below: float = 1.0, r3_below: float = 2.0
    ) -> None:
        """
        Args:
            r1_below: r1 of each head starts uniformly between 0 and this value.
            r2_below: r2 of each head starts uniformly between 0 and this value.
            r3_below: r3 of each head starts uniformly between 0 and this value.
        """
        super().__init__(dims)
        self.r1 = build_per_head_parameter("r1_below", dims.num_heads, r1_below)
        self.r2 = build_per_head_parameter("r2_below", dims.num_heads, r2_below)
        self.r3 = build_per_head_parameter("r3_below", dims.num_heads, r3_below, high=2.0)

    def table(self, distances: Tensor) -> ScoreTerms:
        r1, r2, r3 = (r()[:, None] for r in (self.r1, self.r2, self.r3))
        return ScoreTerms(bias=r1 * torch.exp(-r2 * pow_with_finite_gradient(distances, r3)))

    def bias_tails(self) -> list[SeriesTail]:
        return [constant_tail(1.0, "the bias flattens to 0")] * self.dims.num_heads

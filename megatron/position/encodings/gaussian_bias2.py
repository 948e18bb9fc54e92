"""A Gaussian bump added to the scores. It flattens to zero, so far tokens keep their full weight."""

import torch
from torch import Tensor

from megatron.position.bounded_parameter import build_per_head_parameter
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.series_tails import SeriesTail, constant_tail


class GaussianBias2(Encoding):
    formula = "+r1·exp(−r2·n²)"
    parameters_summary = "r1 [H] ~ U(0, r1_below) ≥ 0.01; r2 [H] ~ U(0, r2_below) ≥ 0.01"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 2-para-bias"
    advice = (
        "For comparison: it does not extrapolate (perplexity 58 at 512 tokens, 10,829 at 8,192 on OpenWebText2; "
        "KERPLE, table 6). The Gaussian is better as a weight (KERPLE, appendix A.3)."
    )
    has_independent_heads = True
    adds_bias = True
    cost = EncodingCost(num_parameters=lambda dims, options: 2 * dims.num_heads, num_saved_tables=1)

    def __init__(self, dims: AttentionDims, *, r1_below: float = 1.0, r2_below: float = 1.0) -> None:
        """
        Args:
            r1_below: r1 of each head starts uniformly between 0 and this value.
            r2_below: r2 of each head starts uniformly between 0 and this value.
        """
        super().__init__(dims)
        self.r1 = build_per_head_parameter("r1_below", dims.num_heads, r1_below)
        self.r2 = build_per_head_parameter("r2_below", dims.num_heads, r2_below)

    def table(self, distances: Tensor) -> ScoreTerms:
        return ScoreTerms(bias=self.r1()[:, None] * torch.exp(-self.r2()[:, None] * distances.square()))

    def bias_tails(self) -> list[SeriesTail]:
        return [constant_tail(1.0, "the bias flattens to 0")] * self.dims.num_heads

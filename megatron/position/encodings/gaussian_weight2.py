"""Scores multiplied by a Gaussian of the distance with a learned exponent in place of the square."""

import torch
from torch import Tensor

from megatron.position.bounded_parameter import build_per_head_parameter
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.numerics import pow_with_finite_gradient


class GaussianWeight2(Encoding):
    formula = "q·k/√d·exp(−r1·n^r2)"
    parameters_summary = "r1 [H] ~ U(0, r1_below) ≥ 0.01; r2 [H] ~ U(0, r2_below) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 2-para-wht"
    advice = (
        "The best of KERPLE's Gaussian kernels: it extrapolates (perplexity 24.8 at 512 tokens, 23.2 at 8,192), but "
        "not as well as kerple_log (23.9 and 21.3, on OpenWebText2; KERPLE, tables 3 and 6)."
    )
    has_independent_heads = True
    multiplies_scores = True
    cost = EncodingCost(num_parameters=lambda dims, options: 2 * dims.num_heads, num_saved_tables=3)

    def __init__(self, dims: AttentionDims, *, r1_below: float = 1.0, r2_below: float = 2.0) -> None:
        """
        Args:
            r1_below: r1 of each head starts uniformly between 0 and this value.
            r2_below: r2 of each head starts uniformly between 0 and this value.
        """
        super().__init__(dims)
        self.r1 = build_per_head_parameter("r1_below", dims.num_heads, r1_below)
        self.r2 = build_per_head_parameter("r2_below", dims.num_heads, r2_below, high=2.0)

    def table(self, distances: Tensor) -> ScoreTerms:
        return ScoreTerms(
            weight=torch.exp(-self.r1()[:, None] * pow_with_finite_gradient(distances, self.r2()[:, None]))
        )

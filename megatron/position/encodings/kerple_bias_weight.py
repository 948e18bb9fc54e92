"""KERPLE's composite kernel: a power bias, and scores that fade with distance."""

import torch
from torch import Tensor

from megatron.position.bounded_parameter import build_per_head_parameter
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.numerics import pow_with_finite_gradient
from megatron.position.series_tails import SeriesTail, exponential_tail


class KerpleBiasWeight(Encoding):
    formula = "q·k/√d·exp(−r3·n^r4) − r1·n^r2"
    parameters_summary = "r1, r3 [H] ~ U(0, r*_below) ≥ 0.01; r2, r4 [H] ~ U(0, r*_below) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, section 5.3, bias+wht"
    advice = (
        "For comparison: it has more parameters and is slower than kerple_log, without an advantage in extrapolation "
        "(KERPLE, sections 4 and 5.3). In this project's models of 0.84M parameters its mean perplexity over five "
        "seeds is 10% below kerple_log's at 16 times the training length, which is not significant (docs/claims.md)."
    )
    has_independent_heads = True
    adds_bias = True
    multiplies_scores = True
    cost = EncodingCost(num_parameters=lambda dims, options: 4 * dims.num_heads, num_saved_tables=5)

    def __init__(
        self,
        dims: AttentionDims,
        *,
        r1_below: float = 1.0,
        r2_below: float = 2.0,
        r3_below: float = 1.0,
        r4_below: float = 2.0,
    ) -> None:
        """
        Args:
            r1_below: r1 of each head starts uniformly between 0 and this value.
            r2_below: r2 of each head starts uniformly between 0 and this value.
            r3_below: r3 of each head starts uniformly between 0 and this value.
            r4_below: r4 of each head starts uniformly between 0 and this value.
        """
        super().__init__(dims)
        self.r1 = build_per_head_parameter("r1_below", dims.num_heads, r1_below)
        self.r2 = build_per_head_parameter("r2_below", dims.num_heads, r2_below, high=2.0)
        self.r3 = build_per_head_parameter("r3_below", dims.num_heads, r3_below)
        self.r4 = build_per_head_parameter("r4_below", dims.num_heads, r4_below, high=2.0)

    def table(self, distances: Tensor) -> ScoreTerms:
        r1, r2, r3, r4 = (r()[:, None] for r in (self.r1, self.r2, self.r3, self.r4))
        weight = torch.exp(-r3 * pow_with_finite_gradient(distances, r4))
        return ScoreTerms(bias=-r1 * pow_with_finite_gradient(distances, r2), weight=weight)

    def bias_tails(self) -> list[SeriesTail]:
        # The weight is at most 1, so scores stay bounded, as the theorem requires.
        return [exponential_tail(r1, r2) for r1, r2 in zip(self.r1().tolist(), self.r2().tolist(), strict=True)]

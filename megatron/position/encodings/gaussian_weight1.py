"""Scores multiplied by a Gaussian of the distance: far scores shrink to zero."""

import torch
from torch import Tensor

from megatron.position.bounded_parameter import build_per_head_parameter
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost


class GaussianWeight1(Encoding):
    formula = "q·k/√d·exp(−r1·n²)"
    parameters_summary = "r1 [H] ~ U(0, r1_below) ≥ 0.01"
    source = "KERPLE: Chi et al. 2022, appendix A.3, 1-para-wht"
    advice = (
        "For comparison: perplexity grows slowly with length but is high from the start (33.8 at 512 tokens, where "
        "kerple_log has 23.9, on OpenWebText2; KERPLE, tables 3 and 6)."
    )
    has_independent_heads = True
    multiplies_scores = True
    cost = EncodingCost(num_parameters=lambda dims, options: dims.num_heads, num_saved_tables=1)

    def __init__(self, dims: AttentionDims, *, r1_below: float = 1.0) -> None:
        """
        Args:
            r1_below: r1 of each head starts uniformly between 0 and this value.
        """
        super().__init__(dims)
        self.r1 = build_per_head_parameter("r1_below", dims.num_heads, r1_below)

    def table(self, distances: Tensor) -> ScoreTerms:
        return ScoreTerms(weight=torch.exp(-self.r1()[:, None] * distances.square()))

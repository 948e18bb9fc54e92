"""KERPLE's logarithmic kernel, the best of its paper: a learned penalty that flattens with distance."""

import torch
from torch import Tensor

from megatron.position.bounded_parameter import build_per_head_parameter
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.series_tails import SeriesTail, power_tail


class KerpleLog(Encoding):
    formula = "−r1·log(1 + r2·n)"
    parameters_summary = "r1 [H] ~ U(0, r1_below) ≥ 0.01; r2 [H] ~ U(0, r2_below) ≥ 0.01"
    source = "KERPLE: Chi et al. 2022, section 4, logarithmic variant; start values of its released code"
    advice = (
        "DAPE V2 recommends it as the default: good in almost all settings and easy to train, with few parameters "
        "(appendix A). KERPLE finds it better than kerple_power at every length (section 5.2). In this project's "
        "models of 0.84M parameters kerple_power is better at every length, on average over five seeds "
        "(docs/results/small.md). A head is guaranteed to extrapolate if r1 > 1 (Exploring Transformer Extrapolation, "
        "appendix B). Far beyond the training length perplexity may still rise (4.06 at 1,024 tokens, 6.95 at 8,192; "
        "DAPE V2, table 2); with cdape it falls."
    )
    other_names = ("kerple_logarithmic",)
    has_independent_heads = True
    adds_bias = True
    cost = EncodingCost(num_parameters=lambda dims, options: 2 * dims.num_heads, num_saved_tables=2)

    def __init__(self, dims: AttentionDims, *, r1_below: float = 2.0, r2_below: float = 1.0) -> None:
        """
        Args:
            r1_below: r1 of each head starts uniformly between 0 and this value.
            r2_below: r2 of each head starts uniformly between 0 and this value.
        """
        super().__init__(dims)
        self.r1 = build_per_head_parameter("r1_below", dims.num_heads, r1_below)
        self.r2 = build_per_head_parameter("r2_below", dims.num_heads, r2_below)

    def table(self, distances: Tensor) -> ScoreTerms:
        r1, r2 = self.r1()[:, None], self.r2()[:, None]
        return ScoreTerms(bias=-r1 * torch.log1p(r2 * distances))

    def bias_tails(self) -> list[SeriesTail]:
        return [
            power_tail(r1, r2, decay_name="r1") for r1, r2 in zip(self.r1().tolist(), self.r2().tolist(), strict=True)
        ]

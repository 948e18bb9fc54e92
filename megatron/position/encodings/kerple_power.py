"""KERPLE's power kernel: ALiBi with learned slope and exponent."""

from torch import Tensor

from megatron.position.bounded_parameter import build_per_head_parameter
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.numerics import pow_with_finite_gradient
from megatron.position.series_tails import SeriesTail, exponential_tail


class KerplePower(Encoding):
    formula = "−r1·n^r2"
    parameters_summary = "r1 [H] ~ U(0, r1_below) ≥ 0.01; r2 [H] ~ U(0, r2_below) in [0.01, 2]"
    source = "KERPLE: Chi et al. 2022, section 4, power variant; start values of its released code"
    advice = (
        "For comparison with kerple_log, which is faster and has a lower perplexity at all lengths in the paper "
        "(KERPLE, section 5.2). In this project's models of 0.84M parameters kerple_power has the lower mean "
        "perplexity over five seeds at all lengths (docs/results/small.md). Its learned curves soon reach very "
        "negative values, like ALiBi's, so far tokens have little effect (KERPLE, section 5.4)."
    )
    other_names = ("kerple_pow",)
    has_independent_heads = True
    adds_bias = True
    cost = EncodingCost(num_parameters=lambda dims, options: 2 * dims.num_heads, num_saved_tables=2)

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
        return ScoreTerms(bias=-self.r1()[:, None] * pow_with_finite_gradient(distances, self.r2()[:, None]))

    def bias_tails(self) -> list[SeriesTail]:
        return [exponential_tail(r1, r2) for r1, r2 in zip(self.r1().tolist(), self.r2().tolist(), strict=True)]

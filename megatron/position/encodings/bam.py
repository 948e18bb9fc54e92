"""The generalized Gaussian prior of the Bayesian Attention Mechanism (BAM)."""

import math

import torch
from torch import Tensor

from megatron.position.bounded_parameter import BoundedParameter, init_constant
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.encodings.alibi import compute_slopes
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.series_tails import SeriesTail, constant_tail, exponential_tail, unknown_tail

OFFSET = 1e-5
"""Offset added to every distance, so that the bias at distance 0 is finite for negative exponents."""
EXPONENT_BOUND, LOG_SCALE_BOUND, LOCATION_BOUND = 3.0, 30.0, 10.0
"""Bounds of the parameters, which keep the bias and its derivatives finite in float32.

They apply at every distance that float32 represents exactly: e³⁰·2⁷² · ln 2²⁴ is 8e35. The released code has none.
"""


class Bam(Encoding):
    formula = "−e^s·(n + 10⁻⁵)^β; with location −e^s·(|n + 2·sinh μ| + 10⁻⁵)^β"
    parameters_summary = (
        "β [H] = exponent_init in [−3, 3]; s [H] = ln of ALiBi's slopes in [−30, 30]; with location μ [H] = 0"
    )
    source = (
        "Bayesian Attention Mechanism: Bianchessi et al. 2025 (ICLR 2026), its GGD prior, with offset and start values "
        "of its released code, which calls β theta_beta, s theta_alpha and μ theta_mu. Its training script shares one "
        "prior over all layers and learns the location, as `location` does with pos_emb_per_layer off"
    )
    advice = (
        "For retrieval far beyond the training length, together with ssmax_prior: its authors train on 512 tokens and "
        "report passkey retrieval at 500 times that length. A head with β below 0 weights far tokens more than near "
        "ones. Theorem 3.4 of Exploring Transformer Extrapolation does not cover such a head: its bias tends to 0, so "
        "the series diverges."
    )
    other_names = ("ggd_bam", "bayesian_attention_mechanism")
    has_independent_heads = True
    adds_bias = True
    cost = EncodingCost(
        num_parameters=lambda dims, options: (3 if options["location"] else 2) * dims.num_heads, num_saved_tables=3
    )

    def __init__(self, dims: AttentionDims, *, exponent_init: float = 1.0, location: bool = False) -> None:
        """
        Args:
            exponent_init: start value of β; at 1 the bias falls linearly, as in ALiBi.
            location: learn a distance at which the prior peaks, starting at 0, as the authors' training script does.
        """
        super().__init__(dims)
        if not -EXPONENT_BOUND <= exponent_init <= EXPONENT_BOUND:
            bounds = f"[−{EXPONENT_BOUND:g}, {EXPONENT_BOUND:g}]"
            raise OptionError("exponent_init", f"is {exponent_init}; it must be in {bounds}")
        shape = (dims.num_heads,)
        self.exponent = BoundedParameter(shape, init_constant(exponent_init), -EXPONENT_BOUND, EXPONENT_BOUND)
        self.log_scale = BoundedParameter(shape, _init_log_slopes, -LOG_SCALE_BOUND, LOG_SCALE_BOUND)
        self.location = (
            BoundedParameter(shape, init_constant(0.0), -LOCATION_BOUND, LOCATION_BOUND) if location else None
        )

    def table(self, distances: Tensor) -> ScoreTerms:
        if self.location is not None:
            distances = (distances + 2 * self.location().sinh()[:, None]).abs()
        powers = (distances + OFFSET) ** self.exponent()[:, None]
        return ScoreTerms(bias=-self.log_scale().exp()[:, None] * powers)

    def bias_tails(self) -> list[SeriesTail]:
        if self.location is not None and self.location().any():
            return [unknown_tail("a learned location moves the peak of the prior")] * self.dims.num_heads
        return [
            _build_tail(exponent, math.exp(log_scale))
            for exponent, log_scale in zip(self.exponent().tolist(), self.log_scale().tolist(), strict=True)
        ]


def _init_log_slopes(tensor: Tensor) -> None:
    tensor.copy_(torch.tensor(compute_slopes(tensor.numel())).log())


def _build_tail(exponent: float, scale: float) -> SeriesTail:
    if exponent > 0:
        return exponential_tail(scale, exponent)
    limit = "0" if exponent < 0 else f"−{scale:.3g}"
    return constant_tail(math.exp(-scale), f"β = {exponent:.4g} is not above 0: far away the bias is {limit}")

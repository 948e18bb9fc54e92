"""Sandwich: the inner product of sinusoidal embeddings as a fixed bias, steeper for earlier heads."""

import math

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.series_tails import SeriesTail


class Sandwich(Encoding):
    formula = "k_h·(Σ_j cos(n/base^(2j/m)) − m/2), k_h = H/(8h), m = dimension, j = 1 … m/2 (from_zero: 0 … m/2 − 1)"
    source = (
        "Chi et al. 2023, Dissecting transformer length extrapolation via receptive field analysis. The sum from j = 1 "
        "is that of Exploring Transformer Extrapolation, and from_zero that of the reference construction in the "
        "appendix"
    )
    advice = (
        "A fixed bias that is stable beyond the training length. Its perplexity is never below that of alibi, "
        "kerple_log and type1 (Exploring Transformer Extrapolation, tables 4 and 5). That paper's proof that its "
        "series converges is wrong: the series diverges (docs/analysis.md)."
    )
    adds_bias = True
    cost = EncodingCost()

    def __init__(
        self, dims: AttentionDims, *, dimension: int = 128, base: float = 10000.0, from_zero: bool = False
    ) -> None:
        """
        Args:
            dimension: m, the size of the sinusoidal vectors whose products form the bias; even.
            base: frequencies are base^(−2j/m); a larger base makes the slowest wave slower.
            from_zero: sum over j = 0 … m/2 − 1, as in sinusoidal embeddings, so that the fastest frequency is 1.
        """
        super().__init__(dims)
        if dimension < 2 or dimension % 2:
            raise OptionError("dimension", f"is {dimension}; it must be even and at least 2")
        if base <= 1:
            raise OptionError("base", f"is {base}; it must be greater than 1")
        self.dimension, self.base, self.first = dimension, base, 0 if from_zero else 1

    def table(self, distances: Tensor) -> ScoreTerms:
        half = self.dimension // 2
        j = torch.arange(self.first, self.first + half, dtype=torch.float64, device=distances.device)
        angle = distances.double()[:, None] / self.base ** (2 * j / self.dimension)
        total = (angle.cos().sum(-1) - half).to(distances.dtype)  # float64 so far, because the sum cancels at small n
        h = torch.arange(1, self.dims.num_heads + 1, device=distances.device)
        return ScoreTerms(bias=(self.dims.num_heads / (8.0 * h))[:, None] * total)

    def bias_tails(self) -> list[SeriesTail]:
        # A sum of cosines is almost periodic. The mean of the cosines over n is 0 (no frequency is a multiple of 2π),
        # so the mean of the bias is −k·m/2. By Jensen's inequality the mean of b is at least the exponential of that.
        return [self._build_tail(self.dims.num_heads / (8 * h)) for h in range(1, self.dims.num_heads + 1)]

    def _build_tail(self, k: float) -> SeriesTail:
        min_log10 = -k * self.dimension / 2 / math.log(10)
        return SeriesTail(
            False,
            "a sum of cosines is almost periodic, so b returns close to 1 again and again, and its mean over n is at "
            f"least exp(−k·m/2) = 10^{min_log10:.1f} with k = {k:.4g} (the published proof of convergence fails)",
        )

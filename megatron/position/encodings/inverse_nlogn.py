"""A bias whose exponentials 1/((n + 2)·ln(n + 2)) form a barely divergent series: no extrapolation."""

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.encodings.alibi import compute_slopes
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.series_tails import SeriesTail


class InverseNLogN(Encoding):
    formula = "−ln((n + 2)·ln(n + 2)) (released: −ln((3 + m·n)·ln(3 + m·n)), m ALiBi's slopes)"
    source = (
        "Exploring Transformer Extrapolation: Qin et al. 2023, section 4, the diverging example 1/(n ln n); `released` "
        "is the bias that its authors' fairseq trains"
    )
    advice = (
        "A counterexample: its series barely diverges, and its perplexity grows more slowly than inverse's (24.6 at "
        "the training length of 512 tokens, 27.6 at 9,216, on WikiText-103; Exploring Transformer Extrapolation, table "
        "6)."
    )
    adds_bias = True
    cost = EncodingCost()

    def __init__(self, dims: AttentionDims, *, released: bool = False) -> None:
        """
        Args:
            released: use the bias that the authors' fairseq trains, in which each head multiplies distances by its
                ALiBi slope.
        """
        super().__init__(dims)
        self.released = released

    def table(self, distances: Tensor) -> ScoreTerms:
        if self.released:
            n = distances * torch.tensor(compute_slopes(self.dims.num_heads), device=distances.device)[:, None]
            return ScoreTerms(bias=-torch.log((3 + n) * torch.log(3 + n)))
        bias = -torch.log((distances + 2) * torch.log(distances + 2))
        return ScoreTerms(bias=bias.expand(self.dims.num_heads, -1))

    def bias_tails(self) -> list[SeriesTail]:
        b = "1/((3 + m·n)·ln(3 + m·n))" if self.released else "1/((n + 2)·ln(n + 2))"
        tail = SeriesTail(False, f"b = {b}, whose sum to n grows as ln ln n without bound")
        return [tail] * self.dims.num_heads

"""Sines and cosines of the absolute position, defined at any length."""

from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.numerics import compute_sinusoidal_embeddings
from megatron.position.token_range import TokenRange


class Sinusoidal(Encoding):
    formula = "x_i + p_i, p_i = [sin(i/base^(2m/D)) for m < D/2; cos(i/base^(2m/D)) for m < D/2]"
    source = "Vaswani et al. 2017, section 3.5 (sines and cosines in two halves, in GPT-NeoX's layout)"
    advice = (
        "A baseline: it is defined at any length, but perplexity explodes beyond the training length (33 at 512 "
        "tokens, 30,046 at 16,384 on OpenWebText2; KERPLE, table 3)."
    )
    other_names = ("sine", "sincos", "sinusoid")
    cost = EncodingCost()
    relative = False

    def __init__(self, dims: AttentionDims, *, base: float = 10000.0) -> None:
        """
        Args:
            base: frequencies are base^(−2m/D); a larger base makes the slowest wave slower.
        """
        super().__init__(dims)
        if dims.hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden_size, not {dims.hidden_size}")
        if base <= 1:
            raise OptionError("base", f"is {base}; it must be greater than 1")
        self.base = base

    def embed(self, tokens: TokenRange, like: Tensor) -> Tensor:
        return compute_sinusoidal_embeddings(
            tokens.positions(like.device), self.dims.hidden_size, self.base, like.dtype
        )

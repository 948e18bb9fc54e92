"""Sines and cosines of the absolute position, any length."""

from torch import Tensor

from ..angles import sinusoids
from ..encoding import Encoding
from ..shape import Shape, Span


class Sinusoidal(Encoding):
    formula = "x_i + p_i, p_i = [sin(i/base^(2m/D)) for m < D/2; cos(i/base^(2m/D)) for m < D/2]"
    source = "Vaswani et al. 2017, section 3.5 (sines and cosines in two halves, as GPT-NeoX lays them out)"
    advice = (
        "A baseline: it is defined at any length, but perplexity explodes past the training length (33 at 512 tokens, "
        "30,046 at 16,384 on OpenWebText2; KERPLE, table 3)."
    )
    relative = False

    def __init__(self, shape: Shape, *, base: float = 10000.0) -> None:
        super().__init__(shape)
        if shape.hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden_size, not {shape.hidden_size}")
        if base <= 1:
            raise ValueError(f"option base of sinusoidal is {base}; it must be greater than 1")
        self.base = base

    def embed(self, span: Span, like: Tensor) -> Tensor:
        return sinusoids(span.positions(like.device), self.shape.hidden_size, self.base, like.dtype)

"""One learned vector per absolute position: knows no position past its table."""

import torch
from torch import Tensor, nn

from ..encoding import Encoding
from ..parameters import normal
from ..shape import Shape, Span


class Vectors(nn.Embedding):
    """A table of vectors that starts from N(0, std²)."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        self.start = normal(std)  # the base class's constructor calls `reset_parameters`
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # draws too: what is drawn after it stays what it was before this class
        with torch.no_grad():
            self.start(self.weight)


class Learned(Encoding):
    formula = "x_i + p_i, p a learned table"
    parameters_text = "p [max_position_embeddings, D] ~ N(0, std²)"
    source = "GPT-2: Radford et al. 2019"
    advice = (
        "For models that never read past the training length; it refuses what is longer than its table. Absolute "
        "positions generalise poorly to longer sequences (DAPE V2, section 2)."
    )
    relative = False

    def __init__(self, shape: Shape, *, std: float = 0.02) -> None:
        super().__init__(shape)
        self.max_length = shape.max_length
        self.vectors = Vectors(shape.max_length, shape.hidden_size, std)

    def embed(self, span: Span, like: Tensor) -> Tensor:
        if span.bound > self.shape.max_length:
            what = f"a sequence of length {span.stop} was given"
            if span.drawn is not None:
                what = f"positions are drawn from {span.bound} (randomized_positions)"
            raise ValueError(f"learned positions end at {self.shape.max_length} (max_position_embeddings), but {what}")
        return self.vectors(span.positions(like.device)).to(like.dtype)

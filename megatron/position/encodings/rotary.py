"""Rotary position embedding: queries and keys are rotated by angles proportional to their positions."""

import torch
from torch import Tensor

from ..angles import angles
from ..encoding import Encoding
from ..shape import Shape, Span, at_least_float32


class Rotary(Encoding):
    formula = "(R_i q_i)·(R_j k_j)/√d, R_i turns the pair (m, m + r/2) by i/base^(2m/r), r = fraction·d"
    source = "RoFormer: Su et al. 2021, equation 15 (pairs in two halves, as GPT-NeoX lays them out)"
    advice = (
        "The usual choice within the training length, a baseline past it: perplexity rises from 4.07 to 86 at twice "
        "that length (DAPE V2, table 2). cdape improves it, dape makes it worse (DAPE V2, section 4.4)."
    )

    def __init__(self, shape: Shape, *, fraction: float = 1.0, base: float = 10000.0) -> None:
        super().__init__(shape)
        if not 0 < fraction <= 1:
            raise ValueError(f"option fraction of rotary is {fraction}; it must be in (0, 1]")
        if base <= 1:
            raise ValueError(f"option base of rotary is {base}; it must be greater than 1")
        self.base = base
        self.rotated = int(shape.head_dim * fraction)
        if self.rotated < 2 or self.rotated % 2:
            raise ValueError(
                f"rotary turns {self.rotated} of {shape.head_dim} dimensions (fraction {fraction}); "
                "that must be an even number"
            )

    def rotate(self, x: Tensor, span: Span) -> Tensor:
        half = self.rotated // 2
        angle = angles(span.positions(x.device), half, self.base)
        first, second = at_least_float32(x[..., :half]), at_least_float32(x[..., half : self.rotated])
        cos, sin = (turn.to(first.dtype) for turn in (angle.cos(), angle.sin()))  # [T, r/2]
        turned = [torch.addcmul(first * cos, second, -sin), torch.addcmul(second * cos, first, sin)]
        result = torch.cat(turned, dim=-1).to(x.dtype)
        return torch.cat([result, x[..., self.rotated :]], dim=-1) if self.rotated < x.shape[-1] else result

"""Rotary position embedding: queries and keys are rotated by angles proportional to their positions."""

import torch
from torch import Tensor

from megatron.position.base import OptionError
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.numerics import promote_to_float32, rotary_frequencies
from megatron.position.rotary_scaling import RotaryScaling
from megatron.position.token_range import TokenRange


class Rotary(Encoding):
    formula = "(R_i q_i)·(R_j k_j)/√d, R_i turns the pair (m, m + r/2) by i/base^(2m/r), r = fraction·d"
    source = (
        "RoFormer: Su et al. 2021, equation 15 (pairs in two halves, as GPT-NeoX lays them out). The option scaling "
        "stretches the frequencies as published models do: linear (Chen et al. 2023), llama3 (Llama 3.1), yarn (Peng "
        "et al. 2023)"
    )
    advice = (
        "The usual choice within the training length, a baseline past it: perplexity rises from 4.07 to 86 at twice "
        "that length (DAPE V2, table 2). cdape improves it, dape makes it worse (DAPE V2, section 4.4)."
    )
    other_names = ("rope", "roformer", "rotary_embedding", "rotary_embeddings")
    cost = EncodingCost()

    def __init__(
        self,
        dims: AttentionDims,
        *,
        fraction: float = 1.0,
        base: float = 10000.0,
        scaling: str = "none",
        factor: float | None = None,
        original_length: int | None = None,
        low_freq_factor: float | None = None,
        high_freq_factor: float | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        attention_factor: float | None = None,
    ) -> None:
        super().__init__(dims)
        if not 0 < fraction <= 1:
            raise OptionError("fraction", f"is {fraction}; it must be in (0, 1]")
        if base <= 1:
            raise OptionError("base", f"is {base}; it must be greater than 1")
        self.base = base
        self.rotated = int(dims.head_dim * fraction)
        if self.rotated < 2 or self.rotated % 2:
            raise ValueError(
                f"rotary turns {self.rotated} of {dims.head_dim} dimensions (fraction {fraction}); "
                "that must be an even number"
            )

        self.scaling = RotaryScaling(
            scaling, factor, original_length, low_freq_factor, high_freq_factor, beta_fast, beta_slow, attention_factor
        )

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """Radians per token of each pair, float64 [r/2]."""
        return self.scaling.frequencies(rotary_frequencies(self.rotated // 2, self.base, device), self.base)

    def rotate(self, x: Tensor, tokens: TokenRange) -> Tensor:
        half = self.rotated // 2
        # In float64, because at position 65,536 a float32 angle is already off by 0.004 rad.
        angle = tokens.positions(x.device).double()[:, None] * self.frequencies(x.device)
        first, second = promote_to_float32(x[..., :half]), promote_to_float32(x[..., half : self.rotated])
        cos, sin = ((self.scaling.amplitude * turn).to(first.dtype) for turn in (angle.cos(), angle.sin()))  # [T, r/2]
        turned = [torch.addcmul(first * cos, second, -sin), torch.addcmul(second * cos, first, sin)]
        result = torch.cat(turned, dim=-1).to(x.dtype)
        return torch.cat([result, x[..., self.rotated :]], dim=-1) if self.rotated < x.shape[-1] else result

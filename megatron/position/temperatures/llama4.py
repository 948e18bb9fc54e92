"""Temperature of Llama 4: scores grow with the logarithm of the position, in steps of thousands of tokens."""

import torch
from torch import Tensor

from megatron.position.facts import AttentionDims, OptionError, TemperatureCost
from megatron.position.temperature import Temperature


class Llama4(Temperature):
    formula = "1 + attn_scale·log(1 + floor((i + 1) / floor_scale)), i the row's position"
    source = "Llama 4 (Meta 2025), attn_temperature_tuning of its released configuration, as transformers computes it"
    advice = (
        "For layers without a position encoding in a model that reads very long texts, as in Llama 4. Rows before "
        "floor_scale do not change. For a model trained on shorter rows, choose a floor_scale within their length."
    )
    other_names = ("attn_temperature_tuning",)
    cost = TemperatureCost()

    def __init__(self, dims: AttentionDims, *, floor_scale: int = 8192, attn_scale: float = 0.1) -> None:
        """
        Args:
            floor_scale: number of tokens between steps of the factor; it is 1 up to the first step.
            attn_scale: multiplier of the logarithm of the steps.
        """
        super().__init__(dims)
        if floor_scale < 1:
            raise OptionError("floor_scale", f"is {floor_scale}; it must be at least 1")
        if attn_scale < 0:
            raise OptionError("attn_scale", f"is {attn_scale}; it must not be negative")
        self.floor_scale, self.attn_scale = floor_scale, attn_scale

    def forward(self, positions: Tensor, num_keys: Tensor) -> Tensor:
        steps = torch.floor((positions + 1) / self.floor_scale)
        return (1 + self.attn_scale * torch.log1p(steps))[None]

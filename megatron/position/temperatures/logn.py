"""Log-n scaling: beyond the training length, scores grow with the logarithm of the number of keys."""

import math

import torch
from torch import Tensor

from megatron.position.facts import AttentionDims, OptionError, TemperatureCost
from megatron.position.temperature import Temperature


class Logn(Temperature):
    formula = "max(1, log n / log T), n the keys that the row sees, T = length"
    source = "Su 2021 (kexue.fm/archives/8823), with a maximum, as in Qwen's use_logn_attn"
    advice = (
        "For evaluating a model that was trained without a temperature (`--attention-temperature logn`). Up to the "
        "training length it has no effect. Beyond that length, the entropy of attention stays about the same when a "
        "row sees more keys."
    )
    other_names = ("log_n", "logn_attn", "use_logn_attn")
    cost = TemperatureCost()

    def __init__(self, dims: AttentionDims, *, length: int | None = None) -> None:
        """
        Args:
            length: T, the number of keys up to which the factor is 1; the training length if null.
        """
        super().__init__(dims)
        self.length = dims.train_length if length is None else length
        """T; the training length if the option is absent."""
        if self.length < 2:
            raise OptionError("length", f"is {self.length}; it must be at least 2")

    def forward(self, positions: Tensor, num_keys: Tensor) -> Tensor:
        return (torch.log(num_keys) / math.log(self.length)).clamp_min(1.0)[None]

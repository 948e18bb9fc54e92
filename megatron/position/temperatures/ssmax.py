"""Scalable softmax: scores grow with the logarithm of the number of keys, at a rate that each head learns."""

import math

import torch
from torch import Tensor

from megatron.position.bounded_parameter import BoundedParameter, init_constant
from megatron.position.facts import AttentionDims, OptionError, TemperatureCost
from megatron.position.temperature import Temperature


class Ssmax(Temperature):
    formula = "s·log n, n the keys that the row sees"
    parameters_summary = "s [H], initialized to the option's value, and not trained if `learned` is false"
    source = (
        "Scalable-Softmax: Nakanishi 2025 (2501.19399), softmax to the base n^s; start value and count of keys as in "
        "BAM's released code"
    )
    advice = (
        "For attention to single keys in long contexts: if scores are bounded, the largest weight of a softmax over n "
        "keys falls as 1/n. Use it in training; its author reports a lower training loss and better retrieval in long "
        "contexts. It does not scale a bias, unlike the processor ssmax_prior. A row that sees one key has the factor "
        "0, but attends to that key in any case."
    )
    other_names = ("scalable_softmax", "scaled_softmax")
    cost = TemperatureCost(num_parameters=lambda dims, options: dims.num_heads if options["learned"] else 0)

    def __init__(self, dims: AttentionDims, *, s: float = 1.0, learned: bool = True) -> None:
        """
        Args:
            s: start value of s, or its fixed value without `learned`.
            learned: learn s for each head.
        """
        super().__init__(dims)
        if not (math.isfinite(s) and s > 0):
            raise OptionError("s", f"is {s}; it must be greater than 0")
        self.fixed = s
        self.s = BoundedParameter((dims.num_heads,), init_constant(s)) if learned else None

    def forward(self, positions: Tensor, num_keys: Tensor) -> Tensor:
        log_n = torch.log(num_keys)[None]
        if self.s is None:
            return self.fixed * log_n
        return self.s().view(-1, *(1 for _ in num_keys.shape)) * log_n

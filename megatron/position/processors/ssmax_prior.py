"""Scalable softmax over scores and bias: both grow with the logarithm of the number of keys, as in BAM's models.

The temperature `ssmax` multiplies queries and does not scale a bias. This processor scales the sum.
"""

import math

import torch
from torch import Tensor

from megatron.position.bounded_parameter import BoundedParameter, init_constant
from megatron.position.facts import AttentionDims, OptionError, ProcessorCost
from megatron.position.numerics import promote_to_float32
from megatron.position.processor import Processor
from megatron.position.token_range import ALL_HEADS


class SsmaxPrior(Processor):
    formula = "s·log n · (S + B), n the keys that the row sees"
    parameters_summary = "s [H], initialized to the option's value, and not trained if `learned` is false"
    source = (
        "Bayesian Attention Mechanism: Bianchessi et al. 2025 (ICLR 2026), the released code with `ssmax_prior`, which "
        "its training script sets: logits are (q·k/√d + prior)·s·log n. Scalable softmax: Nakanishi 2025 (2501.19399)"
    )
    advice = (
        "For bam, whose authors train it with scalable softmax: the default of the paper's training script (overlays "
        "bam and ssmax_prior). Without a bias it equals the temperature ssmax, which kernels support. With another "
        "bias use ssmax, unless the bias should grow with the context as the scores do."
    )
    cost = ProcessorCost(
        num_parameters=lambda dims, options, has_bias: dims.num_heads if options["learned"] else 0,
        num_head_maps=lambda options: int(options["learned"]),
    )

    def __init__(self, dims: AttentionDims, *, has_bias: bool, s: float = 1.0, learned: bool = True) -> None:
        """
        Args:
            s: start value of s, or its fixed value without `learned`.
            learned: learn s for each head.
        """
        super().__init__(dims, has_bias=has_bias)
        if not (math.isfinite(s) and s > 0):
            raise OptionError("s", f"is {s}; it must be greater than 0")
        self.fixed = s
        self.s = BoundedParameter((dims.num_heads,), init_constant(s)) if learned else None

    def forward(
        self,
        scores: Tensor,
        bias: Tensor | None,
        visible: Tensor,
        heads: slice = ALL_HEADS,
        bias_contribution: Tensor | None = None,
        first_columns: Tensor | None = None,
    ) -> Tensor:
        logits = promote_to_float32(scores[:, heads])
        if bias is not None:
            logits = logits + bias[..., heads, :, :]
        # A row of padding sees no key, and its logits are never used.
        scale = torch.log(visible.sum(-1, keepdim=True).clamp_min(1).to(logits.dtype))
        return logits * (scale * (self.fixed if self.s is None else self.s()[heads, None, None]))

    def flops_per_score(self) -> float:
        return 0.0

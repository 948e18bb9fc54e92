"""Scalable softmax of all logits: scores and bias grow together with the logarithm of the number of keys.

    (S + B)·s_h·log n        n the keys that the row sees, s of each head of each layer

The temperature `ssmax` multiplies queries and so leaves a bias as it is. BAM's released models with scalable softmax
multiply the sum of scores and prior (`ssmax_prior`), which makes the prior's decay steeper in longer contexts.
"""

import math

import torch
from torch import Tensor

from megatron.position.bounded_parameter import BoundedParameter, init_constant
from megatron.position.facts import AttentionDims, OptionError, ProcessorCost
from megatron.position.numerics import promote_to_float32
from megatron.position.processor import Processor
from megatron.position.token_range import ALL_HEADS


class SsmaxLogits(Processor):
    formula = "(S + B)·s·log n, n the keys that the row sees"
    parameters_summary = "s [H], all at the option's value at first, or for good without learned"
    source = "BAM's released models with scalable softmax (ssmax_prior); Scalable-Softmax: Nakanishi 2025 (2501.19399)"
    advice = (
        "On bam, as its authors train the pair (arXiv:2505.22842). Without a bias it is the temperature ssmax, which "
        "kernels fuse; with one, the temperature leaves the bias as it is. A row that sees one key attends to it "
        "whatever the factor is."
    )
    other_names = ("ssmax_prior",)
    cost = ProcessorCost(
        num_parameters=lambda dims, options, has_bias: dims.num_heads if options["learned"] else 0,
        num_head_maps=lambda options: int(options["learned"]),
    )

    def __init__(self, dims: AttentionDims, *, has_bias: bool, s: float = 1.0, learned: bool = True) -> None:
        """
        Args:
            s: where s starts, or what it is without `learned`.
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
        log_n = torch.log(visible.sum(-1, keepdim=True).clamp_min(1).to(logits.dtype))
        factor = log_n * self.fixed if self.s is None else log_n * self.s()[heads, None, None].to(logits.dtype)
        return logits * factor

    def flops_per_score(self) -> float:
        return 0.0

"""The attention formula with the gradient that fused kernels take, for a derived size of their rounding errors.

The gradient of a softmax subtracts a row's mean, Σ_j P∘dP. Fused kernels have no P when they need it and take Σ_d dO∘O
instead, which is the same number but for the rounding of the output to its type (FlashAttention, Dao et al. 2022,
appendix B.4). A row's gradients of scores then no longer add up to zero, and parameters whose gradient nearly cancels
(a constant of a bias, the rate of its decay) err by many times what the formula's own rounding gives.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_attention, compute_logits
from megatron.attention.softmax import append_sink


def attend_as_fused(inputs: AttentionInputs) -> Tensor:
    """`reference.compute_attention` without dropout, its gradient as fused kernels take it: [B, h, R, d]."""
    if inputs.breaks_sticks:  # which no kernel fuses
        return compute_attention(inputs)
    logits, v, sinks = compute_logits(inputs), inputs.v, inputs.head_sinks
    if sinks is not None:  # a key without a value
        logits, v = append_sink(logits, sinks), torch.nn.functional.pad(v, (0, 0, 0, 1))
    output: Tensor = _FusedSoftmax.apply(logits, v)
    return output


class _FusedSoftmax(torch.autograd.Function):
    """softmax(logits)·v whose gradient is taken as fused kernels do: with Σ_d dO∘O in the place of Σ_j P∘dP, which is
    the same number but for the rounding of the output."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, v: Tensor) -> Tensor:
        probabilities = torch.softmax(logits, dim=-1)
        output = torch.matmul(probabilities, v)
        ctx.save_for_backward(probabilities, v, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        probabilities, v, output = ctx.saved_tensors
        mean = (gradient * output).sum(-1, keepdim=True)
        of_probabilities = torch.matmul(gradient, v.transpose(-1, -2))
        return probabilities * (of_probabilities - mean), torch.matmul(probabilities.transpose(-1, -2), gradient)

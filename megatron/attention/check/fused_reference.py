"""The attention formula with the gradient of fused kernels, to derive the size of their rounding errors.

The gradient of a softmax subtracts a row's mean, Σ_j P∘dP. Fused kernels do not have P at that point and use Σ_d dO∘O,
which is equal except for the rounding of the output to its type (FlashAttention, Dao et al. 2022, appendix B.4). The
score gradients of a row then no longer sum to zero. Parameters whose gradient nearly cancels (a constant of a bias, the
rate of its decay) get errors many times those of the formula's own rounding.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_attention, compute_logits
from megatron.attention.softmax import append_sink


def attend_as_fused(inputs: AttentionInputs) -> Tensor:
    """Compute `reference.compute_attention` without dropout, with the gradient of fused kernels: [B, h, R, d]."""
    if inputs.uses_stick_breaking:  # no kernel fuses stick-breaking
        return compute_attention(inputs)
    logits, v, sinks = compute_logits(inputs), inputs.v, inputs.head_sinks
    if sinks is not None:  # a key without a value
        logits, v = append_sink(logits, sinks), torch.nn.functional.pad(v, (0, 0, 0, 1))
    output: Tensor = _FusedSoftmax.apply(logits, v)
    return output


class _FusedSoftmax(torch.autograd.Function):
    """softmax(logits)·v with the gradient of fused kernels: with Σ_d dO∘O instead of Σ_j P∘dP.

    The two are equal except for the rounding of the output.
    """

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

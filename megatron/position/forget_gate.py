"""Forget gate: how much of the preceding tokens each head of a layer keeps at each token.

B batch, T tokens, D hidden size, H heads, h of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.position.numerics import promote_to_float32
from megatron.position.token_range import ALL_HEADS


class _LinearInFloat32(torch.autograd.Function):
    """x·Wᵀ + b in float32 from inputs of any type, for some rows of W. Keeps no wider tensors than its inputs.

    ZeRO-3 frees a weight after its use, so the saved tensor must be the parameter itself, not a view.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rows: slice) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        return F.linear(promote_to_float32(x), promote_to_float32(weight[rows]), promote_to_float32(bias[rows]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = torch.matmul(grad, promote_to_float32(weight[ctx.rows])).to(x.dtype)
        flat = grad.flatten(0, -2)
        own_weight, own_bias = flat.t() @ promote_to_float32(x).flatten(0, -2), flat.sum(0)
        if ctx.rows == ALL_HEADS:
            return grad_x, own_weight.to(weight.dtype), own_bias.to(weight.dtype), None
        grad_weight, grad_bias = torch.zeros_like(weight), weight.new_zeros(len(weight))
        grad_weight[ctx.rows], grad_bias[ctx.rows] = own_weight.to(weight.dtype), own_bias.to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None


class ForgetGate(nn.Module):
    """Gate log σ(W x + b), with W [H, D] and b [H].

    It does not use nn.Linear, which peft's `all-linear` and quantization would replace by layers that compute in other
    types.

    Args:
        num_heads, hidden_size: H and D.
        init_weight, init_bias: initialize the parameters in place.
    """

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        init_weight: Callable[[Tensor], object],
        init_bias: Callable[[Tensor], object],
    ) -> None:
        super().__init__()
        self.init_weight, self.init_bias = init_weight, init_bias
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.init_weight(self.weight)
            self.init_bias(self.bias)

    def forward(self, x: Tensor, heads: slice = ALL_HEADS) -> Tensor:
        """Compute the gate of the layer's input [B, T, D], as float32 [B, h, T] in every compute type.

        float32 is needed because sums over thousands of tokens are built from the results.
        """
        rows = x.transpose(0, 1)  # the memory layout of activations in training
        logits: Tensor = _LinearInFloat32.apply(rows, self.weight, self.bias, heads)  # [T, B, h]
        return -F.softplus(-logits).permute(1, 2, 0)  # log σ

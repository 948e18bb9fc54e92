"""The gate by which each head of a layer says at each token how much of what came before it is kept.

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
    """x·Wᵀ + b in float32 from numbers of any type, some rows of W alone; nothing wider than these is kept.

    ZeRO 3 takes a weight away after its use: what is kept of it must be the parameter itself, and no view.
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
    """log σ(W x + b), with W [H, D] and b [H].

    It is no nn.Linear, which peft's `all-linear` and quantization would replace by layers that compute in other types.

    Args:
        num_heads, hidden_size: H and D.
        init_weight, init_bias: fill the fresh parameters in place.
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
        """Start values."""
        with torch.no_grad():
            self.init_weight(self.weight)
            self.init_bias(self.bias)

    def forward(self, x: Tensor, heads: slice = ALL_HEADS) -> Tensor:
        """The layer's input [B, T, D] → float32 [B, h, T], whatever the compute type is: sums over thousands of tokens
        are made of these."""
        rows = x.transpose(0, 1)  # as activations lie in memory while training
        logits: Tensor = _LinearInFloat32.apply(rows, self.weight, self.bias, heads)  # [T, B, h]
        return -F.softplus(-logits).permute(1, 2, 0)  # log σ

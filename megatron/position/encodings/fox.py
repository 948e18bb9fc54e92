"""FoX: each head forgets earlier tokens by a gate that depends on the current token.

f_l = σ(w_h·x_l + b_h) of the layer's input x_l, and the bias of row i and key j is Σ_{l=j+1}^{i} log f_l: softmax
attention with the decay of a gated recurrence. Without a projection (w = 0) it is ALiBi with a learned slope.

CABLE (Veisi et al. 2025, arXiv:2503.08067) is the same bias, for −softplus(y) = log σ(−y). Its public code omits the
scores' 1/√d, which `query_pre_attn_scalar: 1` reproduces.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.position.bounded_parameter import init_constant, init_normal
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.numerics import promote_to_float32
from megatron.position.token_range import ALL_HEADS


class _LinearInFloat32(torch.autograd.Function):
    """x·Wᵀ + b in float32 from inputs of any type, for some rows of W. It saves no tensors wider than its inputs.

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


class Fox(Encoding):
    formula = "q_i·k_j/√d + Σ_{l=j+1}^{i} log σ(w_h·x_l + b_h), x the layer's input"
    parameters_summary = "w [H, D] ~ N(0, std²), b [H] = bias_init, or such that 1/−log σ(b) spans the decay times"
    takes_positions = False
    adds_bias = True
    source = "Forgetting Transformer: Lin et al. 2025, arXiv:2503.02130, equations 4 to 7"
    advice = (
        "Give each layer its own gate (pos_emb_per_layer: true), because the gate reads the layer's input. The paper "
        "reports lower losses than RoPE's within and beyond the training length, without rotary positions "
        "(arXiv:2503.02130, section 4)."
    )
    other_names = ("forgetting_transformer", "forgetting_attention", "forget_gate")
    cost = EncodingCost(
        num_parameters=lambda dims, options: dims.num_heads * (dims.hidden_size + 1),
        num_input_products=lambda dims, options: dims.num_heads * dims.hidden_size,
    )

    def __init__(
        self,
        dims: AttentionDims,
        *,
        std: float = 0.02,
        bias_init: float = 0.0,
        decay_time_min_init: float | None = None,
        decay_time_max_init: float | None = None,
    ) -> None:
        """
        Args:
            std: standard deviation of the initial normal distribution of w.
            bias_init: start value of b; at 0 a gate is half open.
            decay_time_min_init: tokens after which the first head has forgotten all but 1/e; replaces bias_init,
                together with the next option.
            decay_time_max_init: the same for the last head; the other heads are spaced evenly on a logarithmic scale.
        """
        super().__init__(dims)
        times = decay_time_min_init, decay_time_max_init
        init_bias = init_constant(bias_init)
        if times != (None, None):
            for name, time in zip(("decay_time_min_init", "decay_time_max_init"), times, strict=True):
                if time is None:
                    raise OptionError(name, "is missing; both decay times must be given")
                if not time > 0:
                    raise OptionError(
                        name,
                        f"is {time}; it must be greater than 0, in tokens",
                    )
            if times[0] > times[1]:  # type: ignore[operator]
                raise OptionError("decay_time_min_init", f"is {times[0]}, more than decay_time_max_init, {times[1]}")
            if bias_init != 0.0:
                raise OptionError("bias_init", f"is {bias_init}; decay times already set the start of the biases")
            init_bias = init_decay_times(*times)  # type: ignore[arg-type]
        self.forget = ForgetGate(dims.num_heads, dims.hidden_size, init_normal(std), init_bias)

    def list_growing_fan_ins(self) -> list[tuple[nn.Parameter, Literal["hidden", "heads"]]]:
        return [(self.forget.weight, "hidden")]

    def list_decayed(self) -> list[nn.Parameter]:
        return [self.forget.weight]

    def gate(self, x: Tensor, heads: slice) -> Tensor:
        gates: Tensor = self.forget(x, heads)
        return gates


def init_decay_times(shortest: float, longest: float) -> Callable[[Tensor], object]:
    """Return an initializer of biases [H] with which heads forget to 1/e in `shortest` … `longest` tokens.

    The times are spaced evenly in logarithms and hold if the projection is zero: σ(b) = exp(−1/time).
    """

    def init(bias: Tensor) -> None:
        times = torch.linspace(math.log(shortest), math.log(longest), len(bias), dtype=torch.float64).exp()
        bias.copy_(-torch.expm1(1 / times).log())

    return init

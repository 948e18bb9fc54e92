"""CDAPE (DAPE V2): attention scores as a feature map, processed by two convolutions along the keys.

    S + B + Conv2(LeakyReLU(Conv1(tril([S, B]))))        kernels 1×k over heads as channels

The published module cuts its hidden map at the last column T − 1, so its last k//2 rows depend on T. Hidden values to
the right of column T − 1 are padding there, but nonzero in a longer sequence. Here the key axis is padded with zeros,
so row i never depends on T. It equals the published module on every other row, and cached decoding equals the full
pass. The left edge is the published one: columns before 0 are padding for both convolutions. If a row contains several
documents, columns before the row's document are padding too.

B batch, H heads, R rows, C key columns, W width, k kernel size, p = k//2.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.position.base import ConvolutionParameters
from megatron.position.facts import AttentionDims, OptionError, ProcessorCost
from megatron.position.numerics import is_sharded_by_zero3, promote_to_float32, toeplitz
from megatron.position.processor import BiasContribution, Processor
from megatron.position.token_range import ALL_HEADS, TokenRange, build_causal_mask

ALL_CHANNELS = slice(None)


def _cast_saturating(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast x to a type, clamping values that overflow float16.

    −r1·n² exceeds 65,504 at n = 256, and an infinite bias would become NaN in the convolutions. Other types have the
    range of float32.
    """
    if dtype == torch.float16:
        limits = torch.finfo(dtype)
        x = x.clamp(limits.min, limits.max)
    return x.to(dtype)


def _activate(x: Tensor, dtype: torch.dtype) -> Tensor:
    return F.leaky_relu(_cast_saturating(x, dtype), inplace=True)


class KeyConvolution(nn.Module):
    """1×k convolution along the keys, which can be applied to a part of its input channels.

    Channels without a batch dimension (the bias) are convolved once, not once per sequence.

    Args:
        zero: initialize to zero instead of as torch.nn.Conv2d.
    """

    def __init__(self, inputs: int, outputs: int, kernel_size: int, *, zero: bool = False) -> None:
        super().__init__()
        self.zero = zero
        self.padding = (0, kernel_size // 2)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as torch.nn.Conv2d, like the published module."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        with torch.no_grad():
            nn.init.uniform_(self.weight, -bound, bound)
            nn.init.uniform_(self.bias, -bound, bound)
            if self.zero:  # after the draws, so that the random state does not depend on it
                nn.init.zeros_(self.weight)
                nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor | None, inputs: slice = ALL_CHANNELS, outputs: slice = ALL_CHANNELS, constant: bool = True
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Convolve some input channels [B, inputs, R, C] into some output channels [B, outputs, R, C].

        The results for all inputs add up to the full convolution; `constant` selects which call adds the constant. If x
        is None, returns the weight and the constant themselves (copies under ZeRO-3, which frees the parameters after
        this call).

        Channels are innermost in memory, also in the result, because convolutions with few channels are fastest in this
        layout.
        """
        if x is None:
            is_divided = is_sharded_by_zero3(self.weight)
            return (self.weight.clone(), self.bias.clone()) if is_divided else (self.weight, self.bias)
        weight = self.weight[outputs, inputs].to(x.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, weight, self.bias[outputs].to(x.dtype) if constant else None, padding=self.padding)


class Cdape(Processor):
    formula = "S + B + Conv2(LeakyReLU(Conv1(tril([S, B])))), kernels 1×k along keys"
    parameters_summary = "Conv1 [W, 2H, 1, k] + [W], Conv2 [H, W, 1, k] + [H], initialized like torch.nn.Conv2d"
    source = "DAPE V2, equation 5 and appendix N; residual_bias: false is equation 2"
    advice = (
        "On kerple_log it is the best method of DAPE V2 within and beyond the training length (section 4.1). It also "
        "improves rotary (section 4.4). Start with kernel_size 3; the best size depends on task and data (sections 4.6 "
        "and 4.7). A step takes 33% longer than with kerple_log alone at 350M, and 12% at 6.7B (appendix H)."
    )
    other_names = ("dapev2", "capev2")
    cost = ProcessorCost(
        num_parameters=lambda dims, options, has_bias: (
            options["width"] * (dims.num_heads * (3 if has_bias else 2) * options["kernel_size"] + 1) + dims.num_heads
        ),
        num_products=lambda dims, options: 2.0 * options["kernel_size"] * dims.num_heads * options["width"],
        width=lambda options: options["width"],
        left_context=lambda options: options["kernel_size"] // 2,
    )

    def __init__(
        self,
        dims: AttentionDims,
        *,
        has_bias: bool,
        width: int = 32,
        kernel_size: int = 3,
        residual_bias: bool = True,
        zero_init: bool = False,
    ) -> None:
        """
        Args:
            width: hidden channels W (DAPE's D_DAPE).
            kernel_size: keys per convolution kernel, odd; 1 is `dape`.
            residual_bias: also add the bias to the result (equation 5 of DAPE V2); if false, the bias enters only
                through the network (equation 2).
            zero_init: start exactly as S + B, so that a processor can be added to a trained model without changing its
                loss (`finetune: true`).
        """
        super().__init__(dims, has_bias=has_bias)
        if width < 1:
            raise OptionError("width", f"is {width}; it must be at least 1")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise OptionError("kernel_size", f"is {kernel_size}; it must be a positive odd number: 1, 3, 5, 7 …")
        self.width, self.kernel_size, self.residual_bias = width, kernel_size, residual_bias
        self.left_context = kernel_size // 2  # hidden values there are not zero, although their inputs are
        heads = dims.num_heads
        self.score_channels, self.bias_channels = slice(0, heads), slice(heads, 2 * heads)  # Conv1's input channels
        self.hidden = KeyConvolution(2 * heads if has_bias else heads, width, kernel_size)
        # With zero_init the processor starts as the identity, so a trained model keeps its loss.
        self.output = KeyConvolution(width, heads, kernel_size, zero=zero_init)

    def has_effect(self) -> bool:
        return bool(self.output.weight.any() or self.output.bias.any()) or (self.has_bias and not self.residual_bias)

    def list_growing_fan_ins(self) -> list[tuple[nn.Parameter, Literal["hidden", "heads"]]]:
        return [(self.hidden.weight, "heads")]

    def kernel_parameters(self) -> ConvolutionParameters:
        (weight1, bias1), (weight2, bias2) = self.hidden(None), self.output(None)
        return ConvolutionParameters(weight1, bias1, weight2, bias2, self.residual_bias)

    def bias_contribution(self, table: Tensor) -> BiasContribution | None:
        # The bias half of Conv1, including its constant, is a function of n unless a tap crosses the left edge: the key
        # axis of a row in reverse is the distance axis of the table, and the zeros of the triangle are at n < 0.
        table = table.to(torch.promote_types(table.dtype, self.hidden.weight.dtype))
        flipped_table = F.pad(table.flip(-1), (0, self.left_context))
        by_distance = self.hidden(flipped_table[None, :, None], self.bias_channels)[0, :, 0].flip(-1)
        rows, strip = TokenRange(0, table.shape[-1]), TokenRange(0, 2 * self.left_context)
        visible_bias = toeplitz(table, rows, strip).masked_fill(~build_causal_mask(rows, strip, table.device), 0)
        # Without left context the strip and the edge have no columns.
        edge = (
            self.hidden(visible_bias[None], self.bias_channels)[0, ..., : self.left_context]
            if self.left_context
            else by_distance[:, :, None][..., :0]
        )
        return BiasContribution(by_distance, edge)

    def forward(
        self,
        scores: Tensor,
        bias: Tensor | None,
        visible: Tensor,
        heads: slice = ALL_HEADS,
        bias_contribution: Tensor | None = None,
        first_columns: Tensor | None = None,
    ) -> Tensor:
        columns, extension = scores.shape[-1], (0, self.left_context)
        hidden = self.hidden(
            F.pad(scores.masked_fill(~visible, 0), extension), self.score_channels, constant=bias is None
        )
        if bias is None:
            hidden = _activate(hidden, scores.dtype)
        else:
            if bias_contribution is None:
                visible_bias = _cast_saturating(bias, scores.dtype).masked_fill(~visible, 0)
                bias_contribution = self.hidden(F.pad(visible_bias, extension), self.bias_channels)
            # Channels last in shape too: otherwise the sum of the gradient over the batch is slow.
            both = hidden.movedim(1, -1) + _cast_saturating(bias_contribution, scores.dtype).movedim(-3, -1)
            hidden = _activate(both, scores.dtype).movedim(-1, 1)
        if first_columns is not None and self.left_context:
            # Masking the inputs is not enough: Conv2 would see hidden values computed from the edge entries.
            before = torch.arange(hidden.shape[-1], device=hidden.device) < first_columns[:, None, :, None]
            hidden = hidden.masked_fill(before, 0)
        processed = _cast_saturating(self.output(hidden, outputs=heads)[..., :columns], scores.dtype)
        own = scores[:, heads]
        result = promote_to_float32(own)
        # Add in place to the float32 copy: two more tensors of this size would set the peak memory of a row block.
        result = result + processed if result is own else result.add_(processed)
        return result.add_(bias[..., heads, :, :]) if bias is not None and self.residual_bias else result

    def flops_per_score(self) -> float:
        # The bias half of Conv1 is computed once per batch and not counted.
        return 4.0 * self.kernel_size * self.dims.num_heads * self.width

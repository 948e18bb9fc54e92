"""Operations between a layer's matrix products: our kernels on a GPU, PyTorch's operations elsewhere.

On a GPU such operations read and write activations and do little else, and each is a launch. So `kernels/layer` joins
them: a branch's bias, the residual sum and the next norm are one kernel, the feed-forward layer's bias and activation
another. Gradients of biases and norms come out of the same reading. A CPU computes the operations one by one, with the
numbers that it always had; so does a GPU with `layer_kernels: false`, for float64, and for weights that ZeRO 3 divides,
which only a module's own call gathers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.model.megatron_core import TransformerConfig
from megatron.position.numerics import is_divided_by_zero_3

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_NORM_WIDTH = 16384
"""Widest row of a norm that the kernels hold in registers."""


@dataclass
class LayerConfig(TransformerConfig):
    """megatron-core's configuration of a model, and what our layers read besides."""

    layer_kernels: bool = True
    """True if a GPU computes with the kernels."""
    activation: str = "gelu"
    """Name of the activation without its gate, as `kernels/layer/activation.py` has it."""


def runs_kernels(x: Tensor) -> bool:
    """Return whether the device of a tensor runs kernels."""
    return x.is_cuda


def can_use_kernels(config: TransformerConfig, x: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether the kernels compute with a tensor and parameters."""
    if not (runs_kernels(x) and x.dtype in KERNEL_DTYPES and getattr(config, "layer_kernels", False)):
        return False
    return not any(parameter is not None and is_divided_by_zero_3(parameter) for parameter in parameters)


class PendingSum(NamedTuple):
    """Hidden states [T, B, D] that are still to be summed up: residual + multiplier · (branch + bias)."""

    residual: Tensor
    branch: Tensor
    bias: Tensor | None
    multiplier: float

    def compute(self, config: TransformerConfig) -> Tensor:
        """Return the sum."""
        residual, branch, bias, multiplier = self
        if can_use_kernels(config, residual, bias) and residual.shape[-1] <= MAX_NORM_WIDTH:
            from kernels.layer.norm import add

            return add(branch, bias, residual, scale=multiplier)
        if bias is not None:
            branch = branch + bias
        if multiplier != 1.0:
            branch = branch * multiplier
        return residual + branch


def normalize(config: TransformerConfig, hidden: Tensor | PendingSum, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return hidden states, summed up, and their norm.

    The states are to be read from what this returns: then their gradient joins the norm's in one kernel.
    """
    if isinstance(hidden, PendingSum):
        if _fits(config, hidden.residual, norm):
            return _add_and_normalize(hidden.branch, hidden.bias, hidden.residual, norm, hidden.multiplier)
        hidden = hidden.compute(config)
    elif _fits(config, hidden, norm):
        return _add_and_normalize(hidden, None, None, norm)
    return hidden, norm(hidden)


def normalize_branch(config: TransformerConfig, branch: Tensor, bias: Tensor | None, norm: nn.Module) -> Tensor:
    """Return norm(branch + bias)."""
    if _fits(config, branch, norm):
        return _add_and_normalize(branch, bias, None, norm)[1]
    normed: Tensor = norm(branch if bias is None else branch + bias)
    return normed


def _fits(config: TransformerConfig, x: Tensor, norm: nn.Module) -> bool:
    """Return whether a kernel computes a norm of x."""
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or x.shape[-1] > MAX_NORM_WIDTH:
        return False
    return can_use_kernels(config, x, norm.weight)


def _add_and_normalize(
    branch: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Any, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    from kernels.layer.norm import add_norm

    shift, centers = getattr(norm, "bias", None), isinstance(norm, nn.LayerNorm)
    return add_norm(branch, bias, residual, norm.weight, shift, epsilon=norm.eps, centers=centers, scale=scale)


def multiply_matrix(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x·Wᵀ + bias, the bias without a gradient: the product's epilogue adds it, and another kernel sums up its
    gradient."""
    return F.linear(x, weight, None if bias is None else bias.detach())

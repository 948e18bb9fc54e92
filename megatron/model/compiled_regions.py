"""Operations between a layer's matrix products, compiled into few kernels by torch.compile.

On a GPU such operations read and write activations and do little else, and each is a launch. So the functions here are
regions: in training on a GPU torch.compile makes one or two kernels of each in either direction, the gradients of
biases and norms among them. Evaluation, generation and CPUs call the same functions, or PyTorch's modules, eagerly. So
do a GPU with `compile_regions: false` and weights that ZeRO 3 divides, which only a module's own call gathers. Dropout
is never inside a region, so it draws the random numbers that it draws without them.

Regions are functions of tensors and plain values, not methods: all layers share one compilation for each shape.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.model.megatron_core import TransformerConfig
from megatron.position.numerics import is_divided_by_zero_3, soft_cap

logger = logging.getLogger(__name__)

COMPILE_OPTIONS: dict[str, Any] = {"options": {"compile_threads": 1, "deterministic": True}}
"""Arguments of torch.compile. A handful of kernels is not worth a pool of compilers in every rank. Deterministic: nothing that
changes sums is chosen by timing, so a resumed run computes what the uninterrupted one computes."""
MAX_COMPILATIONS = 64
"""Shapes of a region that Dynamo compiles before it gives up; its default of 8 is few for stages of many lengths."""


@dataclass
class LayerConfig(TransformerConfig):
    """megatron-core's configuration of a model, and what our layers read besides."""

    compile_regions: bool = True
    """True if training on a GPU compiles the regions."""


class PendingSum(NamedTuple):
    """Hidden states [T, B, D] that are still to be summed up: residual + multiplier · (branch + bias)."""

    residual: Tensor
    branch: Tensor
    bias: Tensor | None
    multiplier: float

    def compute(self, config: TransformerConfig) -> Tensor:
        """Return the sum."""
        total: Tensor = choose_region(add, config, self.residual, self.bias)(*self)
        return total


# -------------------------------------------------------------------------------------------------------------- regions


def add(residual: Tensor, branch: Tensor, bias: Tensor | None, multiplier: float) -> Tensor:
    """Return residual + multiplier · (branch + bias)."""
    if bias is not None:
        branch = branch + bias
    if multiplier != 1.0:
        branch = branch * multiplier
    return residual + branch


def normalize_rows(
    x: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor | None, epsilon: float, centers: bool
) -> Tensor:
    """Return the norm of x + bias over the last dimension: a layernorm if it centers, else an RMS norm."""
    x = x if bias is None else x + bias
    if centers:
        return F.layer_norm(x, weight.shape, weight, shift, epsilon)
    return F.rms_norm(x, weight.shape, weight, epsilon)


def add_and_normalize(
    residual: Tensor, branch: Tensor, bias: Tensor | None, multiplier: float, *norm: Any
) -> tuple[Tensor, Tensor]:
    """Return what `add` returns, and its norm; `norm` is what `normalize_rows` takes after the bias."""
    total = add(residual, branch, bias, multiplier)
    return total, normalize_rows(total, None, *norm)


def activate(x: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor], gated: bool) -> Tensor:
    """Return activation(x + bias), or activation(gate) · up if x + bias is [gate, up]."""
    x = x if bias is None else x + bias
    if not gated:
        return activation(x)
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


def split_heads(
    mixed: Tensor, bias: Tensor | None, groups: int, head_dim: int, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous queries [T, B, g·n, d], keys and values [T, B, g, d] of mixed + bias [T, B, g·(n + 2)·d].

    cos, sin: [T, r], by which queries and keys are rotated (`Encoding.get_turns`), or None.
    """
    mixed = (mixed if bias is None else mixed + bias).unflatten(-1, (groups, -1))
    query, key, value = mixed.split([mixed.shape[-1] - 2 * head_dim, head_dim, head_dim], dim=-1)
    query = query.reshape(*query.shape[:2], -1, head_dim)
    if cos is not None and sin is not None:
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    return query.contiguous(), key.contiguous(), value.contiguous()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x·cos + swap(x)·sin of the first r dimensions of x [T, B, h, d], swap exchanging their halves."""
    turned = x[..., : cos.shape[-1]].to(cos.dtype)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None, None] + torch.cat([second, first], dim=-1) * sin[:, None, None]
    return torch.cat([turned.to(x.dtype), x[..., cos.shape[-1] :]], dim=-1)


def compute_log_z(logits: Tensor, labels: Tensor, first: int, cap: float | None) -> tuple[Tensor, Tensor]:
    """Return log Z, and the logit of each label, 0 for one that is not among these: float32 [B, T] each.

    Compiled, it writes nothing of the logits' size but their gradient, in their own type.

    Args:
        logits: [T, B, V] in any type, before the soft cap.
        labels: int64 [B, T].
        first: the first token of a rank's part of the vocabulary.
        cap: bound of the logits, None for none.
    """
    values = soft_cap(logits.float(), cap)
    largest = values.detach().amax(-1, keepdim=True)
    log_z = (values - largest).exp().sum(-1).log() + largest[..., 0]
    # Not by gather, whose gradient would be written out in float32.
    is_label = torch.arange(first, first + logits.shape[-1], device=logits.device) == labels.t()[..., None]
    return log_z.t(), torch.where(is_label, values, 0.0).sum(-1).t()


# -------------------------------------------------------------------------------------------------- how regions are run


def runs_compiled(x: Tensor) -> bool:
    """Return whether regions are compiled for the device of a tensor."""
    return x.is_cuda


def can_compile(config: TransformerConfig, x: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether a region of a tensor and parameters is to be compiled."""
    if not (runs_compiled(x) and torch.is_grad_enabled() and getattr(config, "compile_regions", False)):
        return False
    return not any(parameter is not None and is_divided_by_zero_3(parameter) for parameter in parameters)


@cache
def compile_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a region that is compiled when it is called with new shapes, and is eager once that has failed."""
    # Only now: Dynamo and Inductor take seconds to import.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_COMPILATIONS)
    torch._functorch.config.force_non_lazy_backward_lowering = True  # a backward pass that fails does so here
    compiled = torch.compile(function, fullgraph=True, dynamic=False, **COMPILE_OPTIONS)
    is_eager = False

    def run(*arguments: Any) -> Any:
        nonlocal is_eager
        if not is_eager:
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.TorchDynamoException as error:
                is_eager = True
                reason = str(error).strip().partition("\n")[0]
                logger.warning("compile_regions: %s is left to PyTorch's operations: %s", function.__name__, reason)
        return function(*arguments)

    return run


def choose_region(
    function: Callable[..., Any], config: TransformerConfig, x: Tensor, *parameters: Tensor | None
) -> Callable[..., Any]:
    """Return a region, compiled if `can_compile`."""
    return compile_region(function) if can_compile(config, x, *parameters) else function


def normalize(config: TransformerConfig, hidden: Tensor | PendingSum, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return hidden states, summed up, and their norm."""
    if not isinstance(hidden, PendingSum):
        return hidden, normalize_branch(config, hidden, None, norm)
    if _can_compile_norm(config, hidden.residual, norm, hidden.bias):
        total, normed = compile_region(add_and_normalize)(*hidden, *_read_norm(norm))
        return total, normed
    total = hidden.compute(config)
    return total, norm(total)


def normalize_branch(config: TransformerConfig, branch: Tensor, bias: Tensor | None, norm: nn.Module) -> Tensor:
    """Return norm(branch + bias)."""
    compiles = _can_compile_norm(config, branch, norm, bias)
    normed: Tensor = (
        compile_region(normalize_rows)(branch, bias, *_read_norm(norm))
        if compiles
        else norm(branch if bias is None else branch + bias)
    )
    return normed


def _can_compile_norm(config: TransformerConfig, x: Tensor, norm: nn.Module, bias: Tensor | None) -> bool:
    return isinstance(norm, nn.LayerNorm | nn.RMSNorm) and can_compile(config, x, norm.weight, bias)


def _read_norm(norm: Any) -> tuple[Tensor, Tensor | None, float, bool]:
    """What `normalize_rows` takes after the bias."""
    return norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.LayerNorm)

"""Regions of a training step that torch.compile fuses: everything but attention.

On a GPU, biases, residual sums, norms, activations, rotation and the loss are bound by memory and launches. Each layer
therefore has two regions, before and after its attention, and the loss is a third. torch.compile generates the kernels
of their forward and backward passes.

The regions are the layer's own code (`layer.py`), so there are no other formulas. Evaluation, generation and CPUs run
it eagerly; so does a GPU with `compile_regions: false`, with hidden dropout, and where tensor parallelism or ZeRO 3
divides a layer's weights. All layers share one compilation, of the first step.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.model.megatron_core import TransformerConfig
from megatron.position.numerics import soft_cap

logger = logging.getLogger(__name__)

COMPILE_ARGUMENTS: dict[str, Any] = {"options": {"compile_threads": 1, "deterministic": True}}
"""A handful of kernels is not worth a pool of compilers in every rank. Deterministic: nothing that changes sums is
chosen by timing, so a resumed run computes what the uninterrupted one computes."""
MAX_COMPILATIONS = 64
"""Variants of a region, of other shapes or kinds of layers, that Dynamo compiles. Its default of 8 is few for training
in stages of many lengths."""

MAX_REASON_CHARS = 300
"""Characters of a compiler's message to show."""

IGNORED_WARNINGS = ("TensorFloat32 tensor cores", "`torch.jit.script_method` is deprecated")
"""Beginnings of what compiling warns of: that float32 is not rounded to TF32, which is meant, and of PyTorch's own
code."""


@dataclass
class LayerConfig(TransformerConfig):
    """megatron-core's configuration of a model, and what our layers read besides."""

    compile_regions: bool = True
    """True if training on a GPU compiles the regions."""


def runs_compiled(x: Tensor) -> bool:
    """Return whether regions are compiled for the device of a tensor."""
    return x.is_cuda


def can_compile(config: TransformerConfig, x: Tensor) -> bool:
    """Return whether a region that reads a tensor is to be compiled. Not under a `TorchDispatchMode`, such as PyTorch's
    counter of operations: Dynamo refuses to compile there, and would never compile the region again."""
    is_wanted = runs_compiled(x) and torch.is_grad_enabled() and getattr(config, "compile_regions", False)
    return is_wanted and torch._C._len_torch_dispatch_stack() == 0


def ignore_compiler_warnings() -> None:
    """Silence what compiling warns of and no user can act on."""
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message)


@cache
def compile_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a region that compiles for each new shape. After a failed compilation it runs eagerly."""
    # Only now: Dynamo and Inductor take seconds to import.
    ignore_compiler_warnings()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_COMPILATIONS)
    torch._functorch.config.force_non_lazy_backward_lowering = True  # a backward pass that fails does so here
    compiled = torch.compile(function, fullgraph=True, dynamic=False, **COMPILE_ARGUMENTS)
    is_eager = False

    def run(*arguments: Any) -> Any:
        nonlocal is_eager
        if not is_eager:
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.TorchDynamoException as error:
                is_eager = True
                reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
                logger.warning("compile_regions: %s is left to PyTorch's operations: %s", function.__name__, reason)
        return function(*arguments)

    return run


def choose_region(function: Callable[..., Any], *, compiles: bool) -> Callable[..., Any]:
    """Return a region, compiled or as it is."""
    return compile_region(function) if compiles else function


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

"""Megatron-core's configuration of the layers, and the regions of a training step that torch.compile fuses.

The regions are everything but attention. On a GPU, biases, residual sums, norms, activations, rotation and the loss are
limited by memory bandwidth and kernel launches. One region therefore reaches from each attention to the next, others
from the first and the last attention to the ends of the layers, and the loss is one more. torch.compile generates the
kernels of their forward and backward passes.

The regions are the layer's own code (`layer.py`), so no formula exists twice. Evaluation, generation and CPUs run it
eagerly. So does a GPU with `compile_regions: false`, with hidden dropout, or if tensor parallelism or ZeRO 3 shards a
layer's weights. All layers share one compilation, done in the first step.
"""

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.distributed.mesh import ParallelSizes
from megatron.model.core_modules import TransformerConfig
from megatron.model.mup import MupScaling
from megatron.options.model import (
    GATED_ACTIVATIONS,
    InitMethod,
    ModelOptions,
    get_ffn_hidden_size,
    get_head_dim,
    get_norm_epsilon,
    get_num_kv_heads,
)
from megatron.position.numerics import soft_cap

logger = logging.getLogger(__name__)

COMPILE_ARGUMENTS: dict[str, Any] = {"options": {"compile_threads": 1, "deterministic": True}}
"""Options of torch.compile. The few kernels do not justify a pool of compiler processes in every rank. Deterministic:
no reduction is chosen by timing, so a resumed run computes the same as an uninterrupted one.
"""
MAX_COMPILATIONS = 64
"""Maximum number of compiled variants of a region, for other shapes or layer types. Dynamo's default of 8 is too
low for training in stages of many lengths.
"""

MAX_REASON_CHARS = 300
"""Maximum number of characters of a compiler's message to show."""

IGNORED_WARNINGS = ("TensorFloat32 tensor cores", "`torch.jit.script_method` is deprecated")
"""Beginnings of compiler warnings to ignore: float32 is deliberately not rounded to TF32, and the other concerns
PyTorch's own code.
"""


@dataclass
class LayerConfig(TransformerConfig):
    """megatron-core's configuration of a model, with additional fields that our layers read."""

    compile_regions: bool = True
    """True if training on a GPU compiles the regions."""


def runs_compiled(x: Tensor) -> bool:
    """Return True if regions are compiled for the device of a tensor."""
    return x.is_cuda


def can_compile(config: TransformerConfig, x: Tensor) -> bool:
    """Return True if a region that reads a tensor is to be compiled.

    Under a `TorchDispatchMode`, such as PyTorch's FLOP counter, regions run eagerly: Dynamo refuses to compile there
    and would never compile the region again.
    """
    is_wanted = runs_compiled(x) and torch.is_grad_enabled() and getattr(config, "compile_regions", False)
    return is_wanted and torch._C._len_torch_dispatch_stack() == 0


def ignore_compiler_warnings() -> None:
    """Silence compiler warnings on which users cannot act."""
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message)


@cache
def compile_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a region that compiles for each new shape. After a failed compilation it runs eagerly."""
    # Imported late: Dynamo and Inductor take seconds to import.
    ignore_compiler_warnings()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_COMPILATIONS)
    torch._functorch.config.force_non_lazy_backward_lowering = True  # so that its errors are caught here
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
                logger.warning("compile_regions: %s runs without compilation: %s", function.__name__, reason)
        return function(*arguments)

    return run


def choose_region(function: Callable[..., Any], *, compiles: bool) -> Callable[..., Any]:
    """Return a function compiled as a region, or unchanged."""
    return compile_region(function) if compiles else function


def compute_log_z(logits: Tensor, labels: Tensor, first: int, cap: float | None) -> tuple[Tensor, Tensor]:
    """Return log Z, and the logit of each label or 0 for labels of other ranks: float32 [B, T] each.

    The compiled region writes nothing of the logits' size except their gradient, in their own data type.

    Args:
        logits: [T, B, V] in any data type, before the soft cap.
        labels: int64 [B, T].
        first: first token of a rank's vocabulary shard.
        cap: bound of the logits, or None.
    """
    values = soft_cap(logits.float(), cap)
    largest = values.detach().amax(-1, keepdim=True)
    log_z = (values - largest).exp().sum(-1).log() + largest[..., 0]
    # Avoid gather: its gradient would be written out in float32.
    is_label = torch.arange(first, first + logits.shape[-1], device=logits.device) == labels.t()[..., None]
    return log_z.t(), torch.where(is_label, values, 0.0).sum(-1).t()


Init = Callable[[Tensor], Tensor]


def init_method(name: InitMethod, *, std: float, num_layers: int, hidden_size: int) -> Init:
    """Return the function that initializes a weight in place.

    normal: N(0, std²). scaled_normal: N(0, std²/2L) (Radford et al. 2019). small_init: N(0, 2/5D) (Nguyen & Salazar
    2019). wang_init: N(0, (2/L√D)²) (Wang & Komatsuzaki 2021). xavier_*: Glorot & Bengio 2010.
    """
    deviations = {
        "normal": std,
        "scaled_normal": std / math.sqrt(2 * num_layers),
        "small_init": math.sqrt(2 / (5 * hidden_size)),
        "wang_init": 2 / num_layers / math.sqrt(hidden_size),
    }
    if name in deviations:
        return lambda weight: nn.init.normal_(weight, 0.0, deviations[name])
    return {"xavier_uniform": nn.init.xavier_uniform_, "xavier_normal": nn.init.xavier_normal_}[name]


def gelu_tanh(x: Tensor) -> Tensor:
    """Return x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu, "silu": F.silu, "geglu": F.gelu, "geglu_tanh": gelu_tanh,
    "swiglu": F.silu,
}  # fmt: skip


def build_transformer_config(
    model: ModelOptions, mup: MupScaling | None, dtype: torch.dtype, sizes: ParallelSizes
) -> LayerConfig:
    """Return megatron-core's configuration of a model.

    Weights are initialized on the CPU, so that they do not depend on the device.
    """
    layers = model.num_layers if mup is None else mup.base_layers
    width = model.mup_base_hidden_size or model.hidden_size  # muP scales the base model's deviations

    def init(name):  # type: ignore[no-untyped-def]
        return init_method(name, std=model.init_method_std, num_layers=layers, hidden_size=width)

    return LayerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=get_num_kv_heads(model),
        kv_channels=get_head_dim(model),
        ffn_hidden_size=get_ffn_hidden_size(model),
        normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        layernorm_epsilon=get_norm_epsilon(model, model.norm),
        activation_func=ACTIVATIONS[model.activation],
        gated_linear_unit=model.activation in GATED_ACTIVATIONS,
        add_bias_linear=model.use_bias_in_mlp,  # `SelfAttention` has its own setting
        init_method=init(model.init_method),
        output_layer_init_method=init(model.output_layer_init_method),
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        use_cpu_initialization=True,
        tensor_model_parallel_size=sizes.tensor,
        params_dtype=dtype,
        compile_regions=model.compile_regions,
        # megatron-core's fusions stay off: compiled regions replace them.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],  # no graphs; megatron-core's default, "full", is deprecated and causes a warning
    )

"""ModelOptions in megatron-core's terms: sizes, activations, and the initialisation of weights."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.distributed.mesh import ParallelSizes
from megatron.model.megatron_core import TransformerConfig
from megatron.options.model import GATED, InitMethod, ModelOptions, ffn_hidden_size, num_kv_heads

Init = Callable[[Tensor], Tensor]


def init_method(name: InitMethod, *, std: float, num_layers: int, hidden_size: int) -> Init:
    """The function that fills a weight in place.

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
    """x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu, "silu": F.silu, "geglu": F.gelu, "swiglu": F.silu
}  # fmt: skip


def transformer_config(model: ModelOptions, dtype: torch.dtype, sizes: ParallelSizes) -> TransformerConfig:
    """megatron-core's configuration of a model; weights are initialised on CPU, so that every device starts alike."""

    def init(name):  # type: ignore[no-untyped-def]
        return init_method(name, std=model.init_method_std, num_layers=model.num_layers, hidden_size=model.hidden_size)

    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=num_kv_heads(model),
        ffn_hidden_size=ffn_hidden_size(model),
        normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        layernorm_epsilon=model.layernorm_epsilon if model.norm == "layernorm" else model.rms_norm_epsilon,
        activation_func=ACTIVATIONS[model.activation],
        gated_linear_unit=model.activation in GATED,
        add_bias_linear=model.use_bias_in_mlp,  # `SelfAttention` has its own
        init_method=init(model.init_method),
        output_layer_init_method=init(model.output_layer_init_method),
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        use_cpu_initialization=True,
        tensor_model_parallel_size=sizes.tensor,
        params_dtype=dtype,
        # Fusions that need CUDA or change the numbers between devices stay off.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],  # no graphs: its default, "full", is deprecated, and it warns of that
    )

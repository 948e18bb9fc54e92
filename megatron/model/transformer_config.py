"""ModelOptions in megatron-core's terms."""

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.distributed.mesh import Sizes
from megatron.model.initialization import init_method
from megatron.model.megatron_core import TransformerConfig
from megatron.options.model import GATED, ModelOptions, ffn_hidden_size, num_kv_heads


def gelu_tanh(x: Tensor) -> Tensor:
    """x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu, "silu": F.silu, "geglu": F.gelu, "swiglu": F.silu
}  # fmt: skip


def transformer_config(model: ModelOptions, dtype: torch.dtype, sizes: Sizes) -> TransformerConfig:
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

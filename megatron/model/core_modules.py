"""Single import point of megatron-core's model classes, imported without PyTorch's compiler."""

from megatron.utils.imports import trim_imports

with trim_imports():
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        mappings,
        vocab_parallel_cross_entropy,
    )
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

_find_tensor_group = mappings.get_tensor_model_parallel_group_if_none
# Without torch's default group, megatron-core's function also drops a group that it is given, such as the embedding's.
mappings.get_tensor_model_parallel_group_if_none = lambda tp_group, *args, **options: (
    _find_tensor_group(tp_group, *args, **options) if tp_group is None else tp_group
)

__all__ = [
    "MLP",
    "ColumnParallelLinear",
    "GPTModel",
    "IdentityOp",
    "LocalSpecProvider",
    "MegatronModule",
    "ModuleSpec",
    "RowParallelLinear",
    "SelfAttention",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "get_gpt_layer_local_spec",
    "vocab_parallel_cross_entropy",
]

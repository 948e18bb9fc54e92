"""The transformer layer: megatron-core's modules, put together in series or in parallel.

GPT-NeoX's parallel residual (`gpt_j_residual`), which megatron-core's layer lacks, is one line here:

    series    x ← x + attention(norm1(x));  x ← x + mlp(norm2(x))
    parallel  x ← x + attention(norm1(x)) + mlp(norm2(x))          norm2 = norm1 with gpt_j_tied

megatron-core's modules hold the weights and compute where ranks share a layer. Their forward passes ask at each call
for what is never there in a GPT that is trained (inference engines, offloading, packed sequences, CUDA graphs), and
their linear layer is an autograd function in Python: for a small model that is half of the host's time. So attention,
MLP and linear layers have forward passes of their own here, with the same operations in the same order.
"""

from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from megatron.model.attention import AttentionContext
from megatron.model.megatron_core import (
    MLP,
    ColumnParallelLinear,
    RowParallelLinear,
    SelfAttention,
    TransformerConfig,
    TransformerLayer,
)


def is_held_whole(linear: ColumnParallelLinear | RowParallelLinear, weight: Tensor) -> bool:
    """Does this rank alone compute a linear layer? ZeRO 3 takes a weight away after its use: what autograd keeps of it
    must be the parameter itself, which megatron-core's function sees to, and not a view."""
    return linear.tp_group.size() == 1 and not hasattr(weight, "ds_id")


class ColumnLinear(ColumnParallelLinear):
    """megatron-core's linear layer whose outputs are divided among ranks."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x·Wᵀ, and the bias if it is not added here; see megatron-core."""
        weight = self.weight if weight is None else weight
        if not is_held_whole(self, weight):
            return super().forward(input_, weight, runtime_gather_output)
        output = F.linear(input_, weight)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class RowLinear(RowParallelLinear):
    """megatron-core's linear layer whose inputs are divided among ranks."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """x·Wᵀ, and the bias if it is not added here; see megatron-core."""
        if not is_held_whole(self, self.weight):
            return super().forward(input_)
        output = F.linear(input_, self.weight)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class BiasedSelfAttention(SelfAttention):
    """megatron-core's queries, keys, values and output projection, with biases or without, whatever the MLP has.

    `bias`, of all four, and `qkv_bias`, of the first three, come from the layer spec's params.
    """

    def __init__(self, config: TransformerConfig, *args: Any, bias: bool, qkv_bias: bool, **kwargs: Any) -> None:
        config = copy(config)
        config.add_bias_linear, config.add_qkv_bias = bias, qkv_bias
        super().__init__(config, *args, **kwargs)
        head = self.hidden_size_per_attention_head
        queries = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        self.group_sizes = [queries * head, head, head]
        """Of the queries, the key and the value that belong together."""

    def forward(self, hidden: Tensor, attention_mask: AttentionContext | None = None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [T, B, D] → [T or context.num_logits, B, D], and the bias that is to be added to them.

        megatron-core hands its attention module a mask and nothing else of ours, so the context takes its place.
        """
        mixed, _ = self.linear_qkv(hidden)
        mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        query, key, value = mixed.split(self.group_sizes, dim=3)
        query = query.reshape(*query.shape[:2], -1, self.hidden_size_per_attention_head)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(self.core_attention(query, key, value, attention_mask))
        return output


class FeedForward(MLP):
    """megatron-core's MLP."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states [T, B, D] → the same, and the bias that is to be added to them."""
        inner, bias = self.linear_fc1(hidden)
        if bias is not None:
            inner = inner + bias
        if self.config.gated_linear_unit:
            gate, inner = inner.chunk(2, dim=-1)
            inner = self.activation_func(gate) * inner
        else:
            inner = self.activation_func(inner)
        output: tuple[Tensor, Tensor | None] = self.linear_fc2(inner)
        return output


class GPTLayer(TransformerLayer):
    """One layer of the GPT; hidden states are [T, B, D].

    Built by megatron-core from the layer spec; `parallel`, `tied_norm` and `multiplier` (on what either branch adds,
    `megatron/model/mup.py`) come from the spec's params.
    """

    def __init__(
        self, *args: Any, parallel: bool = False, tied_norm: bool = False, multiplier: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.parallel, self.tied_norm, self.multiplier = parallel, tied_norm, multiplier

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As any module is called: megatron-core's layer looks for CUDA graphs first."""
        return nn.Module.__call__(self, *args, **kwargs)

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
        """residual + multiplier · dropout(output + bias)"""
        output, bias = output_and_bias
        if bias is not None:
            output = output + bias
        if self.multiplier != 1.0:
            output = output * self.multiplier
        if self.training and self.hidden_dropout > 0:
            output = F.dropout(output, self.hidden_dropout)
        return residual + output

    def forward(self, hidden: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Hidden states [T, B, D] → [T or context.num_logits, B, D]."""
        normed = self.input_layernorm(hidden)
        attended = self.self_attention(normed, attention_mask=context)
        if context is not None and context.num_logits is not None:
            hidden, normed = hidden[-context.num_logits :], normed[-context.num_logits :]
        after_attention = self._add(attended, hidden)
        if self.parallel:
            normed = normed if self.tied_norm else self.pre_mlp_layernorm(hidden)
        else:
            normed = self.pre_mlp_layernorm(after_attention)
        return self._add(self.mlp(normed), after_attention)


class OffStageLayer(nn.Module):
    """A layer of another stage. It is built and dropped at once: the layers after it then draw the random numbers that
    they would draw in the whole model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        GPTLayer(*args, **kwargs)

    def forward(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("this layer belongs to another stage")

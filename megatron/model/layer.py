"""Transformer layer: megatron-core's modules, combined in series or in parallel.

GPT-NeoX's parallel residual (`gpt_j_residual`), which megatron-core's layer lacks, is one line here:

    series    x ← x + attention(norm1(x));  x ← x + mlp(norm2(x))
    parallel  x ← x + attention(norm1(x)) + mlp(norm2(x))          norm2 = norm1 with gpt_j_tied
    post      x ← x + norm1(attention(x));  x ← x + norm2(mlp(x))                     (norm_placement)
    sandwich  x ← x + norm2(attention(norm1(x)));  x ← x + norm4(mlp(norm3(x)))       (norm_placement)

megatron-core's modules hold the weights, and compute if ranks share a layer. Their forward passes check at every call
for features that GPT training never uses (inference engines, offloading, packed sequences, CUDA graphs), and their
linear layer is an autograd function in Python. For a small model these take half of the host's time. Attention, MLP and
linear layers therefore have their own forward passes here, with the same operations in the same order.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from megatron.attention.backends.backend import needs_heads_first_layout
from megatron.model.attention import AttentionContext
from megatron.model.bias_gradient import add_bias, group_tokens
from megatron.model.core_modules import (
    MLP,
    ColumnParallelLinear,
    RowParallelLinear,
    SelfAttention,
    TransformerConfig,
    TransformerLayer,
)
from megatron.model.layer_config import can_compile, choose_region
from megatron.position.numerics import is_sharded_by_zero3, promote_to_float32

Heads = tuple[Tensor, ...]
"""Queries [T, B, h, d], keys and values [T, B, g, d], or one tensor [T, B, g·(n + 2)·d] that holds all three."""
Rotation = tuple[Tensor, Tensor]
"""cos and sin [T, r], see `Encoding.get_cos_sin`."""


def recompute_in_backward(function: Callable[..., Tensor], *arguments: Any, draws: bool) -> Tensor:
    """Call a function that is recomputed in the backward pass, and return its result.

    Set `draws` if the function uses random numbers, so that torch's random states are saved and restored. Otherwise
    this is skipped, as is the comparison of shapes: both would take as much host time as a layer's operations.
    """
    options: dict[str, Any] = {"preserve_rng_state": draws, "determinism_check": "none"}
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, **options)
    return result


def is_unsharded(module: "ColumnLinear | RowLinear", weight: Tensor) -> bool:
    """Return True if this rank alone computes a linear layer.

    ZeRO 3 releases a weight after use. Autograd must then save the parameter itself instead of a view, as
    megatron-core's function does.
    """
    return module.is_on_one_rank and not is_sharded_by_zero3(weight)


class ColumnLinear(ColumnParallelLinear):
    """megatron-core's linear layer with outputs sharded over ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Dynamo compares objects that several modules share, such as process groups, in Python at each call.
        self.is_on_one_rank = self.tp_group.size() == 1

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return x·Wᵀ, and the bias if it is not added here; see megatron-core."""
        weight = self.weight if weight is None else weight
        if not is_unsharded(self, weight):
            return super().forward(input_, weight, runtime_gather_output)
        output = linear(input_, weight)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class RowLinear(RowParallelLinear):
    """megatron-core's linear layer with inputs sharded over ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Dynamo compares objects that several modules share, such as process groups, in Python at each call.
        self.is_on_one_rank = self.tp_group.size() == 1

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return x·Wᵀ, and the bias if it is not added here; see megatron-core."""
        if not is_unsharded(self, self.weight):
            return super().forward(input_)
        output = linear(input_, self.weight)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class BiasedSelfAttention(SelfAttention):
    """megatron-core's queries, keys, values and output projection, with biases independent of the MLP's.

    Args:
        bias: True if all four projections have biases.
        qkv_bias: True if queries, keys and values have biases.
        build_qk_norm: function that builds a norm for a number of heads.
        output_gates: number of gates on a token's attention output: none, one per head, or one per element (Qiu et al.
            2025, 2505.06708). megatron-core has only the latter.
        recomputes: True to save nothing between the linear layers for the backward pass.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        bias: bool,
        qkv_bias: bool,
        build_qk_norm: Callable[[int], nn.Module] | None = None,
        output_gates: int = 0,
        recomputes: bool = False,
        **kwargs: Any,
    ) -> None:
        config = copy(config)
        config.add_bias_linear, config.add_qkv_bias = bias, qkv_bias
        super().__init__(config, *args, **kwargs)
        self.recomputes = recomputes
        head = self.hidden_size_per_attention_head
        queries = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        self.group_sizes = [queries * head, head, head]
        """Sizes of the queries, the key and the value of a group."""
        self.normalizes_qk = build_qk_norm is not None
        if build_qk_norm is not None:
            assert config.num_query_groups is not None  # megatron-core fills it in
            self.q_layernorm = build_qk_norm(config.num_attention_heads)
            self.k_layernorm = build_qk_norm(config.num_query_groups)
        # A separate layer: megatron-core interleaves the gates' rows with those of queries, keys and values.
        self.linear_gate = self._build_gate(output_gates) if output_gates else None

    def _build_gate(self, size: int) -> ColumnLinear:
        options: dict[str, Any] = {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
        options |= {"config": self.config, "init_method": self.config.init_method, "tp_group": self.pg_collection.tp}
        return ColumnLinear(self.config.hidden_size, size, **options)

    def forward(self, hidden: Tensor, attention_mask: AttentionContext | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute hidden states [T, B, D] → [T or context.num_logits, B, D], and the bias to add to them.

        megatron-core forwards only `attention_mask` to this module, so the mask carries the context.
        """
        heads, output_gate = self.project(hidden)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(self.attend(hidden, heads, output_gate, attention_mask))
        return output

    def project(
        self, hidden: Tensor, rotation: Rotation | None = None, *, heads_first: bool = False
    ) -> tuple[Heads, Tensor | None]:
        """Return the inputs of `attend` computed from hidden states, and the output gates or None.

        Args:
            rotation, heads_first: as for `split_heads`.
        """
        mixed, _ = self.linear_qkv(hidden)
        output_gate = None if self.linear_gate is None else self.linear_gate(hidden)[0]
        heads = (mixed,) if self._recomputes_now else self.split_heads(mixed, rotation, heads_first)
        return heads, output_gate

    def can_compile(self, x: Tensor) -> bool:
        """Return True if regions with attention's weights and an activation are compiled.

        They are not if ranks shard the weights, or under ZeRO 3, which gathers weights around each module call.
        """
        return can_compile(self.config, x) and is_unsharded(self.linear_qkv, self.linear_qkv.weight)

    @property
    def _recomputes_now(self) -> bool:
        return self.recomputes and self.training and torch.is_grad_enabled()

    def split_heads(self, mixed: Tensor, rotation: Rotation | None = None, heads_first: bool = False) -> Heads:
        """Split one tensor into queries [T, B, h, d], keys and values [T, B, g, d].

        Queries and keys are rotated if a rotation is given.

        Args:
            heads_first: True to return views of contiguous tensors [B, heads, T, d].
        """
        mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        query, key, value = mixed.split(self.group_sizes, dim=3)
        query = query.reshape(*query.shape[:2], -1, self.hidden_size_per_attention_head)
        if self.normalizes_qk:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotation is not None:
            query, key = rotate_heads(query, *rotation), rotate_heads(key, *rotation)
            value = value.contiguous()  # a view would keep the adjacent queries and keys alive
        return tuple(to_heads_first_layout(x) for x in (query, key, value)) if heads_first else (query, key, value)

    def attend(
        self,
        hidden: Tensor | None,
        heads: Heads,
        output_gate: Tensor | None,
        context: AttentionContext | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Return the input of the output projection.

        Args:
            hidden: input of `project`, if the encoding has gates.
            rotation: rotation that `project` applied to queries and keys.
        """
        gates = None if hidden is None else self.core_attention.compute_gates(hidden)
        arguments: tuple[Any, ...] = (gates, output_gate, context, rotation, *heads)
        if self._recomputes_now:
            return recompute_in_backward(self._attend, *arguments, draws=self.config.attention_dropout > 0)
        return self._attend(*arguments)

    def _attend(
        self,
        gates: Tensor | None,
        output_gate: Tensor | None,
        context: AttentionContext | None,
        rotation: Rotation | None,
        *heads: Tensor,
    ) -> Tensor:
        if len(heads) == 1:
            compiles = self.can_compile(heads[0])
            split = choose_region(BiasedSelfAttention.split_heads, compiles=compiles)
            heads_first = compiles and needs_heads_first_layout(self.core_attention.backend)
            heads = split(self, *heads, rotation, heads_first)
        attended: Tensor = self.core_attention(*heads, context, gates=gates, is_rotated=rotation is not None)
        return attended if output_gate is None else apply_gate(attended, output_gate[-len(attended) :])


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x·cos + swap(x)·sin for x [T, B, h, d], with cos and sin [T, r] from `Encoding.get_cos_sin`.

    Same result as `rotate_halves`, in operations that torch.compile fuses.
    """
    turned = x[..., : cos.shape[-1]].to(cos.dtype)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None, None] + torch.cat([second, first], dim=-1) * sin[:, None, None]
    return torch.cat([turned.to(x.dtype), x[..., cos.shape[-1] :]], dim=-1)


def to_heads_first_layout(x: Tensor) -> Tensor:
    """Return x [T, B, h, d] laid out in memory as contiguous [B, h, T, d]."""
    return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


def apply_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """Multiply the attention output [T, B, h·d] by σ(gate), per element [T, B, h·d] or per head [T, B, h]."""
    factors = torch.sigmoid(promote_to_float32(gate))[..., None]
    return (attended.unflatten(-1, (gate.shape[-1], -1)) * factors).to(attended.dtype).flatten(-2)


class FeedForward(MLP):
    """megatron-core's MLP with its own forward pass."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, ffn_hidden_size=config.ffn_hidden_size, **kwargs)
        self.is_gated = config.gated_linear_unit

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the MLP's output for hidden states [T, B, D], and the bias to add to it."""
        inner, bias = self.linear_fc1(group_tokens(hidden))
        if bias is not None:
            inner = add_bias(inner, bias)
        if self.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = self.activation_func(gate) * inner
        else:
            inner = self.activation_func(inner)
        output, output_bias = self.linear_fc2(inner)
        return output.view_as(hidden), output_bias


class GPTLayer(TransformerLayer):
    """One layer of the GPT; hidden states are [T, B, D]. megatron-core builds it from the layer spec.

    Args:
        parallel: True for the parallel residual.
        tied_norm: True if both branches share one norm.
        multiplier: factor on the output of each branch (`megatron/model/mup.py`).
        build_post_norm: function that builds the norm after a branch.
    """

    def __init__(
        self,
        *args: Any,
        parallel: bool = False,
        tied_norm: bool = False,
        multiplier: float = 1.0,
        build_post_norm: Callable[[], nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.parallel, self.tied_norm, self.multiplier = parallel, tied_norm, multiplier
        self.post_self_attn_layernorm = None if build_post_norm is None else build_post_norm()
        self.post_mlp_layernorm = None if build_post_norm is None else build_post_norm()
        self.saves_norm_output = tied_norm or self.self_attention.core_attention.has_gates
        """True if anything besides the projection of queries, keys and values reads the first norm."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without megatron-core's checks for CUDA graphs."""
        return nn.Module.__call__(self, *args, **kwargs)

    def _add(
        self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, norm: nn.Module | None = None
    ) -> Tensor:
        """Return residual + multiplier · dropout(norm(output + bias))."""
        output, bias = output_and_bias
        if bias is not None:
            output = output + bias
        if norm is not None:
            output = norm(output)
        if self.multiplier != 1.0:
            output = output * self.multiplier
        if self.training and self.hidden_dropout > 0:
            output = F.dropout(output, self.hidden_dropout)
        return residual + output

    def can_compile(self, hidden: Tensor) -> bool:
        """Return True if the layer's regions are compiled. With dropout they would draw other random numbers."""
        drops = self.training and self.hidden_dropout > 0
        return not drops and self.self_attention.can_compile(hidden)

    def forward(self, hidden: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Compute hidden states [T, B, D] → [T or context.num_logits, B, D]."""
        return _run_joined([(self, context)], hidden, compiles=self.can_compile(hidden))

    def choose_layout(
        self, hidden: Tensor, context: AttentionContext | None, *, compiles: bool
    ) -> tuple[Rotation | None, bool]:
        """Return the rotation and the layout, as for `split_heads`, of heads that a region writes."""
        if not compiles:
            return None, False
        attention = self.self_attention
        rotation = attention.core_attention.get_rotation(hidden, context)
        return rotation, needs_heads_first_layout(attention.core_attention.backend)

    def run_before_attention(
        self, hidden: Tensor, rotation: Rotation | None, heads_first: bool
    ) -> tuple[Tensor | None, Heads, Tensor | None]:
        """Compute the region before attention.

        Returns:
            The norm of the hidden states, or None if nothing reads it later, and the results of `project`.
        """
        normed = self.input_layernorm(hidden)
        heads, output_gate = self.self_attention.project(normed, rotation, heads_first=heads_first)
        return normed if self.saves_norm_output else None, heads, output_gate

    def run_after_attention(self, hidden: Tensor, normed: Tensor | None, attended: Tensor) -> Tensor:
        """Compute the region after attention, from the output projection to the layer's output."""
        projected = self.self_attention.linear_proj(attended)
        after_attention = self._add(projected, hidden, self.post_self_attn_layernorm)
        if not self.parallel:
            normed = self.pre_mlp_layernorm(after_attention)
        elif not self.tied_norm:
            normed = self.pre_mlp_layernorm(hidden)
        return self._add(self.mlp(normed), after_attention, self.post_mlp_layernorm)


def _run_between_attentions(
    layer: GPTLayer,
    following: GPTLayer,
    hidden: Tensor,
    normed: Tensor | None,
    attended: Tensor,
    rotation: Rotation | None,
    heads_first: bool,
) -> tuple[Tensor, Tensor | None, Heads, Tensor | None]:
    """Compute the region from a layer's attention to the attention of the following layer.

    Returns:
        The output of the layer, and the results of the following layer's `run_before_attention`.
    """
    output = layer.run_after_attention(hidden, normed, attended)
    return output, *following.run_before_attention(output, rotation, heads_first)


def run_layers(layers: Sequence[tuple[GPTLayer, AttentionContext]], hidden: Tensor) -> Tensor:
    """Run consecutive layers: hidden states [T, B, D] → [T or num_logits, B, D].

    Compiled regions extend over the border of two layers, because calling a region takes the host as long as launching
    its kernels. Layers run one by one if they are not compiled or have hooks.
    """
    if all(layer.can_compile(hidden) and not has_hooks(layer) for layer, _ in layers):
        return _run_joined(layers, hidden, compiles=True)
    for layer, context in layers:
        hidden = layer(hidden, context)
    return hidden


def has_hooks(module: nn.Module) -> bool:
    """Return True if a hook sees the calls of a module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _run_joined(
    layers: Sequence[tuple[GPTLayer, AttentionContext | None]], hidden: Tensor, *, compiles: bool
) -> Tensor:
    """Run consecutive layers, with one region between two attentions."""
    begin, between, end = (
        choose_region(part, compiles=compiles)
        for part in (GPTLayer.run_before_attention, _run_between_attentions, GPTLayer.run_after_attention)
    )
    layer, context = layers[0]
    rotation, heads_first = layer.choose_layout(hidden, context, compiles=compiles)
    normed, heads, output_gate = begin(layer, hidden, rotation, heads_first)
    for following, next_context in layers[1:]:
        attended = layer.self_attention.attend(normed, heads, output_gate, context, rotation)
        next_rotation, heads_first = following.choose_layout(hidden, next_context, compiles=compiles)
        hidden, normed, heads, output_gate = between(
            layer, following, hidden, normed, attended, next_rotation, heads_first
        )
        layer, context, rotation = following, next_context, next_rotation
    attended = layer.self_attention.attend(normed, heads, output_gate, context, rotation)
    if context is not None and context.num_logits is not None:
        hidden = hidden[-context.num_logits :]
        normed = None if normed is None else normed[-context.num_logits :]
    output: Tensor = end(layer, hidden, normed, attended)
    return output


class OffStageLayer(nn.Module):
    """Placeholder for a layer of another pipeline stage.

    The layer is built and dropped at once, so that later layers draw the same random numbers as in the whole model.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        GPTLayer(*args, **kwargs)

    def forward(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("this layer belongs to another stage")

"""The transformer layer: megatron-core's modules, put together in series or in parallel.

GPT-NeoX's parallel residual (`gpt_j_residual`), which megatron-core's layer lacks, is one line here:

    series    x ← x + attention(norm1(x));  x ← x + mlp(norm2(x))
    parallel  x ← x + attention(norm1(x)) + mlp(norm2(x))          norm2 = norm1 with gpt_j_tied
"""

from contextlib import nullcontext
from copy import copy
from typing import Any

from torch import Tensor, nn

from megatron.model.attention import AttentionContext
from megatron.model.megatron_core import SelfAttention, TransformerConfig, TransformerLayer


class BiasedSelfAttention(SelfAttention):
    """megatron-core's queries, keys, values and output projection, with biases or without, whatever the MLP has.

    `bias`, of all four, and `qkv_bias`, of the first three, come from the layer spec's params.
    """

    def __init__(self, config: TransformerConfig, *args: Any, bias: bool, qkv_bias: bool, **kwargs: Any) -> None:
        config = copy(config)
        config.add_bias_linear, config.add_qkv_bias = bias, qkv_bias
        super().__init__(config, *args, **kwargs)


class GPTLayer(TransformerLayer):
    """One layer of the GPT; hidden states are [T, B, D].

    Built by megatron-core from the layer spec; `parallel` and `tied_norm` come from the spec's params.
    """

    def __init__(self, *args: Any, parallel: bool = False, tied_norm: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parallel, self.tied_norm = parallel, tied_norm
        # megatron-core enables gradients around the residual addition, also inside torch.no_grad().
        self.bias_dropout_add_exec_handler = nullcontext

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
        """residual + dropout(output + bias)"""
        return self.self_attn_bda(self.training, self.config.bias_dropout_fusion)(
            output_and_bias, residual, self.hidden_dropout
        )

    def forward(self, hidden: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Hidden states [T, B, D] → [T or context.num_logits, B, D]."""
        normed = self.input_layernorm(hidden)
        # megatron-core hands its attention module a mask and nothing else of ours, so the context takes its place.
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

"""Attention in plain PyTorch: the whole score map, or blocks of query rows against their causal columns.

Blocks are half of the work. Recomputed in the backward pass, what is kept between the passes is q, k, v, the table over
distances and the output: memory linear in T. Kept, it is half of the whole map.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.attention.backends.backend import MAX_KEYS_KEPT, MIN_ROWS_KEPT
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_attention, compute_attention_in_blocks
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor


class EagerBackend:
    """The reference: the whole score map is materialised. Memory grows as T²; everything else is tested against it."""

    def unsupported_reason(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        return compute_attention(inputs)


class ChunkedBackend:
    """Blocks of `choose_block_size` query rows.

    Args:
        block_size: rows of a block.
        recompute: whether the backward pass computes a block's maps again, instead of keeping them.
    """

    def __init__(self, block_size: int, *, recompute: bool = True) -> None:
        self.block_size, self.recompute = block_size, recompute

    def unsupported_reason(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        recompute = self.recompute and torch.is_grad_enabled()
        return compute_attention_in_blocks(
            inputs, self.block_size, _attend_with_recompute if recompute else compute_attention
        )


def _attend_with_recompute(inputs: AttentionInputs) -> Tensor:
    # What `compute` holds stays until the backward pass, even where the layer around it is recomputed. So it holds no
    # queries, keys and values: it is handed those, which the layer's recomputation brings back.
    empty = inputs.q.new_empty(0)
    others = replace(inputs, q=empty, k=empty, v=empty)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compute_attention(replace(others, q=q, k=k, v=v))

    return checkpoint(compute, inputs.q, inputs.k, inputs.v, use_reentrant=False, preserve_rng_state=inputs.dropout > 0)


class RowBlockBackend:
    """Blocks of rows over their causal columns, their maps kept for short training sequences, else recomputed."""

    def __init__(self, block_size: int) -> None:
        self.recomputed = ChunkedBackend(block_size)
        self.kept_with_processor = ChunkedBackend(block_size, recompute=False)
        self.kept_without_processor = ChunkedBackend(max(block_size, MIN_ROWS_KEPT), recompute=False)

    def unsupported_reason(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        if torch.is_grad_enabled() and inputs.key.length <= MAX_KEYS_KEPT:
            kept = self.kept_without_processor if inputs.processor is None else self.kept_with_processor
            return kept(inputs)
        return self.recomputed(inputs)

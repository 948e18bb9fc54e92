"""Attention by PyTorch alone: the whole score map, blocks of query rows against their causal columns, or its fused
attention.

Blocks are half of the work. Recomputed in the backward pass, what is kept between the passes is q, k, v, the table over
distances and the output: memory linear in T. Kept, it is half of the whole map.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.attention.backends.backend import MAX_KEYS_KEPT, MIN_ROWS_KEPT, find_unsupported_combination
from megatron.attention.inputs import AttentionInputs, iter_row_blocks
from megatron.attention.reference import compute_attention, compute_attention_in_blocks, compute_visible_mask
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.processor import BiasContribution, Processor

MASKED_ROWS = 512
"""Query rows per call where PyTorch takes who sees whom as a mask (with a window or several documents, or where the
rows are not all of the sequence): in blocks the mask stays linear in T, and no row is computed against keys that come
after its block."""


class EagerBackend:
    """The reference: the whole score map is materialised. Memory grows as T²; everything else is tested against it."""

    takes_first_keys = True

    def unsupported_reason(
        self, encoding: Encoding, processor: Processor | None, softcap: float | None = None
    ) -> str | None:
        return None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        return compute_attention(inputs)


class ChunkedBackend:
    """Blocks of query rows, one after the other: the score map is never whole.

    Args:
        block_size: rows of a block.
        recompute: whether the backward pass computes a block's maps again, instead of keeping them.
    """

    takes_first_keys = True

    def __init__(self, block_size: int, *, recompute: bool = True) -> None:
        self.block_size, self.recompute = block_size, recompute

    def unsupported_reason(
        self, encoding: Encoding, processor: Processor | None, softcap: float | None = None
    ) -> str | None:
        return None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        recompute = self.recompute and torch.is_grad_enabled()
        return compute_attention_in_blocks(
            inputs, self.block_size, _attend_with_recompute if recompute else compute_attention
        )


def _attend_with_recompute(inputs: AttentionInputs) -> Tensor:
    others, has_table, contribution = inputs.drop_tensors(), inputs.table is not None, inputs.bias_contribution

    def compute(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None) -> Tensor:
        bias, weight, by_distance, edge = tensors
        return compute_attention(
            replace(
                others,
                q=q,
                k=k,
                v=v,
                table=ScoreTerms(bias, weight) if has_table else None,
                bias_contribution=None if by_distance is None or edge is None else BiasContribution(by_distance, edge),
            )
        )

    return checkpoint(
        compute,
        *(inputs.q, inputs.k, inputs.v, *(inputs.table or ScoreTerms()), *(contribution or (None, None))),
        use_reentrant=False,
        preserve_rng_state=inputs.dropout > 0,
    )


class RowBlockBackend:
    """Blocks of rows over their causal columns, their maps kept for short training sequences, else recomputed."""

    takes_first_keys = True

    def __init__(self, block_size: int) -> None:
        self.recomputed = ChunkedBackend(block_size)
        self.kept_with_processor = ChunkedBackend(block_size, recompute=False)
        self.kept_without_processor = ChunkedBackend(max(block_size, MIN_ROWS_KEPT), recompute=False)

    def unsupported_reason(
        self, encoding: Encoding, processor: Processor | None, softcap: float | None = None
    ) -> str | None:
        return None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        if torch.is_grad_enabled() and inputs.key.length <= MAX_KEYS_KEPT:
            backend = self.kept_without_processor if inputs.processor is None else self.kept_with_processor
            return backend(inputs)
        return self.recomputed(inputs)


class SdpaBackend:
    """PyTorch's fused attention, for methods that add nothing to the scores (none, learned, rotary …): flash attention
    where the device has it, memory linear in T."""

    takes_first_keys = True

    def unsupported_reason(
        self, encoding: Encoding, processor: Processor | None, softcap: float | None = None
    ) -> str | None:
        return find_unsupported_combination("sdpa", encoding, processor, softcap)

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        unbounded = inputs.window is None or inputs.window >= inputs.query.stop - inputs.key.start
        unbounded = unbounded and inputs.first_keys is None and inputs.key_mask is None
        if unbounded and inputs.query == inputs.key:
            return torch.nn.functional.scaled_dot_product_attention(
                inputs.q, inputs.k, inputs.v, dropout_p=inputs.dropout, is_causal=True
            )
        return torch.cat([self._attend_masked(block) for block in iter_row_blocks(inputs, MASKED_ROWS)], dim=2)

    @staticmethod
    def _attend_masked(inputs: AttentionInputs) -> Tensor:
        mask = compute_visible_mask(inputs)
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, attn_mask=mask, dropout_p=inputs.dropout
        )

"""Attention in plain PyTorch: the full score matrix, row blocks over their causal columns, or fused attention.

Row blocks halve the work. If they are recomputed in the backward pass, only q, k, v, the table over distances and the
output are saved, so memory is linear in T. If they are saved, they need half of the memory of the full score matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.attention.backends.backend import (
    MAX_KEYS_SAVED,
    MIN_ROWS_SAVED,
    AttentionFormula,
    find_unsupported_feature,
)
from megatron.attention.inputs import AttentionInputs, iter_row_blocks, with_padded_values
from megatron.attention.reference import (
    add_row_terms,
    compute_attention,
    compute_attention_in_blocks,
    compute_visible_mask,
)
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.processor import BiasContribution
from megatron.position.token_range import TokenRange

MASKED_ROWS = 512
"""Query rows per call if PyTorch needs an explicit mask.

A mask is needed with a window, with several documents, or if the rows are not the whole sequence. Computed in blocks,
masks are linear in T, and no row is multiplied with keys after its block.
"""

MAX_PACKED_HEAD_DIM = 256
"""Largest head dimension of PyTorch's flash attention, a multiple of 8."""


class _GeneralBackend:
    """Base class of backends that support every method, and rows with several documents."""

    supports_document_starts = True

    def describe_unsupported(self, formula: AttentionFormula) -> str | None:
        return None


class EagerBackend(_GeneralBackend):
    """Reference that materializes the full score matrix, so memory grows as T². Tests compare others with it."""

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        return compute_attention(inputs)


class ChunkedBackend(_GeneralBackend):
    """Blocks of query rows, one after another; the full score matrix never exists.

    Args:
        block_size: rows per block.
        recompute: recompute the score matrices of a block in the backward pass instead of saving them.
    """

    def __init__(self, block_size: int, *, recompute: bool = True) -> None:
        self.block_size, self.recompute = block_size, recompute

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return compute_attention_in_blocks(inputs, self.block_size, _attend_with_recompute, _add_with_recompute)
        return compute_attention_in_blocks(inputs, self.block_size)


def _attend_with_recompute(inputs: AttentionInputs) -> Tensor:
    return _recompute(compute_attention, inputs)


def _add_with_recompute(row_sums: Tensor, block: AttentionInputs, first_key: int) -> Tensor:
    def add(inputs: AttentionInputs) -> Tensor:
        assert inputs.row_sums is not None
        return add_row_terms(inputs.row_sums, inputs, first_key)

    return _recompute(add, replace(block, row_sums=row_sums, dropout=0.0))


def _recompute(function: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """Run a function of attention's inputs, and recompute it in the backward pass."""
    others, has_table, contribution = inputs.drop_tensors(), inputs.table is not None, inputs.bias_contribution

    def compute(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None) -> Tensor:
        row_bias, key_bias, bias, weight, by_distance, edge, preceding_q, row_sums, sinks = tensors
        return function(
            replace(
                others,
                q=q,
                k=k,
                v=v,
                row_bias=row_bias,
                key_bias=key_bias,
                sinks=sinks,
                table=ScoreTerms(bias, weight) if has_table else None,
                bias_contribution=None if by_distance is None or edge is None else BiasContribution(by_distance, edge),
                preceding_q=preceding_q,
                row_sums=row_sums,
            )
        )

    tensors = (*(inputs.table or ScoreTerms()), *(contribution or (None, None)), inputs.preceding_q, inputs.row_sums)
    return checkpoint(
        compute,
        *(inputs.q, inputs.k, inputs.v, inputs.row_bias, inputs.key_bias, *tensors, inputs.sinks),
        use_reentrant=False,
        preserve_rng_state=inputs.dropout > 0,
    )


class RowBlockBackend(_GeneralBackend):
    """Row blocks over their causal columns. Score matrices are saved for short training sequences, else recomputed."""

    def __init__(self, block_size: int) -> None:
        self.recomputed = ChunkedBackend(block_size)
        self.saving_with_processor = ChunkedBackend(block_size, recompute=False)
        self.saving_without_processor = ChunkedBackend(max(block_size, MIN_ROWS_SAVED), recompute=False)

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        if torch.is_grad_enabled() and inputs.key.length <= MAX_KEYS_SAVED:
            backend = self.saving_without_processor if inputs.processor is None else self.saving_with_processor
            return backend(inputs)
        return self.recomputed(inputs)


class SdpaBackend:
    """PyTorch's fused attention, for methods that add nothing to the scores (none, learned, rotary …).

    It uses flash attention if the device supports it, with memory linear in T.
    """

    supports_document_starts = True

    def describe_unsupported(self, formula: AttentionFormula) -> str | None:
        return find_unsupported_feature("sdpa", formula.features)

    @staticmethod
    def compute_document_mask(
        query: TokenRange,
        key: TokenRange,
        document_starts: Tensor,
        starts: Tensor,
        encoding: Encoding,
        window: int | None,
        like: Tensor,
        *,
        dropout: bool,
    ) -> "PackedDocuments | list[Tensor]":
        """Prepare the masks of rows with several documents for all layers.

        Returns the document starts of whole rows if flash attention supports them, otherwise the masks of blocks of
        rows.

        Args:
            query, key: rows and columns of a call.
            document_starts: int32 [B, R], as in `AttentionInputs`.
            starts: int64 [B, C] on the CPU, the column at which each token's document begins.
            encoding: encoding of a layer.
            window: window of the layers.
            like: tensor with the type and device of the queries.
            dropout: True if attention weights are dropped.
        """
        if not dropout and query == key and has_packed_attention(like, encoding.qk_head_dim):
            return pack_documents(starts, like.device)
        batch = len(document_starts)
        q, k = (like.new_empty(()).expand(batch, 1, tokens.length, 1) for tokens in (query, key))
        inputs = AttentionInputs(q, k, k, query, key, encoding, document_starts=document_starts, window=window)
        return [_build_additive_mask(block) for block in iter_row_blocks(inputs, MASKED_ROWS)]

    @with_padded_values
    def __call__(self, inputs: AttentionInputs) -> Tensor:
        unbounded = inputs.window is None or inputs.window >= inputs.query.stop - inputs.key.start
        unbounded = unbounded and inputs.document_starts is None and inputs.key_mask is None
        if unbounded and inputs.query == inputs.key:
            return torch.nn.functional.scaled_dot_product_attention(
                inputs.q, inputs.k, inputs.v, dropout_p=inputs.dropout, is_causal=True
            )
        if isinstance(inputs.document_mask, PackedDocuments):
            return attend_packed(inputs, inputs.document_mask)
        blocks = list(iter_row_blocks(inputs, MASKED_ROWS))
        masks = inputs.document_mask or [compute_visible_mask(block) for block in blocks]
        return torch.cat([self._attend_masked(*pair) for pair in zip(blocks, masks, strict=True)], dim=2)

    @staticmethod
    def _attend_masked(inputs: AttentionInputs, mask: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, attn_mask=mask, dropout_p=inputs.dropout
        )


def _build_additive_mask(inputs: AttentionInputs) -> Tensor:
    """Return a mask [B, 1, R, C] in the type of the queries: 0 if a row sees a key, otherwise −inf.

    From a bool mask, PyTorch would build it in every call and save it for the backward pass.
    """
    return torch.zeros((), dtype=inputs.q.dtype, device=inputs.q.device).masked_fill(
        ~compute_visible_mask(inputs), float("-inf")
    )


@dataclass(frozen=True)
class PackedDocuments:
    """Start positions of the documents of a batch, with its rows concatenated."""

    starts: Tensor
    """Starts, int32 [documents + 1]; the last one is B · T."""
    longest: int
    """Length of the longest document, in tokens."""


def pack_documents(starts: Tensor, device: torch.device) -> PackedDocuments:
    """Pack rows in which each token's document begins at the column in `starts`, int64 [B, T] on the CPU."""
    begins = (starts == torch.arange(starts.shape[1])).flatten().nonzero()[:, 0]
    edges = torch.cat([begins, begins.new_tensor([starts.numel()])])
    return PackedDocuments(edges.int().to(device, non_blocking=True), int(edges.diff().max()))


def has_packed_attention(like: Tensor, head_dim: int) -> bool:
    """Return True if flash attention supports documents of different lengths for these queries.

    This depends on their type and device.
    """
    return (
        like.is_cuda
        and head_dim % 8 == 0
        and head_dim <= MAX_PACKED_HEAD_DIM
        and like.dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(like.device) >= (8, 0)
        and find_spec("torch.nn.attention.varlen") is not None
    )


def attend_packed(inputs: AttentionInputs, documents: PackedDocuments) -> Tensor:
    """Compute the attention output [B, h, T, d] of whole rows with flash attention per document.

    It uses `torch.nn.attention.varlen`, which needs no masks and costs less for shorter documents.
    """
    # absent in older versions of PyTorch, which exported models may run on
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))  # [B · T, h, d]
    window = inputs.window
    is_bounded = window is not None and window < documents.longest
    output = varlen_attn(
        q,
        k,
        v,
        documents.starts,
        documents.starts,
        documents.longest,
        documents.longest,
        window_size=(window - 1, 0) if is_bounded and window is not None else (-1, 0),
    )
    assert isinstance(output, Tensor)  # a single tensor unless more is requested
    return output.unflatten(0, (len(inputs.q), -1)).transpose(1, 2)

"""Compiled FlexAttention of PyTorch, for biases that depend on the distance or on the key, and for a soft cap.

Memory is linear in T. Unsupported cases (padding, sampled positions, dropout, shapes not seen in training) fall back to
PyTorch's row blocks, with a single warning. The gradient of the bias is summed by atomic additions, so it is not
bitwise reproducible.

h requested heads, R query rows, C key columns, N distances.
"""

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megatron.attention.backends.backend import (
    AttentionBackend,
    AttentionFormula,
    find_unsupported_feature,
    warn_fallback,
)
from megatron.attention.inputs import AttentionInputs, with_padded_values
from megatron.attention.reference import compute_table
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.numerics import soft_cap
from megatron.position.token_range import TokenRange, select_heads

BLOCK_SIZE = 128
"""Rows and columns per block of the block mask, PyTorch's default."""
MAX_SHAPES = 4
"""Maximum number of shapes to compile for; each takes many seconds."""


class FlexBackend:
    """FlexAttention with the bias and the soft cap as score modification.

    Args:
        fallback: backend for unsupported calls.
    """

    reads_whole_table = True
    supports_document_starts = True

    def __init__(self, fallback: AttentionBackend) -> None:
        self.fallback = fallback
        self._trained: set[tuple[int, int, int]] = set()
        """Rows, columns and first row of the calls with gradients so far."""

    def describe_unsupported(self, formula: AttentionFormula) -> str | None:
        if not torch.cuda.is_available():
            return "it needs a CUDA device"
        if reason := find_unsupported_feature("flex", formula.features):
            return reason
        if torch.are_deterministic_algorithms_enabled():
            return "its gradient of the bias is not deterministic (deterministic: true)"
        return None

    @with_padded_values
    def __call__(self, inputs: AttentionInputs) -> Tensor:
        reason = self.explain_fallback(inputs)
        if reason is not None:
            warn_fallback("flex", reason)
            return self.fallback(inputs)
        if not torch.is_grad_enabled() and _describe_shape(inputs) not in self._trained:
            # decoding and evaluation have arbitrarily many lengths, each of which would be compiled
            return self.fallback(inputs)
        if torch.is_grad_enabled():
            self._trained.add(_describe_shape(inputs))
        return attend_with_flex(inputs)

    def compute_document_mask(
        self,
        query: TokenRange,
        key: TokenRange,
        document_starts: Tensor,
        starts: Tensor,
        encoding: Encoding,
        window: int | None,
        like: Tensor,
        *,
        dropout: bool,
    ) -> BlockMask | None:
        """Build the block mask of rows of documents for all layers, or None if row blocks compute the rows.

        See `SdpaBackend.compute_document_mask`.
        """
        shape = query.length, key.length, query.start - key.start
        if dropout or not (torch.is_grad_enabled() or shape in self._trained):
            return None
        first_columns = document_starts if key.start == 0 else (document_starts - key.start).clamp_(min=0)
        return build_document_mask(*shape, window, first_columns)

    def explain_fallback(self, inputs: AttentionInputs) -> str | None:
        """Explain why a call of a supported formula falls back to row blocks; None if it does not."""
        if inputs.key_mask is not None:
            return "padding"
        if inputs.query.sampled is not None:
            return "randomized positions"
        if inputs.dropout:
            return "attention_dropout"
        is_new = torch.is_grad_enabled() and _describe_shape(inputs) not in self._trained
        return f"more than {MAX_SHAPES} shapes" if is_new and len(self._trained) >= MAX_SHAPES else None


def _describe_shape(inputs: AttentionInputs) -> tuple[int, int, int]:
    return inputs.query.length, inputs.key.length, inputs.query.start - inputs.key.start


@cache
def _compile_flex() -> Any:
    # Compile in this process: for a few kernels a pool of compiler processes per rank is not worth its cost.
    return torch.compile(flex_attention, dynamic=False, options={"compile_threads": 1})


def attend_with_flex(inputs: AttentionInputs) -> Tensor:
    """Compute the attention output [B, h, R, d] with the encoding's bias and the soft cap, compiled on a GPU."""
    offset = inputs.query.start - inputs.key.start
    terms = inputs.table or compute_table(inputs.encoding, inputs.query, inputs.key, inputs.q.device) or ScoreTerms()
    table, cap = None if terms.bias is None else select_heads(terms.bias, inputs.heads), inputs.softcap
    # The term of a row is the same for all keys and cancels in the softmax. Terms of keys are relative to the last,
    # near zero.
    key_bias = inputs.key_bias
    if key_bias is not None:
        key_bias = (key_bias - key_bias.detach()[..., -1:]).to(torch.promote_types(inputs.q.dtype, torch.float32))

    def modify_score(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        score = soft_cap(score, cap)
        if key_bias is not None:
            score = score + key_bias[batch, head, column]
        return score if table is None else score + table[head, (row + offset - column).clamp(min=0)]

    sizes = (inputs.query.length, inputs.key.length, offset, inputs.window)
    if inputs.document_mask is not None:
        mask = inputs.document_mask
    elif inputs.first_columns is None:
        mask = build_block_mask(*sizes, inputs.q.device)
    else:
        mask = build_document_mask(*sizes, inputs.first_columns)
    flex = _compile_flex() if inputs.q.is_cuda else flex_attention
    options: dict[str, Any] = {"score_mod": modify_score, "block_mask": mask}
    sinks = inputs.head_sinks
    if sinks is None:
        output: Tensor = flex(inputs.q, inputs.k, inputs.v, **options)
        return output
    # exp(lse) is the sum over the keys; its share of the sum with the sink is σ(lse − sink). A row's own term cancels
    # in its softmax and is omitted above, but it does not cancel against the sink.
    output, aux = flex(inputs.q, inputs.k, inputs.v, **options, return_aux=AuxRequest(lse=True))
    lse = aux.lse
    if inputs.row_bias is not None and inputs.key_bias is not None:
        lse = lse + (inputs.row_bias + inputs.key_bias.detach()[..., -1:]).to(lse.dtype)
    return (output * torch.sigmoid(lse - sinks[:, None])[..., None]).to(output.dtype)


@lru_cache(maxsize=2 * MAX_SHAPES)
def build_block_mask(
    num_rows: int, num_columns: int, offset: int, window: int | None, device: torch.device
) -> BlockMask:
    """Build the block mask, which states the column blocks that each row block sees fully or partially.

    It is computed from block indices, because PyTorch's own function first builds a mask of all rows and columns.

    Args:
        num_rows, num_columns: R and C.
        offset: column of the first row's own key.
        window: number of last keys that a row sees; None for all.
        device: device of the mask.
    """
    kinds = _find_blocks(num_rows, num_columns, offset, window)
    partial_count, partial, full_count, full = (x.to(device) for kind in kinds for x in _order_blocks(kind))
    return BlockMask.from_kv_blocks(
        partial_count,
        partial,
        full_count,
        full,
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=_make_visible(offset, window),
        seq_lengths=(num_rows, num_columns),
    )


def build_document_mask(
    num_rows: int, num_columns: int, offset: int, window: int | None, first_columns: Tensor
) -> BlockMask:
    """Build the block mask of rows with several documents, without blocks of columns before a document.

    Args:
        first_columns: int32 [B, R], the first column of each row's document, on the device of the mask. It is
            nondecreasing over the rows, so the first and last row of a block determine the columns of the others.
    """
    causal = _make_visible(offset, window)

    def is_visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return causal(batch, head, row, column) & (column >= first_columns[batch, row])

    device = first_columns.device
    partial, full = (kind.to(device) for kind in _find_blocks(num_rows, num_columns, offset, window))
    first_column = torch.arange(0, num_columns, BLOCK_SIZE, device=device)
    last_rows = torch.arange(BLOCK_SIZE, num_rows + BLOCK_SIZE, BLOCK_SIZE, device=device).clamp_(max=num_rows) - 1
    seen = first_column + BLOCK_SIZE > first_columns[:, ::BLOCK_SIZE, None]
    whole = full & (first_column >= first_columns[:, last_rows, None])
    blocks = (*_order_blocks((partial | full) & seen & ~whole), *_order_blocks(whole))
    return BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=BLOCK_SIZE, mask_mod=is_visible, seq_lengths=(num_rows, num_columns)
    )


def _make_visible(offset: int, window: int | None) -> Any:
    """Return a mask function for the causal mask and the window."""

    def is_visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        distance = row + offset - column
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    return is_visible


@lru_cache(maxsize=2 * MAX_SHAPES)
def _find_blocks(num_rows: int, num_columns: int, offset: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return masks of the column blocks that each row block sees partially, and fully: bool [rows, columns] each."""
    first_row = torch.arange(0, num_rows, BLOCK_SIZE)[:, None] + offset
    last_row = (first_row + BLOCK_SIZE).clamp(max=num_rows + offset) - 1
    first_column = torch.arange(0, num_columns, BLOCK_SIZE)[None]
    last_column = (first_column + BLOCK_SIZE).clamp(max=num_columns) - 1
    seen, full = first_column <= last_row, last_column <= first_row
    if window is not None:
        seen = seen & (last_column > first_row - window)
        full = full & (first_column > last_row - window)
    # A block that extends beyond the score matrix counts as partial, so that nothing outside is read.
    is_whole = (last_row - first_row == BLOCK_SIZE - 1) & (last_column - first_column == BLOCK_SIZE - 1)
    full = full & is_whole
    return seen & ~full, full


def _order_blocks(which: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of column blocks of each row block, and their indices with these blocks first.

    Args:
        which: bool [rows, columns], or [B, rows, columns] per sequence.

    Returns:
        int32 [B or 1, 1, rows] and [B or 1, 1, rows, columns].
    """
    which = which.unflatten(0, (1, -1)) if which.dim() == 2 else which
    order = which.int().argsort(dim=-1, descending=True, stable=True)
    return which.sum(-1).int()[:, None], order.int().contiguous()[:, None]

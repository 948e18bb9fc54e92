"""Inputs of attention as one value, and their division into blocks of query rows.

A processor declares which other rows a row depends on (`preceding_rows`, `row_terms`), and a row block includes them. A
row block therefore gives exactly the same rows as the whole.

B batch, H heads, h requested heads, R query rows, C key columns, d head dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.processor import BiasContribution, Processor
from megatron.position.token_range import ALL_HEADS, TokenRange, select_heads

BackendT = TypeVar("BackendT")

DenseFunction = Callable[[TokenRange, TokenRange, Tensor, slice], ScoreTerms]
"""Replacement for `Encoding.dense` with the same arguments, such as a kernel."""


@dataclass(frozen=True)
class AttentionInputs:
    """All inputs of attention for some query rows."""

    q: Tensor
    """Rotated queries [B, H, R, e]; without a processor [B, h, R, e]. e is d unless the encoding changes it
    (`Encoding.qk_head_dim`)."""
    k: Tensor
    """Rotated keys [B, H or h, C, e]."""
    v: Tensor
    """Values [B, h, C, d]."""
    query: TokenRange
    key: TokenRange
    encoding: Encoding
    processor: Processor | None = None
    key_mask: Tensor | None = None
    """Bool [B, C] or [B, R, C], False for padding."""
    document_starts: Tensor | None = None
    """int32 [B, R]: index of the first key of each row's document, which never decreases from row to row.

    Keys before it are outside the row's sequence, as columns before index 0 are: the row does not depend on them, and a
    processor sees an edge there. Only for backends and encodings that support it (`backend.can_mask_documents`).
    """
    document_mask: Any = None
    """Mask that the backend prepared from `document_starts` for these rows before the layers
    (`compute_document_mask`).
    """
    row_bias: Tensor | None = None
    """Float32 or float64 [B, H or h, R], as the queries: added to the scores of a row, together with `key_bias`."""
    key_bias: Tensor | None = None
    """Float32 or float64 [B, H or h, C]: added to the scores of a key. The encoding's own bias is the same for all
    sequences."""
    window: int | None = None
    """Number of last keys that a row sees, including its own; None for all."""
    softcap: float | None = None
    """Bound of q·k/√d, applied before any term of the encoding or the processor (`numerics.soft_cap`)."""
    heads: slice = field(default_factory=lambda: ALL_HEADS)  # slices are not hashable before Python 3.12
    """Requested heads: those of a tensor-parallel rank."""
    sinks: Tensor | None = None
    """float32 [H]: a logit per head that joins the softmax of every row and has no value."""
    uses_stick_breaking: bool = False
    """True for stick-breaking instead of the softmax (`softmax.py`), which has no sinks."""
    adds_remainder: bool = False
    """True if stick-breaking gives the remaining weight to a row's own key."""
    dropout: float = 0.0
    """Probability of dropping an attention weight; 0 outside training."""
    dense: DenseFunction | None = None
    """Replacement for the encoding's `dense`, if a backend has a faster one."""
    table: ScoreTerms | None = None
    """The encoding's table [H, N] over at least the distances of these rows and columns, if precomputed
    (`reference.precompute_terms`)."""
    processor_terms: Any = None
    """Values that the backend computed from the processor and the table before the layers
    (`compute_processor_terms`)."""
    bias_contribution: BiasContribution | None = None
    """Contribution of the bias to the first layer of the processor, if precomputed."""
    preceding_q: Tensor | None = None
    """Rotated queries [B, H, A, d] of the A rows directly above, for a processor that reads rows above; None for none.

    These are as many as the processor reads, or all rows that are not included in `row_sums`.
    """
    row_sums: Tensor | None = None
    """float32 [B, C]: sum of a processor's `row_terms` over the rows above those of `preceding_q`; None for zero."""

    @property
    def score_heads(self) -> slice:
        """Heads whose scores are needed. A processor reads the scores of all heads."""
        return self.heads if self.processor is None else ALL_HEADS

    @property
    def first_columns(self) -> Tensor | None:
        """`document_starts` as columns of k and v."""
        if self.document_starts is None or self.key.start == 0:
            return self.document_starts
        return (self.document_starts - self.key.start).clamp_(min=0)

    @property
    def head_sinks(self) -> Tensor | None:
        """Sinks of the requested heads, [h]."""
        return None if self.sinks is None else select_heads(self.sinks, self.heads)

    def drop_tensors(self) -> "AttentionInputs":
        """Return the inputs without queries, keys, values, sinks and tables, for a function that is recomputed.

        Tensors captured by such a function stay in memory until then, even if the layer around it is recomputed.
        Tensors passed as arguments do not, because recomputation of the layer restores them.
        """
        empty = self.q.new_empty(0)
        return replace(
            self,
            q=empty,
            k=empty,
            v=empty,
            row_bias=None,
            key_bias=None,
            sinks=None,
            table=None,
            bias_contribution=None,
            preceding_q=None,
            row_sums=None,
        )

    def select_preceding_rows(self, start: int) -> Tensor | None:
        """Return `preceding_q` of the rows from index `start` on."""
        if self.processor is None or not self.processor.reads_preceding_rows:
            return None
        above = self.q[:, :, :start]
        if self.preceding_q is not None:
            above = self.preceding_q if start == 0 else torch.cat([self.preceding_q, above], dim=2)
        if not self.processor.overrides("row_terms"):
            above = above[:, :, max(above.shape[2] - self.processor.preceding_rows, 0) :]
        return above if above.shape[2] else None

    def prepend_preceding_rows(self) -> "AttentionInputs":
        """Prepend the rows above to these rows. The first of the resulting rows have no rows above."""
        if self.preceding_q is None:
            return self
        count = self.preceding_q.shape[2]
        query = replace(self.query, start=self.query.start - count, length=self.query.length + count)
        mask = self.key_mask
        if mask is not None and mask.dim() == 3:
            raise ValueError("a processor that reads rows above does not support a mask per row")
        row_bias = self.row_bias
        if row_bias is not None:
            row_bias = torch.cat([self.select_preceding_row_bias(), row_bias], dim=2)
        q = torch.cat([self.preceding_q, self.q], dim=2)
        return replace(self, q=q, query=query, row_bias=row_bias, preceding_q=None)

    def select_preceding_row_bias(self) -> Tensor:
        """Return `row_bias` of the rows above: a sum of gates, which is the negative of their `key_bias`."""
        assert self.preceding_q is not None
        assert self.key_bias is not None
        last = self.query.start - self.key.start
        return -self.key_bias[:, :, last - self.preceding_q.shape[2] : last]

    def select_rows(self, start: int, stop: int, row_sums: Tensor | None = None) -> "AttentionInputs":
        """Select rows start … stop − 1, without columns that none of them depends on.

        Args:
            row_sums: float32 [B, C], the processor's sums over all rows above, if known; the rows above are then
                omitted.
        """
        query = replace(self.query, start=self.query.start + start, length=stop - start)
        preceding_q = self.select_preceding_rows(start) if row_sums is None else None
        num_above = 0 if preceding_q is None else preceding_q.shape[2]
        left, right = 0, max(min(query.stop - self.key.start, self.key.length), 1)
        if self.window is not None:
            left_context = 0 if self.processor is None else self.processor.left_context
            left = max(query.start - num_above - self.window + 1 - left_context - self.key.start, 0)
        document_starts = self.document_starts
        if document_starts is not None:
            document_starts = document_starts[:, start:stop]
            if document_starts.device.type == "cpu":  # on a GPU this would wait for the device
                left = max(left, int(document_starts[:, 0].min()) - self.key.start)
        sums = self.row_sums if row_sums is None else row_sums
        mask = self.key_mask
        if mask is not None:
            mask = mask[:, left:right] if mask.dim() == 2 else mask[:, start:stop, left:right]
        return replace(
            self,
            q=self.q[:, :, start:stop],
            k=self.k[:, :, left:right],
            v=self.v[:, :, left:right],
            query=query,
            key=replace(self.key, start=self.key.start + left, length=right - left),
            key_mask=mask,
            document_starts=document_starts,
            row_bias=None if self.row_bias is None else self.row_bias[:, :, start:stop],
            key_bias=None if self.key_bias is None else self.key_bias[:, :, left:right],
            document_mask=None,
            preceding_q=preceding_q,
            row_sums=None if sums is None else sums[:, left:right],
        )


def with_padded_values(
    attend: Callable[[BackendT, AttentionInputs], Tensor],
) -> Callable[[BackendT, AttentionInputs], Tensor]:
    """Decorate a backend's `__call__` whose fused attention needs queries, keys and values of equal length.

    If rotated queries are longer, values are padded with zeros, and the output is cut to its length.
    """

    @wraps(attend)
    def attend_padded(backend: BackendT, inputs: AttentionInputs) -> Tensor:
        size, length = inputs.v.shape[-1], inputs.q.shape[-1]
        if size == length:
            return attend(backend, inputs)
        return attend(backend, replace(inputs, v=pad(inputs.v, (0, length - size))))[..., :size]

    return attend_padded


def iter_row_blocks(inputs: AttentionInputs, size: int) -> Iterator[AttentionInputs]:
    """Yield the rows in blocks of `size`, each without columns that none of its rows depends on."""
    for start in range(0, inputs.query.length, size):
        yield inputs.select_rows(start, min(start + size, inputs.query.length))

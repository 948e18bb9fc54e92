"""What attention is computed from, as one value, and the same cut into blocks of query rows.

What a row depends on beside itself a processor declares (`rows_above`, `row_terms`), and a block of rows is given that
too. So a block against its own columns is exactly those rows of the whole.

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
"""Computes what `Encoding.dense` computes, from the same arguments: a kernel may do it in the encoding's stead."""


@dataclass(frozen=True)
class AttentionInputs:
    """Everything that the attention of some query rows depends on."""

    q: Tensor
    """Rotated queries [B, H, R, e]; without a processor [B, h, R, e]. e is d unless the encoding has it otherwise
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
    first_keys: Tensor | None = None
    """int32 [B, R]: the index of the first key of each row's document, which never falls from row to row. Keys before
    it are outside of the row's sequence, as columns before index 0 are: nothing of the row depends on them, and a
    processor sees an edge there. For backends and encodings of which `document_masks.can_mask_documents` says so."""
    document_mask: Any = None
    """What the backend made of `first_keys` for these very rows before the layers (`AttentionBackend`s that have
    `compute_document_mask`)."""
    row_bias: Tensor | None = None
    """Float32 or float64 [B, H or h, R] as the queries: is added to the scores of a row, with `key_bias`."""
    key_bias: Tensor | None = None
    """The same of keys [B, H or h, C]. Beside the encoding's own bias, which is the same for all sequences."""
    window: int | None = None
    """A row sees the last `window` keys only, its own included."""
    softcap: float | None = None
    """Bound of q·k/√d, before anything of the encoding or the processor (`numerics.soft_cap`)."""
    heads: slice = field(default_factory=lambda: ALL_HEADS)  # slices are not hashable before Python 3.12
    """The requested heads: a tensor-parallel rank's own."""
    sinks: Tensor | None = None
    """float32 [H]: of each head a logit that joins those of every row's keys in the softmax and has no value."""
    breaks_sticks: bool = False
    """Stick-breaking in the place of the softmax (`softmax.py`), of which there are no sinks."""
    adds_remainder: bool = False
    """True if stick-breaking gives a row's own key what the other keys leave."""
    dropout: float = 0.0
    """Probability of dropping an attention weight; 0 outside training."""
    dense: DenseFunction | None = None
    """Computes the encoding's matrices in its stead, where a backend knows a faster way."""
    table: ScoreTerms | None = None
    """The encoding's table [H, N] over the distances of these rows and columns or of more, where it was computed
    before (`reference.precompute_terms`)."""
    processor_terms: Any = None
    """What the backend made of the processor and the table before the layers (`AttentionBackend`s that have
    `compute_processor_terms`)."""
    bias_contribution: BiasContribution | None = None
    """The bias's own part of the processor's first layer, where it was computed before."""
    q_above: Tensor | None = None
    """Rotated queries [B, H, A, d] of the A rows right above, for a processor that reads rows above
    (`Processor.reads_rows_above`): as many as it reads, or all on which no `row_sums` tell; None for none."""
    row_sums: Tensor | None = None
    """float32 [B, C]: for a processor with `row_terms` their sum over the rows above those of `q_above`; None for
    zero."""

    @property
    def score_heads(self) -> slice:
        """The heads whose scores are needed: a processor reads the scores of all."""
        return self.heads if self.processor is None else ALL_HEADS

    @property
    def first_columns(self) -> Tensor | None:
        """`first_keys` as columns of k and v."""
        if self.first_keys is None or self.key.start == 0:
            return self.first_keys
        return (self.first_keys - self.key.start).clamp_(min=0)

    @property
    def head_sinks(self) -> Tensor | None:
        """`sinks` of the requested heads, [h]."""
        return None if self.sinks is None else select_heads(self.sinks, self.heads)

    def drop_tensors(self) -> "AttentionInputs":
        """Itself without queries, keys, values, sinks and tables: for a function that the backward pass recomputes.

        What such a function holds stays until then, even where the layer around it is recomputed. What it is handed as
        an argument does not: the layer's recomputation brings it back.
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
            q_above=None,
            row_sums=None,
        )

    def select_rows_above(self, start: int) -> Tensor | None:
        """`q_above` of the rows from number `start` on."""
        if self.processor is None or not self.processor.reads_rows_above:
            return None
        above = self.q[:, :, :start]
        if self.q_above is not None:
            above = self.q_above if start == 0 else torch.cat([self.q_above, above], dim=2)
        if not self.processor.overrides("row_terms"):
            above = above[:, :, max(above.shape[2] - self.processor.rows_above, 0) :]
        return above if above.shape[2] else None

    def join_rows_above(self) -> "AttentionInputs":
        """The rows above and its own as one, whose first rows know no rows above."""
        if self.q_above is None:
            return self
        count = self.q_above.shape[2]
        query = replace(self.query, start=self.query.start - count, length=self.query.length + count)
        mask = self.key_mask
        if mask is not None and mask.dim() == 3:
            raise ValueError("a processor that reads rows above takes no mask for each row")
        row_bias = self.row_bias
        if row_bias is not None:
            row_bias = torch.cat([self.select_row_bias_above(), row_bias], dim=2)
        q = torch.cat([self.q_above, self.q], dim=2)
        return replace(self, q=q, query=query, row_bias=row_bias, q_above=None)

    def select_row_bias_above(self) -> Tensor:
        """`row_bias` of the rows above: a sum of gates, which is their keys' too, with the other sign."""
        assert self.q_above is not None
        assert self.key_bias is not None
        last = self.query.start - self.key.start
        return -self.key_bias[:, :, last - self.q_above.shape[2] : last]

    def select_rows(self, start: int, stop: int, row_sums: Tensor | None = None) -> "AttentionInputs":
        """Rows start … stop − 1, without the columns that none of them depends on.

        row_sums: float32 [B, C], what the processor reads of all rows above, where that is known: they are left out.
        """
        query = replace(self.query, start=self.query.start + start, length=stop - start)
        q_above = self.select_rows_above(start) if row_sums is None else None
        num_above = 0 if q_above is None else q_above.shape[2]
        left, right = 0, max(min(query.stop - self.key.start, self.key.length), 1)
        if self.window is not None:
            left_context = 0 if self.processor is None else self.processor.left_context
            left = max(query.start - num_above - self.window + 1 - left_context - self.key.start, 0)
        first_keys = self.first_keys
        if first_keys is not None:
            first_keys = first_keys[:, start:stop]
            if first_keys.device.type == "cpu":  # a GPU would have to be waited for
                left = max(left, int(first_keys[:, 0].min()) - self.key.start)
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
            first_keys=first_keys,
            row_bias=None if self.row_bias is None else self.row_bias[:, :, start:stop],
            key_bias=None if self.key_bias is None else self.key_bias[:, :, left:right],
            document_mask=None,
            q_above=q_above,
            row_sums=None if sums is None else sums[:, left:right],
        )


def pad_values(attend: Callable[[BackendT, AttentionInputs], Tensor]) -> Callable[[BackendT, AttentionInputs], Tensor]:
    """A backend's `__call__` whose fused attention takes queries, keys and values of one length: values get zeros at
    their end where rotated queries are longer, and the output loses them again."""

    @wraps(attend)
    def attend_padded(backend: BackendT, inputs: AttentionInputs) -> Tensor:
        size, length = inputs.v.shape[-1], inputs.q.shape[-1]
        if size == length:
            return attend(backend, inputs)
        return attend(backend, replace(inputs, v=pad(inputs.v, (0, length - size))))[..., :size]

    return attend_padded


def iter_row_blocks(inputs: AttentionInputs, size: int) -> Iterator[AttentionInputs]:
    """The rows in blocks of `size`, each without the columns that none of its rows depends on."""
    for start in range(0, inputs.query.length, size):
        yield inputs.select_rows(start, min(start + size, inputs.query.length))

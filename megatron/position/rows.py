"""Attention over rows: what it is computed from, all of it at once, and block by block.

Rows are independent in every method, so a block of rows against its own columns is exactly those rows of the whole.

B batch, H heads, h heads wanted, R query rows, C key columns, d head dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .encoding import Encoding, ScoreTerms
from .processor import BiasContribution, Processor
from .scores import DenseFunction, attention_logits, compute_bias_contribution, compute_table, softmax_attend
from .shape import ALL_HEADS, PositionRange


@dataclass(frozen=True)
class AttentionInputs:
    """What attention is computed from."""

    q: Tensor
    """Rotated queries [B, H, R, d]; without a processor [B, h, R, d]."""
    k: Tensor
    """Rotated keys [B, H or h, C, d]."""
    v: Tensor
    """Values [B, h, C, d]."""
    query: PositionRange
    key: PositionRange
    encoding: Encoding
    processor: Processor | None
    key_mask: Tensor | None = None
    """Bool [B, C] or [B, R, C], False for padding and keys of another document."""
    window: int | None = None
    """A row sees the last `window` keys only, its own included."""
    heads: slice = field(default_factory=lambda: ALL_HEADS)  # slices are not hashable before Python 3.12
    """The wanted heads: a tensor-parallel rank's own."""
    dropout: float = 0.0
    dense: DenseFunction | None = None
    """Computes the encoding's matrices in its stead, where a backend knows a faster way."""


def logits_of_rows(
    inputs: AttentionInputs, table: ScoreTerms | None, bias_contribution: BiasContribution | None = None
) -> Tensor:
    """Masked logits of the rows, float32 [B, h, R, C]; arguments as in `attention`."""
    return attention_logits(
        inputs.q,
        inputs.k,
        inputs.query,
        inputs.key,
        inputs.encoding,
        inputs.processor,
        table=table,
        key_mask=inputs.key_mask,
        window=inputs.window,
        heads=inputs.heads,
        bias_contribution=bias_contribution,
        dense=inputs.dense,
    )


def attend_all(
    inputs: AttentionInputs, table: ScoreTerms | None, bias_contribution: BiasContribution | None = None
) -> Tensor:
    """All rows at once, their whole score map materialised: [B, h, R, d].

    Args:
        table: `compute_table(…)` of these rows and columns or of more.
        bias_contribution: `compute_bias_contribution(…)`, if the processor has one.
    """
    scores = logits_of_rows(inputs, table, bias_contribution)
    return softmax_attend(scores, inputs.v, inputs.dropout, rows_may_be_empty=inputs.key_mask is not None)


def attend_in_blocks(
    inputs: AttentionInputs,
    size: int,
    attend: Callable[[AttentionInputs, ScoreTerms | None, BiasContribution | None], Tensor] = attend_all,
) -> Tensor:
    """The rows in blocks of `size`, each against its causal columns by `attend`; what all blocks need is computed
    once."""
    blocks = prepared_blocks(inputs, size)
    # The last block has the most columns. Where nothing is kept for a backward pass it comes first, so that what an
    # allocator took for its maps serves all others: in rising order each is a little too large for what the one before
    # left, and memory grows with T². A backward pass goes from the last to the first by itself.
    falling = not torch.is_grad_enabled()
    outputs = [attend(*block) for block in (reversed(blocks) if falling else blocks)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs[::-1] if falling else outputs, dim=2)


def prepared_blocks(
    inputs: AttentionInputs, size: int
) -> list[tuple[AttentionInputs, ScoreTerms | None, BiasContribution | None]]:
    """The rows in blocks of `size`, each with what is computed once for all of them: its arguments of `attention`."""
    table = compute_table(inputs.encoding, inputs.query, inputs.key, inputs.q.device)
    share = compute_bias_contribution(inputs.processor, table, inputs.query, inputs.key, inputs.key_mask, inputs.window)
    return [(block, table, share) for block in iter_row_blocks(inputs, size)]


def iter_row_blocks(inputs: AttentionInputs, size: int) -> Iterator[AttentionInputs]:
    """The rows in blocks of `size`, each without the columns that none of its rows depends on."""
    for start in range(0, inputs.query.length, size):
        yield _block(inputs, start, min(start + size, inputs.query.length))


def _block(rows: AttentionInputs, start: int, stop: int) -> AttentionInputs:
    query = replace(rows.query, start=rows.query.start + start, length=stop - start)
    left, right = 0, max(min(query.stop - rows.key.start, rows.key.length), 1)
    if rows.window is not None:
        reach = 0 if rows.processor is None else rows.processor.left_context
        left = max(query.start - rows.window + 1 - reach - rows.key.start, 0)
    mask = rows.key_mask
    if mask is not None:
        mask = mask[:, left:right] if mask.dim() == 2 else mask[:, start:stop, left:right]
    return replace(
        rows,
        q=rows.q[:, :, start:stop],
        k=rows.k[:, :, left:right],
        v=rows.v[:, :, left:right],
        query=query,
        key=replace(rows.key, start=rows.key.start + left, length=right - left),
        key_mask=mask,
    )

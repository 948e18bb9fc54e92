"""Attention over rows: what it is computed from, all of it at once, and block by block.

Rows are independent in every method, so a block of rows against its own columns is exactly those rows of the whole.

B batch, H heads, h heads wanted, R query rows, C key columns, d head dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .encoding import Encoding, Terms
from .processor import Processor, Share
from .scores import Dense, attend, logits, share_for, table_for
from .shape import ALL_HEADS, Span


@dataclass(frozen=True)
class Rows:
    """What attention is computed from."""

    q: Tensor
    """Rotated queries [B, H, R, d]; without a processor [B, h, R, d]."""
    k: Tensor
    """Rotated keys [B, H or h, C, d]."""
    v: Tensor
    """Values [B, h, C, d]."""
    query: Span
    key: Span
    encoding: Encoding
    processor: Processor | None
    key_mask: Tensor | None = None
    """Bool [B, C] or [B, R, C], False for padding and keys of another document."""
    window: int | None = None
    """A row sees the last `window` keys only, its own included."""
    heads: slice = field(default_factory=lambda: ALL_HEADS)  # slices are not hashable before Python 3.12
    """The wanted heads: a tensor-parallel rank's own."""
    dropout: float = 0.0
    dense: Dense | None = None
    """Computes the encoding's matrices in its stead, where a backend knows a faster way."""


def logits_of(rows: Rows, table: Terms | None, share: Share | None = None) -> Tensor:
    """Masked logits of the rows, float32 [B, h, R, C]; arguments as in `attention`."""
    return logits(
        rows.q,
        rows.k,
        rows.query,
        rows.key,
        rows.encoding,
        rows.processor,
        table=table,
        key_mask=rows.key_mask,
        window=rows.window,
        heads=rows.heads,
        share=share,
        dense=rows.dense,
    )


def attention(rows: Rows, table: Terms | None, share: Share | None = None) -> Tensor:
    """All rows at once, their whole score map materialised: [B, h, R, d].

    Args:
        table: `table_for(…)` of these rows and columns or of more.
        share: `share_for(…)`, if the processor has one.
    """
    scores = logits_of(rows, table, share)
    return attend(scores, rows.v, rows.dropout, rows_may_be_empty=rows.key_mask is not None)


def attention_in_blocks(
    rows: Rows, size: int, run: Callable[[Rows, Terms | None, Share | None], Tensor] = attention
) -> Tensor:
    """The rows in blocks of `size`, each against its causal columns by `run`; what all blocks need is computed once."""
    blocks = prepared_blocks(rows, size)
    # The last block has the most columns. Where nothing is kept for a backward pass it comes first, so that what an
    # allocator took for its maps serves all others: in rising order each is a little too large for what the one before
    # left, and memory grows with T². A backward pass goes from the last to the first by itself.
    falling = not torch.is_grad_enabled()
    outputs = [run(*block) for block in (reversed(blocks) if falling else blocks)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs[::-1] if falling else outputs, dim=2)


def prepared_blocks(rows: Rows, size: int) -> list[tuple[Rows, Terms | None, Share | None]]:
    """The rows in blocks of `size`, each with what is computed once for all of them: its arguments of `attention`."""
    table = table_for(rows.encoding, rows.query, rows.key, rows.q.device)
    share = share_for(rows.processor, table, rows.query, rows.key, rows.key_mask, rows.window)
    return [(block, table, share) for block in row_blocks(rows, size)]


def row_blocks(rows: Rows, size: int) -> Iterator[Rows]:
    """The rows in blocks of `size`, each without the columns that none of its rows depends on."""
    for start in range(0, rows.query.length, size):
        yield _block(rows, start, min(start + size, rows.query.length))


def _block(rows: Rows, start: int, stop: int) -> Rows:
    query = replace(rows.query, start=rows.query.start + start, length=stop - start)
    left, right = 0, max(min(query.stop - rows.key.start, rows.key.length), 1)
    if rows.window is not None:
        reach = 0 if rows.processor is None else rows.processor.reach
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

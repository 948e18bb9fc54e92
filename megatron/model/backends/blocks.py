"""Blocks of query rows against the key columns that they see.

Rows are independent in every method, so a block of rows against its own columns is exactly those rows of the whole.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron.model.backends.backend import Rows


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

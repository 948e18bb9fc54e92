"""Blocks of query rows, recomputed in the backward pass: memory linear in T on any device.

Rows are independent in every method, so a block of rows against its causal columns is exactly those rows of the whole.
What is kept between the passes is q, k, v, the table over distances, and the output.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.model.backends.backend import Rows
from megatron.model.backends.eager import Eager, table_for
from megatron.position.encoding import Encoding, Terms
from megatron.position.processor import Processor
from megatron.position.shape import Span


class Chunked:
    """Blocks of `block` query rows."""

    def __init__(self, block: int) -> None:
        self.block = block

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, rows: Rows) -> Tensor:
        table = table_for(rows)
        outputs = []
        for start in range(0, rows.query.length, self.block):
            part = self._part(rows, start, min(start + self.block, rows.query.length))
            outputs.append(_recomputed(part, table) if torch.is_grad_enabled() else Eager.with_table(part, table))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    @staticmethod
    def _part(rows: Rows, start: int, stop: int) -> Rows:
        """Rows start … stop − 1 and the columns that the last of them sees."""
        query = Span(rows.query.start + start, stop - start)
        columns = max(min(query.stop - rows.key.start, rows.key.length), 1)
        mask = rows.key_mask
        if mask is not None:
            mask = mask[:, :columns] if mask.dim() == 2 else mask[:, start:stop, :columns]
        return replace(
            rows,
            q=rows.q[:, :, start:stop],
            k=rows.k[:, :, :columns],
            v=rows.v[:, :, :columns],
            query=query,
            key=Span(rows.key.start, columns),
            key_mask=mask,
        )


def _recomputed(rows: Rows, table: Terms | None) -> Tensor:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, weight: Tensor | None) -> Tensor:
        terms = None if table is None else Terms(bias, weight)
        return Eager.with_table(replace(rows, q=q, k=k, v=v), terms)

    bias, weight = table if table is not None else (None, None)
    return checkpoint(
        run, rows.q, rows.k, rows.v, bias, weight, use_reentrant=False, preserve_rng_state=rows.dropout > 0
    )

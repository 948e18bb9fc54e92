"""Blocks of query rows, recomputed in the backward pass: memory linear in T on any device.

What is kept between the passes is q, k, v, the table over distances, and the output.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.model.backends.backend import Rows
from megatron.model.backends.blocks import row_blocks
from megatron.model.backends.eager import Eager
from megatron.position.encoding import Encoding, Terms
from megatron.position.processor import Processor
from megatron.position.scores import table_for


class Chunked:
    """Blocks of `block` query rows."""

    def __init__(self, block: int) -> None:
        self.block = block

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, rows: Rows) -> Tensor:
        table = table_for(rows.encoding, rows.query, rows.key, rows.q.device)
        run = _recomputed if torch.is_grad_enabled() else Eager.with_table
        outputs = [run(block, table) for block in row_blocks(rows, self.block)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _recomputed(rows: Rows, table: Terms | None) -> Tensor:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, weight: Tensor | None) -> Tensor:
        terms = None if table is None else Terms(bias, weight)
        return Eager.with_table(replace(rows, q=q, k=k, v=v), terms)

    bias, weight = table if table is not None else (None, None)
    return checkpoint(
        run, rows.q, rows.k, rows.v, bias, weight, use_reentrant=False, preserve_rng_state=rows.dropout > 0
    )

"""Blocks of query rows against their causal columns, half of eager's work, on any device.

Recomputed in the backward pass, what is kept between the passes is q, k, v, the table over distances and the output:
memory linear in T. Kept, it is half of eager's.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.position.encoding import Encoding, Terms
from megatron.position.processor import Processor, Share
from megatron.position.rows import Rows, attention, attention_in_blocks


class Chunked:
    """Blocks of `block` query rows.

    Args:
        recompute: whether the backward pass computes a block's maps again, instead of keeping them.
    """

    def __init__(self, block: int, *, recompute: bool = True) -> None:
        self.block, self.recompute = block, recompute

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, rows: Rows) -> Tensor:
        run = _recomputed if self.recompute and torch.is_grad_enabled() else attention
        return attention_in_blocks(rows, self.block, run)


def _recomputed(rows: Rows, table: Terms | None, share: Share | None) -> Tensor:
    # What `run` holds stays until the backward pass, even where the layer around it is recomputed. So it holds no
    # queries, keys and values: it is handed those, which the layer's recomputation brings back.
    nothing = rows.q.new_empty(0)
    others = replace(rows, q=nothing, k=nothing, v=nothing)

    def run(q: Tensor, k: Tensor, v: Tensor, table: Terms | None, share: Share | None) -> Tensor:
        return attention(replace(others, q=q, k=k, v=v), table, share)

    return checkpoint(
        run, rows.q, rows.k, rows.v, table, share, use_reentrant=False, preserve_rng_state=rows.dropout > 0
    )

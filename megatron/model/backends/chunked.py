"""Blocks of query rows against their causal columns, half of eager's work, on any device.

Recomputed in the backward pass, what is kept between the passes is q, k, v, the table over distances and the output:
memory linear in T. Kept, it is half of eager's.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.processor import BiasContribution, Processor
from megatron.position.rows import AttentionInputs, attend_all, attend_in_blocks


class ChunkedBackend:
    """Blocks of `block_size` query rows.

    Args:
        recompute: whether the backward pass computes a block's maps again, instead of keeping them.
    """

    def __init__(self, block_size: int, *, recompute: bool = True) -> None:
        self.block_size, self.recompute = block_size, recompute

    def unsupported_reason(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        run = _attend_with_recompute if self.recompute and torch.is_grad_enabled() else attend_all
        return attend_in_blocks(inputs, self.block_size, run)


def _attend_with_recompute(
    inputs: AttentionInputs, table: ScoreTerms | None, bias_contribution: BiasContribution | None
) -> Tensor:
    # What `run` holds stays until the backward pass, even where the layer around it is recomputed. So it holds no
    # queries, keys and values: it is handed those, which the layer's recomputation brings back.
    empty = inputs.q.new_empty(0)
    others = replace(inputs, q=empty, k=empty, v=empty)

    def run(q: Tensor, k: Tensor, v: Tensor, table: ScoreTerms | None, share: BiasContribution | None) -> Tensor:
        return attend_all(replace(others, q=q, k=k, v=v), table, share)

    return checkpoint(
        run,
        inputs.q,
        inputs.k,
        inputs.v,
        table,
        bias_contribution,
        use_reentrant=False,
        preserve_rng_state=inputs.dropout > 0,
    )

"""PyTorch's fused attention, for methods that add nothing to the scores (none, learned, rotary …)."""

import torch
from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.rows import Rows, row_blocks
from megatron.position.scores import visible_keys

MASKED_ROWS = 512
"""Query rows per call where PyTorch takes who sees whom as a mask (with a window, or where the rows are not all of the
sequence): in blocks the mask stays linear in T, and no row is computed against keys that come after its block."""


class Sdpa:
    """Flash attention where the device has it; memory linear in T."""

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        if processor is not None:
            return "it cannot process scores"
        adds = [hook for hook in ("table", "dense", "contextual") if type(encoding).overrides(hook)]
        return "it cannot add a position bias to the scores" if adds else None

    def __call__(self, rows: Rows) -> Tensor:
        unbounded = rows.window is None or rows.window >= rows.query.stop - rows.key.start
        if unbounded and rows.query == rows.key and rows.key_mask is None:
            return torch.nn.functional.scaled_dot_product_attention(
                rows.q, rows.k, rows.v, dropout_p=rows.dropout, is_causal=True
            )
        return torch.cat([self._masked(block) for block in row_blocks(rows, MASKED_ROWS)], dim=2)

    @staticmethod
    def _masked(rows: Rows) -> Tensor:
        mask = visible_keys(rows.query, rows.key, rows.q.device, rows.window, rows.key_mask)
        return torch.nn.functional.scaled_dot_product_attention(
            rows.q, rows.k, rows.v, attn_mask=mask, dropout_p=rows.dropout
        )

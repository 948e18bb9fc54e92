"""PyTorch's fused attention, for methods that add nothing to the scores (none, learned, rotary …)."""

import torch
from torch import Tensor

from megatron.model.backends.backend import Rows
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.shape import causal


class Sdpa:
    """Flash attention where the device has it; memory linear in T."""

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        if processor is not None:
            return "it cannot process scores"
        adds = [hook for hook in ("table", "dense", "contextual") if type(encoding).overrides(hook)]
        return "it cannot add a position bias to the scores" if adds else None

    def __call__(self, rows: Rows) -> Tensor:
        whole = rows.query == rows.key and rows.key_mask is None
        mask = None
        if not whole:
            mask = causal(rows.query, rows.key, rows.q.device)[None, None]
            if rows.key_mask is not None:
                mask = mask & (rows.key_mask[:, None, None] if rows.key_mask.dim() == 2 else rows.key_mask[:, None])
        return torch.nn.functional.scaled_dot_product_attention(
            rows.q, rows.k, rows.v, attn_mask=mask, dropout_p=rows.dropout, is_causal=whole
        )

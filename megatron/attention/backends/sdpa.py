"""PyTorch's fused attention, for methods that add nothing to the scores (none, learned, rotary …)."""

import torch
from torch import Tensor

from megatron.attention.inputs import AttentionInputs, iter_row_blocks
from megatron.attention.reference import compute_visibility
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor

MASKED_ROWS = 512
"""Query rows per call where PyTorch takes who sees whom as a mask (with a window, or where the rows are not all of the
sequence): in blocks the mask stays linear in T, and no row is computed against keys that come after its block."""


class SdpaBackend:
    """Flash attention where the device has it; memory linear in T."""

    def unsupported_reason(self, encoding: Encoding, processor: Processor | None) -> str | None:
        if processor is not None:
            return "it cannot process scores"
        adds = [hook for hook in ("table", "dense", "contextual") if type(encoding).overrides_hook(hook)]
        return "it cannot add a position bias to the scores" if adds else None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        unbounded = inputs.window is None or inputs.window >= inputs.query.stop - inputs.key.start
        if unbounded and inputs.query == inputs.key and inputs.key_mask is None:
            return torch.nn.functional.scaled_dot_product_attention(
                inputs.q, inputs.k, inputs.v, dropout_p=inputs.dropout, is_causal=True
            )
        return torch.cat([self._attend_masked(block) for block in iter_row_blocks(inputs, MASKED_ROWS)], dim=2)

    @staticmethod
    def _attend_masked(inputs: AttentionInputs) -> Tensor:
        mask = compute_visibility(inputs)
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, attn_mask=mask, dropout_p=inputs.dropout
        )

"""Attention with a bias matrix that a kernel makes: what `triton` does where no kernel fuses bias and attention.

h heads wanted, R query rows, C key columns.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from megatron.position.encoding import ScoreTerms
from megatron.position.forms import FireParameters
from megatron.position.rows import AttentionInputs, iter_row_blocks
from megatron.position.shape import PositionRange, causal_mask

BLOCK = 256
"""Query rows per call of PyTorch's attention."""


def attend_with_bias_matrix(inputs: AttentionInputs, bias: Tensor | None, fire: FireParameters | None) -> Tensor:
    """PyTorch's fused attention in blocks of rows, with dropout if wanted. No processor, no weight, no key mask.

    Blocks are recomputed in the backward pass, so memory is linear in T. The matrix is rounded to the type of q, which
    PyTorch asks for.

    Args:
        bias: a Toeplitz table, float32 [H, N], or None.
        fire: FIRE's, or None.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, network: FireParameters | None, block: AttentionInputs
    ) -> Tensor:
        matrix = _build_matrix(block, bias, network)
        if block.window is not None:
            matrix = matrix.masked_fill(~causal_mask(block.query, block.key, q.device, block.window), float("-inf"))
        return scaled_dot_product_attention(q, k, v, attn_mask=matrix[None], dropout_p=block.dropout)

    outputs = []
    for block in iter_row_blocks(inputs, BLOCK):
        arguments = (block.q, block.k, block.v, bias, fire, block)
        outputs.append(checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=inputs.dropout > 0))
    return torch.cat(outputs, dim=2)


def _build_matrix(inputs: AttentionInputs, bias: Tensor | None, fire: FireParameters | None) -> Tensor:
    """[h, R, C] in the type of q, −inf for keys in the future."""
    from kernels.bias.op import toeplitz_bias

    above = float("-inf")
    if bias is None:
        assert fire is not None
        return compute_fire_bias(fire, inputs.query, inputs.key, inputs.heads, inputs.q.dtype, above)
    offset = inputs.query.start - inputs.key.start
    table = bias[inputs.heads]
    return toeplitz_bias(
        table, inputs.query.length, inputs.key.length, offset=offset, dtype=inputs.q.dtype, above=above
    )


def compute_fire_bias(
    fire: FireParameters, query: PositionRange, key: PositionRange, heads: slice, dtype: torch.dtype, above: float = 0.0
) -> Tensor:
    """FIRE's bias [h, R, C] from its kernel, `above` for keys in the future."""
    from kernels.bias.op import fire_bias

    return fire_bias(
        fire.c,
        fire.multiplier,
        fire.weight1,
        fire.bias1,
        fire.weight2[heads],
        fire.bias2[heads],
        query.length,
        key.length,
        half_length=fire.half_length,
        offset=query.start - key.start,
        first_column=key.start,
        dtype=dtype,
        above=above,
    )


def use_fire_kernel(inputs: AttentionInputs, fire: FireParameters) -> AttentionInputs:
    """The same rows, their bias from the kernel, for backends that ask block by block."""

    def dense(query: PositionRange, key: PositionRange, like: Tensor, heads: slice) -> ScoreTerms:
        return ScoreTerms(bias=compute_fire_bias(fire, query, key, heads, torch.float32))

    return replace(inputs, dense=dense)

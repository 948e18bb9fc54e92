"""Attention with a bias matrix that a kernel makes: what `triton` does where no kernel fuses bias and attention.

h heads wanted, R query rows, C key columns.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from megatron.position.encoding import Terms
from megatron.position.forms import Network
from megatron.position.rows import Rows, row_blocks
from megatron.position.shape import Span, causal

BLOCK = 256
"""Query rows per call of PyTorch's attention."""


def attend_with_matrix(rows: Rows, bias: Tensor | None, network: Network | None) -> Tensor:
    """PyTorch's fused attention in blocks of rows, with dropout if wanted. No processor, no weight, no key mask.

    Blocks are recomputed in the backward pass, so memory is linear in T. The matrix is rounded to the type of q, which
    PyTorch asks for.

    Args:
        bias: a Toeplitz table, float32 [H, N], or None.
        network: FIRE's, or None.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, network: Network | None, block: Rows) -> Tensor:
        matrix = _matrix(block, bias, network)
        if block.window is not None:
            matrix = matrix.masked_fill(~causal(block.query, block.key, q.device, block.window), float("-inf"))
        return scaled_dot_product_attention(q, k, v, attn_mask=matrix[None], dropout_p=block.dropout)

    outputs = []
    for block in row_blocks(rows, BLOCK):
        inputs = (block.q, block.k, block.v, bias, network, block)
        outputs.append(checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=rows.dropout > 0))
    return torch.cat(outputs, dim=2)


def _matrix(rows: Rows, bias: Tensor | None, network: Network | None) -> Tensor:
    """[h, R, C] in the type of q, −inf for keys in the future."""
    from kernels.bias.op import toeplitz_bias

    above = float("-inf")
    if bias is None:
        assert network is not None
        return network_bias(network, rows.query, rows.key, rows.heads, rows.q.dtype, above)
    offset = rows.query.start - rows.key.start
    table = bias[rows.heads]
    return toeplitz_bias(table, rows.query.length, rows.key.length, offset=offset, dtype=rows.q.dtype, above=above)


def network_bias(
    network: Network, query: Span, key: Span, heads: slice, dtype: torch.dtype, above: float = 0.0
) -> Tensor:
    """FIRE's bias [h, R, C] from its kernel, `above` for keys in the future."""
    from kernels.bias.op import fire_bias

    return fire_bias(
        network.c,
        network.multiplier,
        network.weight1,
        network.bias1,
        network.weight2[heads],
        network.bias2[heads],
        query.length,
        key.length,
        half_length=network.half_length,
        offset=query.start - key.start,
        first_column=key.start,
        dtype=dtype,
        above=above,
    )


def with_network_in_kernel(rows: Rows, network: Network) -> Rows:
    """The same rows, their bias from the kernel, for backends that ask block by block."""

    def dense(query: Span, key: Span, like: Tensor, heads: slice) -> Terms:
        return Terms(bias=network_bias(network, query, key, heads, torch.float32))

    return replace(rows, dense=dense)

"""Running sums of gates, the bias of FoX, and their adjoint: one launch each instead of six operations of PyTorch.

B batch, H heads, C tokens of a segment, R of which are rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.runtime import Tile, get_uncompiled_apply, launch, launch_context

TILE = Tile(1, 1024, 4, 1)
"""Tokens that a program sums at a time."""
CONSTANTS = {"BLOCK": TILE.block_n}
GRID = tl.constexpr(1.5 * 2.0**24)
"""Constant that rounds a float64 to a multiple of 2⁻²⁸ if added and subtracted (`attention.reference.sum_gates`)."""


@triton.jit(do_not_specialize=["H", "C", "R", "batch_stride", "head_stride", "token_stride"])
def _gate_sums_kernel(
    gates_ptr,  # float32 [B, H, C]
    row_ptr,  # float64 [B, H, R]: written
    key_ptr,  # float64 [B, H, C]: written
    H,
    C,
    R,
    batch_stride,
    head_stride,
    token_stride,
    BLOCK: tl.constexpr,
):
    """Write F for the rows and −F for all tokens, where F is the running sum of a head's gates. Grid: heads."""
    pair = tl.program_id(0).to(tl.int64)
    gates_ptr += pair // H * batch_stride + pair % H * head_stride
    total = tl.zeros([], tl.float64)
    for first in range(0, C, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < C
        gates = tl.load(gates_ptr + token.to(tl.int64) * token_stride, inside, 0.0).to(tl.float64)
        gates = (gates + GRID) - GRID  # their sums are then exact, in whatever order
        sums = total + tl.cumsum(gates, 0)
        total += tl.sum(gates, 0)
        tl.store(key_ptr + pair * C + token, -sums, inside)
        row = token - (C - R)
        tl.store(row_ptr + pair * R + row, sums, inside & (row >= 0))


@triton.jit(
    do_not_specialize=[
        *("H", "C", "R", "row_batch", "row_head", "row_token", "key_batch", "key_head", "key_token"),
        *("batch_stride", "head_stride", "token_stride"),
    ]
)
def _gate_sums_bwd_kernel(
    drow_ptr,  # float64 [B, H, R]
    dkey_ptr,  # float64 [B, H, C]
    dgates_ptr,  # float32 [B, H, C]: written
    H,
    C,
    R,
    row_batch,
    row_head,
    row_token,
    key_batch,
    key_head,
    key_token,
    batch_stride,
    head_stride,
    token_stride,
    BLOCK: tl.constexpr,
):
    """Write the sums of drow − dkey from each token on. Grid: heads."""
    pair = tl.program_id(0).to(tl.int64)
    drow_ptr += pair // H * row_batch + pair % H * row_head
    dkey_ptr += pair // H * key_batch + pair % H * key_head
    dgates_ptr += pair // H * batch_stride + pair % H * head_stride
    total = tl.zeros([], tl.float64)
    for step in range(0, C, BLOCK):
        token = C - 1 - step - tl.arange(0, BLOCK)  # the last tokens first
        inside, row = token >= 0, token - (C - R)
        own = tl.load(drow_ptr + row.to(tl.int64) * row_token, inside & (row >= 0), 0.0)
        own -= tl.load(dkey_ptr + token.to(tl.int64) * key_token, inside, 0.0)
        sums = total + tl.cumsum(own, 0)
        total += tl.sum(own, 0)
        tl.store(dgates_ptr + token.to(tl.int64) * token_stride, sums.to(tl.float32), inside)


class _SumGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        batch, heads, count = gates.shape
        ctx.sizes, ctx.strides = (batch, heads, count, num_rows), gates.stride()
        row_bias = torch.empty(batch, heads, num_rows, dtype=torch.float64, device=gates.device)
        key_bias = torch.empty(batch, heads, count, dtype=torch.float64, device=gates.device)
        arguments = (gates, row_bias, key_bias, heads, count, num_rows, *gates.stride())
        with launch_context(gates):
            launch(_gate_sums_kernel, (batch * heads, 1, 1), arguments, CONSTANTS, TILE.options)
        return row_bias, key_bias

    @staticmethod
    def backward(ctx: Any, drow: Tensor, dkey: Tensor) -> tuple[Tensor, None]:
        batch, heads, count, num_rows = ctx.sizes
        # Laid out like the gates, which are a view of activations.
        order = sorted(range(3), key=lambda dimension: ctx.strides[dimension], reverse=True)
        sizes = [ctx.sizes[dimension] for dimension in order]
        places = [order.index(dimension) for dimension in range(3)]
        dgates = torch.empty(sizes, dtype=torch.float32, device=drow.device).permute(places)
        strides = (*drow.stride(), *dkey.stride(), *dgates.stride())
        arguments = (drow, dkey, dgates, heads, count, num_rows, *strides)
        with launch_context(drow):
            launch(_gate_sums_bwd_kernel, (batch * heads, 1, 1), arguments, CONSTANTS, TILE.options)
        return dgates, None


def sum_gates(gates: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Compute what `attention.reference.sum_gates` computes, bit for bit; gradients differ by the order of sums.

    Args:
        gates: float32 [B, H, C].
        num_rows: R, the number of last tokens that are rows.

    Returns:
        Row terms [B, H, R] and column terms [B, H, C], float64.

    Raises:
        ValueError: if gates are not float32.
    """
    if gates.dtype != torch.float32:
        raise ValueError(f"gates are {gates.dtype}; they must be float32")
    row_bias, key_bias = get_uncompiled_apply(_SumGates)(gates, num_rows)
    return row_bias, key_bias

"""Bias of gates before a processor: a row term plus a column term, in the layout that CUDA kernels read.

From such a bias Conv1 computes a vector of the row plus a vector of the column, unless some taps are outside of the
columns that the row sees. E has the values of these exceptions in 4p columns of each row: 2p around the first column
that it sees, f (f − p … f + p − 1), and 2p around its last (i − p + 1 … i + p). `gate_kernels.py` computes the terms of
a chunk in one launch, and the gradients of a call in two.

B batch, H heads, R query rows, C key columns, D processor width, k kernel size, p = k//2. The kernels pad H to 16 and D
to 32.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk
from megatron.kernels.cdape_attention.gate_kernels import (
    _gate_gradients_kernel,
    _gate_operands_kernel,
    _gate_weights_kernel,
)
from megatron.kernels.cdape_attention.geometry import HEADS, WIDTH
from megatron.kernels.cdape_attention.mixer_operands import (
    BLOCK_ROWS,
    MAX_TILE_COLUMNS,
    Fragments,
    build_fragment_index,
    unpack_weights,
)
from megatron.kernels.cdape_attention.weights import WeightShape, list_packed_sources, unpack_gradients
from megatron.kernels.runtime import Tile, cdiv, launch

TERMS_TILE = Tile(32, 32, 4, 1)
"""Tokens of a program that computes terms or their gradients."""
WEIGHTS_TILE = Tile(32, 64, 4, 1)
"""Partial sums and entries that a program of the weights' gradients loads at a time."""
WEIGHTS_CONSTANTS = WEIGHTS_TILE.blocks


class GateInputs(ctypes.Structure):
    """Row and column terms, as declared in `cuda/gates.h`; zero without gates."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "columns")),
        *((name, ctypes.c_longlong) for name in ("rows_batch", "columns_batch", "edge_batch", "bias_batch")),
    )


class GateBias(NamedTuple):
    """Bias of a call, and the weights that read it."""

    rows: Tensor
    """Row terms, float64 or float32 [B, H, R]; the last dimension is contiguous."""
    keys: Tensor
    """Column terms, likewise [B, H, C]."""
    w1: Tensor
    """Weight of Conv1, [D, 2H, 1, k], contiguous like the other weights."""
    b1: Tensor
    """Constant of Conv1, [D]."""
    w2: Tensor
    """Weight of Conv2, [H, D, 1, k]."""
    is_residual: bool
    """True if the bias is also added to the logits."""


class GateOperands(NamedTuple):
    """Operands of the kernels for a chunk of rows, in float32 and relative to the chunk's first row.

    Only differences of running sums are rounded to float32, not the sums, which may be large.
    """

    rows: Tensor
    """Vectors of the rows, [B, R, 32], without Conv1's constant."""
    columns: Tensor
    """Vectors of the columns, [B, front + C + back, 32], including Conv1's constant."""
    edge: Tensor
    """E, the exceptions of each row, [B, R, 4p, 32]."""
    bias: Tensor
    """Bias of the logits by column, [B, 16, front + C + back].

    The softmax cancels a bias of the row, unless it has a sink (`compute_row_offsets`).
    """
    fragments: Fragments
    """Weights of the call, L = 1."""

    @property
    def inputs(self) -> GateInputs:
        """Addresses and strides of the tensors, as kernel arguments."""
        columns = self.columns.data_ptr() + MAX_TILE_COLUMNS * WIDTH * 4
        batches = (x.stride(0) * 4 for x in (self.rows, self.columns, self.edge, self.bias))
        return GateInputs(self.rows.data_ptr(), columns, *batches)

    @property
    def bias_pointer(self) -> int:
        """Address of the first head's entry of column 0."""
        return self.bias.data_ptr() + MAX_TILE_COLUMNS * 4


def build_gate_operands(
    problem: CdapeProblem, bias: GateBias, chunk: Chunk, fragments: Fragments | None = None
) -> GateOperands:
    """Build the operands of a chunk in one launch.

    Args:
        fragments: weights from another chunk of the call, or None to build them.
    """
    (batch, _, _), shape, like = bias.rows.shape, problem.shape, bias.rows
    padding, taps = shape.padding, shape.kernel_size
    # A block's tiles may begin left of column 0, and may end after the column of its last row.
    count = chunk.right - chunk.left + BLOCK_ROWS + 2 * MAX_TILE_COLUMNS
    entries, bias_entries = count + padding, count + -count % 4
    sizes = ((chunk.rows, WIDTH), (entries, WIDTH), (chunk.rows, 4 * padding, WIDTH), (HEADS, bias_entries))
    rows, columns, edge, of_logits = (like.new_empty(batch, *size, dtype=torch.float32) for size in sizes)
    index, exchanged, plain = None, None, None
    if fragments is None:
        index = _build_fragment_sources(shape, like.device)
        exchanged = like.new_empty(1, len(index) // 2, dtype=torch.float16)
        plain = like.new_empty(1, len(index) // 2, dtype=problem.dtype)
        fragments = Fragments(*exchanged.chunk(2, 1), *plain.chunk(2, 1))
    starts = problem.document_starts
    tensors = (bias.rows, bias.keys, bias.w1, bias.b1, starts, rows, columns, edge, of_logits)
    launch(
        _gate_operands_kernel,
        (cdiv(max(entries, bias_entries), TERMS_TILE.block_m), batch, 2 + 4 * padding + (index is not None)),
        (
            *tensors,
            *((None,) * 4 if index is None else (bias.w2, index, exchanged, plain)),
            *_get_strides(bias, starts),
            *(shape.heads, shape.width, chunk.first, chunk.last, chunk.left, problem.offset, problem.window),
            *(bias.keys.shape[2], entries, bias_entries, 0 if index is None else len(index), bias.w1.numel()),
        ),
        build_operand_constants(taps, is_residual=bias.is_residual),
        TERMS_TILE.options,
    )
    return GateOperands(rows, columns, edge, of_logits, fragments)


def _get_strides(bias: GateBias, document_starts: Tensor | None) -> tuple[int, ...]:
    return *bias.rows.stride()[:2], *bias.keys.stride()[:2], 0 if document_starts is None else document_starts.stride(0)


@cache
def build_operand_constants(taps: int, *, is_residual: bool) -> dict[str, Any]:
    """Return the constants of the kernel for operands."""
    return {"K": taps, "FRONT": MAX_TILE_COLUMNS, "RESIDUAL": is_residual, "BLOCK": TERMS_TILE.block_m}


@cache
def build_gradient_constants(taps: int, *, is_residual: bool) -> dict[str, Any]:
    """Return the constants of the kernel for gradients of terms."""
    return {"K": taps, "RESIDUAL": is_residual, "BLOCK": TERMS_TILE.block_m}


def compute_row_offsets(row_bias: Tensor, chunk_rows: int) -> Tensor:
    """Return the row terms that the kernels omit from the logits, float32 [B, H, R], contiguous.

    They are relative to the first row of each chunk.
    """
    row_bias = row_bias.double()
    origins = row_bias[..., ::chunk_rows].repeat_interleave(chunk_rows, 2)[..., : row_bias.shape[2]]
    return (row_bias - origins).to(torch.float32, memory_format=torch.contiguous_format)


class GateSums(NamedTuple):
    """Gradients of the terms of a call, float32, summed by the CUDA kernels.

    The first 32 channels are gradients of hidden values, in the order of the kernels' n-tiles; the other 16 are those
    of logits.
    """

    rows: Tensor
    """Sums over each row's columns, [B, R, 48]."""
    columns: Tensor
    """Sums over each column's rows, [B, C, 48]. Hidden values are those of column c + p; those before are all in E."""
    edge: Tensor
    """Gradient of E, [B, R, 4p, 32]."""
    weights: Tensor
    """Gradients of the other weights, [1, n], see `mixer_operands.unpack_weights`."""


class GateGradients(NamedTuple):
    """Gradients of the bias and the weights of a call, in the types of these."""

    rows: Tensor
    keys: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    """Zero, because the kernels omit the constant."""


def differentiate_gates(problem: CdapeProblem, bias: GateBias, b2: Tensor, sums: GateSums) -> GateGradients:
    """Return the gradients of a call in two launches. Weights get partial sums first, added in a fixed order."""
    (batch, heads, rows), columns, shape = bias.rows.shape, bias.keys.shape[2], problem.shape
    taps, starts = shape.kernel_size, problem.document_starts
    drow = torch.empty(batch, heads, rows, dtype=bias.rows.dtype, device=b2.device)
    dkey = torch.empty(batch, heads, columns, dtype=bias.keys.dtype, device=b2.device)
    grid = (cdiv(max(rows, columns), TERMS_TILE.block_m), batch, 2)
    entries = taps * WIDTH * HEADS + WIDTH
    partial = sums.rows.new_empty(grid[0] * batch * 2, entries, dtype=torch.float64)
    launch(
        _gate_gradients_kernel,
        grid,
        (
            *(sums.rows, sums.columns, sums.edge, bias.rows, bias.keys, bias.w1, starts, drow, dkey, partial),
            *_get_strides(bias, starts),
            *(heads, shape.width, rows, problem.offset, problem.window, columns, entries),
        ),
        build_gradient_constants(taps, is_residual=bias.is_residual),
        TERMS_TILE.options,
    )
    weights = tuple(torch.empty_like(x) for x in (bias.w1, bias.b1, bias.w2, b2))
    ends = [bias.w1.numel()]
    for x in weights[1:]:
        ends.append(ends[-1] + x.numel())
    launch(
        _gate_weights_kernel,
        (cdiv(ends[-1], WEIGHTS_TILE.block_n), 1, 1),
        (
            *(sums.weights, partial, _build_gradient_sources(shape, b2.device), *weights),
            *(entries, sums.weights.shape[1], len(partial), *ends),
        ),
        WEIGHTS_CONSTANTS,
        WEIGHTS_TILE.options,
    )
    return GateGradients(drow, dkey, *weights)


@cache
def _build_fragment_sources(shape: WeightShape, device: torch.device) -> Tensor:
    """Return the source of each entry of the fragments, int32.

    Sources are entries of w1, the number of these plus an entry of w2, or −1 for padding.
    """
    with torch.inference_mode(False):
        heads, width, taps = shape.heads, shape.width, shape.kernel_size
        w1, w2 = list_packed_sources(shape)  # among the score half of w1, b1, w2 and b2
        size = width * heads * taps
        zero = 2 * size + width + heads
        if missing := WIDTH - w1.shape[2]:
            w1, w2 = F.pad(w1, (0, missing), value=zero), F.pad(w2, (0, 0, 0, missing), value=zero)
        index = build_fragment_index(taps, HEADS, WIDTH, w1.device)
        source = torch.cat([w1.flatten(), w2.flatten()])[index]
        d, in_half = source // (heads * taps), source % (heads * taps)
        of_w1 = d * (2 * heads * taps) + in_half
        of_w2 = 2 * size + source - (size + width)
        source = torch.where(source < size, of_w1, torch.where(source == zero, -1, of_w2))
        return source.to(device, torch.int32)


@cache
def _build_gradient_sources(shape: WeightShape, device: torch.device) -> Tensor:
    """Return the source of each entry of the gradients of w1, b1, w2 and b2, int32.

    Sources are entries of the CUDA kernels' sums, the number of these plus an entry of the partial sums, or −1 for 0.
    """
    with torch.inference_mode(False):
        heads, width, taps = shape.heads, shape.width, shape.kernel_size
        count = 2 * taps * HEADS * WIDTH
        # Numbers of entries pass through the functions that unpack a single layer's sums.
        patches = unpack_weights(1.0 + torch.arange(count)[None], shape)
        nothing = patches.new_zeros(1, 0), patches.new_zeros(1, width)
        ((scores, _, w2, b2),) = unpack_gradients(shape, patches, *nothing, (torch.float32,) * 4)
        d, head, tap = torch.meshgrid(*(torch.arange(n) for n in (width, heads, taps)), indexing="ij")
        of_bias = count + (tap * WIDTH + d) * HEADS + head
        w1 = torch.stack([scores[:, :, 0].long() - 1, of_bias], 1)
        b1 = count + taps * WIDTH * HEADS + torch.arange(width)
        sources = [w1.flatten(), b1, w2.long().flatten() - 1, b2.long() - 1]
        return torch.cat(sources).to(device, torch.int32)

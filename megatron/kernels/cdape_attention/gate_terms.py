"""Bias of gates before a processor: a term of the row plus a term of the column, in the form that CUDA kernels read.

Conv1's part of such a bias is a vector of the row plus a vector of the column, unless some taps are outside of what the
row sees. E has the exceptions: 3p columns of each row, its first p and the 2p around its last one (i − p + 1 … i + p).

B batch, H heads, R query rows, C key columns, D processor width, k kernel size, p = k//2. The kernels pad H to 16 and D
to 32.
"""

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.cdape_attention.geometry import HEADS, WIDTH
from megatron.kernels.cdape_attention.mixer_operands import BLOCK_ROWS, MAX_TILE_COLUMNS, list_tile_widths


class GateInputs(ctypes.Structure):
    """Terms of rows and columns, as `cuda/gates.h` declares them; zero without gates."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "columns")),
        *((name, ctypes.c_longlong) for name in ("rows_batch", "columns_batch", "edge_batch", "bias_batch")),
    )


class GateTerms(NamedTuple):
    """Conv1's part of the bias, float64: it is a difference of sums over all tokens."""

    rows: Tensor
    """[B, R, D], including Conv1's constant."""
    columns: Tensor
    """[B, C + p, D]."""
    edge: Tensor
    """Values of E, the sums of both, [B, R, 3p, D]."""


def compute_gate_terms(
    row_bias: Tensor,
    key_bias: Tensor,
    bias_weight: Tensor,
    constant: Tensor,
    offset: int,
    document_starts: Tensor | None,
) -> GateTerms:
    """Compute the terms of a call in differentiable PyTorch.

    Args:
        row_bias: float64 [B, H, R].
        key_bias: float64 [B, H, C].
        bias_weight: bias half of Conv1, [D, H, k].
        constant: Conv1's constant, [D].
        offset: column of the first row.
        document_starts: first column of each row's document, int32 [B, R], or None.
    """
    width, heads, size = bias_weight.shape
    padding, (batch, _, num_rows), columns = size // 2, row_bias.shape, key_bias.shape[2]
    weight, constant = bias_weight.double(), constant.double()
    rows = row_bias.mT @ weight.sum(2).mT + constant
    by_tap = weight.permute(1, 2, 0).reshape(heads * size, width)
    neighbours = F.pad(key_bias, (padding, 2 * padding)).unfold(2, size, 1)  # [B, H, C + p, k]
    of_columns = neighbours.transpose(1, 2).reshape(batch, columns + padding, heads * size) @ by_tap
    if not padding:
        return GateTerms(rows, of_columns, rows.new_empty(batch, num_rows, 0, width))
    device = row_bias.device
    last = torch.arange(offset, offset + num_rows, device=device)[None, :, None]
    first = last.new_zeros(1, 1, 1) if document_starts is None else document_starts[..., None].long()
    begin = first + torch.arange(padding, device=device)
    end = last + torch.arange(1 - padding, padding + 1, device=device)
    places = torch.cat([begin.expand(batch, num_rows, -1), end.expand(batch, num_rows, -1)], 2)
    taken = places[..., None] + torch.arange(-padding, padding + 1, device=device)  # [B, R, 3p, k]
    is_seen = (taken >= first[..., None]) & (taken <= last[..., None])
    index = taken.clamp(0, columns - 1).view(batch, 1, -1).expand(-1, heads, -1)
    bias = (key_bias.gather(2, index).view(batch, heads, *taken.shape[1:]) + row_bias[..., None, None]) * is_seen[
        :, None
    ]
    edge = bias.permute(0, 2, 3, 1, 4).reshape(batch, num_rows, 3 * padding, heads * size) @ by_tap + constant
    return GateTerms(rows, of_columns, edge)


class GateOperands(NamedTuple):
    """What the kernels read of a chunk of rows, float32. Terms are relative to the chunk's first row.

    Its position bounds the error: a difference of running sums is rounded, not the sums.
    """

    rows: Tensor
    """[B, R, 32]."""
    columns: Tensor
    """[B, front + C + back, 32]."""
    edge: Tensor
    """[B, R, 3p, 32]."""
    bias: Tensor
    """What is added to the logits of a column, [B, 16, front + C + back]. The softmax cancels what is added to a row.
    """

    @property
    def inputs(self) -> GateInputs:
        """The tensors as a kernel takes them."""
        columns = self.columns.data_ptr() + MAX_TILE_COLUMNS * WIDTH * 4
        batches = (x.stride(0) * 4 for x in (self.rows, self.columns, self.edge, self.bias))
        return GateInputs(self.rows.data_ptr(), columns, *batches)

    @property
    def bias_pointer(self) -> int:
        """Address of the first head's entry of column 0."""
        return self.bias.data_ptr() + MAX_TILE_COLUMNS * 4


def build_gate_operands(
    terms: GateTerms, row_bias: Tensor, key_bias: Tensor, first: int, last: int, right: int, *, residual_bias: bool
) -> GateOperands:
    """Build the operands of the chunk of rows first … last − 1, whose maps have columns 0 … right − 1.

    Args:
        terms, row_bias, key_bias: as in `compute_gate_terms`.
        residual_bias: True if the bias is also added to the logits.
    """
    padding, widths = terms.edge.shape[2] // 3, (0, WIDTH - terms.rows.shape[2])
    origin = terms.rows[:, first : first + 1]
    rows, edge = terms.rows[:, first:last] - origin, terms.edge[:, first:last]
    # A block's tiles may begin left of column 0, and end behind the row that follows its last.
    around = (MAX_TILE_COLUMNS, BLOCK_ROWS + MAX_TILE_COLUMNS)
    columns = F.pad((terms.columns[:, : right + padding] + origin).float(), (*widths, *around))
    if residual_bias:
        bias = (key_bias[..., :right] + row_bias[..., first : first + 1]).float()
        bias = F.pad(bias, (*around, 0, HEADS - bias.shape[1]))
        bias = F.pad(bias, (0, -bias.shape[2] % 4))
    else:
        entries = sum(around) + right
        bias = rows.new_zeros(len(rows), HEADS, entries + -entries % 4, dtype=torch.float32)
    return GateOperands(F.pad(rows.float(), widths), columns, F.pad(edge.float(), widths), bias)


class GateSums(NamedTuple):
    """Sums of gradients over a row or a column, float32."""

    hidden: Tensor
    """Of hidden values, [B, R or C, D]."""
    logits: Tensor
    """Of logits, [B, H, R or C]."""


def unpack_gate_sums(sums: Tensor, width: int, heads: int) -> GateSums:
    """Return the gradients of hidden values and of logits among the kernels' sums [B, n, 48]."""
    hidden = sums.index_select(2, _list_width_channels(sums.device))[..., :width]
    return GateSums(hidden, sums[..., WIDTH : WIDTH + heads].mT)


@cache
def _list_width_channels(device: torch.device) -> Tensor:
    """Return the channel of each width in the kernels' sums."""
    return torch.tensor(list_tile_widths()).argsort().to(device)

"""Bias of gates before a processor: a term of the row plus a term of the column, in the form that CUDA kernels read.

Conv1's part of such a bias is a vector of the row plus a vector of the column, unless some taps are outside of what the
row sees. E has the exceptions: 3p columns of each row, its first p and the 2p around its last one (i − p + 1 … i + p).

B batch, H heads, R query rows, C key columns, D processor width, k kernel size, p = k//2. The kernels pad H to 16 and D
to 32.
"""

import ctypes
from functools import cache, lru_cache
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
    weight, constant, keys = bias_weight.double(), constant.double(), key_bias.mT
    rows = row_bias.mT @ weight.sum(2).mT + constant
    by_tap = weight.permute(2, 1, 0).reshape(size * heads, width)
    neighbours = F.pad(keys, (0, 0, padding, 2 * padding)).unfold(1, size, 1)  # [B, C + p, H, k]
    of_columns = neighbours.mT.reshape(batch, columns + padding, size * heads) @ by_tap
    if not padding:
        return GateTerms(rows, of_columns, rows[:, :, None][:, :, :0])  # differentiable, as with taps
    taken, is_seen = _find_exceptions(num_rows, offset, padding, document_starts, keys.device)
    # Sequences by an index, whose gradients are added up in a fixed order, unlike those of `gather`.
    sequences = torch.arange(batch, device=keys.device)[:, None, None, None]
    bias = (keys[sequences, taken] + row_bias.mT[:, :, None, None]) * is_seen[..., None]  # [B, R, 3p, k, H]
    edge = bias.reshape(batch, num_rows, 3 * padding, size * heads) @ by_tap + constant
    return GateTerms(rows, of_columns, edge)


def _find_exceptions(
    num_rows: int, offset: int, padding: int, document_starts: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the columns that the taps of E read, [1 or B, R, 3p, k], and whether the row sees them.

    Where it does not, the column is any that exists.
    """
    if document_starts is None:
        return _find_whole_exceptions(num_rows, offset, padding, device)
    return _locate_taps(document_starts[..., None].long(), offset, padding)


@lru_cache(maxsize=64)
def _find_whole_exceptions(num_rows: int, offset: int, padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return _locate_taps(torch.zeros(1, num_rows, 1, dtype=torch.int64, device=device), offset, padding)


def _locate_taps(first: Tensor, offset: int, padding: int) -> tuple[Tensor, Tensor]:
    device, num_rows = first.device, first.shape[1]
    last = torch.arange(offset, offset + num_rows, device=device)[None, :, None]
    begin = first + torch.arange(padding, device=device)
    end = last + torch.arange(1 - padding, padding + 1, device=device)
    places = torch.cat([begin, end.expand(len(first), -1, -1)], 2)
    taken = places[..., None] + torch.arange(-padding, padding + 1, device=device)
    is_seen = (taken >= first[..., None]) & (taken <= last[..., None])
    return taken.clamp_(0, offset + num_rows - 1), is_seen


class GateOperands(NamedTuple):
    """Operands of the kernels for a chunk of rows, float32. Terms are relative to the chunk's first row.

    Its position bounds the error: a difference of running sums is rounded, not the sums.
    """

    rows: Tensor
    """[B, R, 32]."""
    columns: Tensor
    """[B, front + C + back, 32]."""
    edge: Tensor
    """[B, R, 3p, 32]."""
    bias: Tensor
    """Bias of the logits by column, [B, 16, front + C + back]. The softmax cancels a bias of the row."""

    @property
    def inputs(self) -> GateInputs:
        """Addresses and strides of the tensors, as a kernel takes them."""
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
    """Sums of the gradients of hidden values, [B, R or C, D]."""
    logits: Tensor
    """Sums of the gradients of logits, [B, H, R or C]."""


def unpack_gate_sums(sums: Tensor, width: int, heads: int) -> GateSums:
    """Return the gradients of hidden values and of logits among the kernels' sums [B, n, 48]."""
    hidden = sums.index_select(2, _list_width_channels(sums.device))[..., :width]
    return GateSums(hidden, sums[..., WIDTH : WIDTH + heads].mT)


@cache
def _list_width_channels(device: torch.device) -> Tensor:
    """Return the channel of each width in the kernels' sums."""
    return torch.tensor(list_tile_widths()).argsort().to(device)

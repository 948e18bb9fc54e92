"""Bias of gates before a processor: a row term plus a column term, in the layout that CUDA kernels read.

From such a bias Conv1 computes a vector of the row plus a vector of the column, unless some taps are outside of the
columns that the row sees. E has the values of these exceptions in 4p columns of each row: 2p around the first column
that it sees, f (f − p … f + p − 1), and 2p around its last (i − p + 1 … i + p).

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
    """Row and column terms, as declared in `cuda/gates.h`; zero without gates."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "columns")),
        *((name, ctypes.c_longlong) for name in ("rows_batch", "columns_batch", "edge_batch", "bias_batch")),
    )


class GateTerms(NamedTuple):
    """Terms that Conv1 computes from the bias, in float64 because they are differences of sums over all tokens."""

    rows: Tensor
    """[B, R, D], including Conv1's constant."""
    columns: Tensor
    """[B, C + p, D]."""
    edge: Tensor
    """E, [B, R, 4p, D]: sums of row and column terms over the visible taps."""


def compute_gate_terms(
    row_bias: Tensor,
    key_bias: Tensor,
    bias_weight: Tensor,
    constant: Tensor,
    offset: int,
    window: int | None,
    document_starts: Tensor | None,
) -> GateTerms:
    """Compute the terms of a call in differentiable PyTorch.

    Args:
        row_bias: float64 [B, H, R].
        key_bias: float64 [B, H, C].
        bias_weight: bias half of Conv1, [D, H, k].
        constant: Conv1's constant, [D].
        offset: column of the first row.
        window: maximum number of columns that a row sees, or None.
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
    taken, is_seen = _find_exceptions(num_rows, offset, padding, window, document_starts, keys.device)
    # Select sequences by index: its gradients are summed in a fixed order, unlike those of `gather`.
    sequences = torch.arange(batch, device=keys.device)[:, None, None, None]
    bias = (keys[sequences, taken] + row_bias.mT[:, :, None, None]) * is_seen[..., None]  # [B, R, 4p, k, H]
    edge = bias.reshape(batch, num_rows, 4 * padding, size * heads) @ by_tap + constant
    return GateTerms(rows, of_columns, edge)


def _find_exceptions(
    num_rows: int, offset: int, padding: int, window: int | None, document_starts: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the columns that the taps of E read, [1 or B, R, 4p, k], and a mask of those that the row sees.

    Hidden columns are replaced by any valid column.
    """
    if document_starts is None:
        return _find_exceptions_of_one_document(num_rows, offset, padding, window, device)
    return _locate_taps(document_starts[..., None].long(), offset, padding, window)


@lru_cache(maxsize=64)
def _find_exceptions_of_one_document(
    num_rows: int, offset: int, padding: int, window: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return _locate_taps(torch.zeros(1, num_rows, 1, dtype=torch.int64, device=device), offset, padding, window)


def _locate_taps(first: Tensor, offset: int, padding: int, window: int | None) -> tuple[Tensor, Tensor]:
    device, num_rows = first.device, first.shape[1]
    last = torch.arange(offset, offset + num_rows, device=device)[None, :, None]
    if window is not None:
        first = torch.maximum(first, last - window + 1)
    begin = first + torch.arange(-padding, padding, device=device)
    end = last + torch.arange(1 - padding, padding + 1, device=device)
    places = torch.cat([begin, end.expand(len(first), -1, -1)], 2)
    taken = places[..., None] + torch.arange(-padding, padding + 1, device=device)
    is_seen = (taken >= first[..., None]) & (taken <= last[..., None])
    return taken.clamp_(0, offset + num_rows - 1), is_seen


class GateOperands(NamedTuple):
    """Operands of the kernels for a chunk of rows, in float32 and relative to the chunk's first row.

    Only differences of running sums are rounded to float32, not the sums, which may be large.
    """

    rows: Tensor
    """[B, R, 32]."""
    columns: Tensor
    """[B, front + C + back, 32]."""
    edge: Tensor
    """[B, R, 4p, 32]."""
    bias: Tensor
    """Bias of the logits by column, [B, 16, front + C + back].

    The softmax cancels a bias of the row, unless it has a sink (`compute_row_offsets`).
    """

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
    terms: GateTerms,
    row_bias: Tensor,
    key_bias: Tensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
    *,
    residual_bias: bool,
) -> GateOperands:
    """Build the operands of a chunk.

    Args:
        terms, row_bias, key_bias: as in `compute_gate_terms`.
        rows: first row of the chunk, and the row after its last.
        columns: first column of the chunk's maps, and the column after their last.
        residual_bias: True if the bias is also added to the logits.
    """
    (first, last), (left, right) = rows, columns
    batch, _, width = terms.rows.shape
    padding, inside = terms.edge.shape[2] // 4, slice(MAX_TILE_COLUMNS, MAX_TILE_COLUMNS + right - left)
    origin = terms.rows[:, first : first + 1]
    # PyTorch subtracts in float64 and rounds what it writes, in one operation.
    of_rows = _allocate_operand(terms.rows, (batch, last - first, WIDTH), is_whole=width == WIDTH)
    torch.sub(terms.rows[:, first:last], origin, out=of_rows[..., :width])
    edge = _allocate_operand(terms.edge, (batch, last - first, 4 * padding, WIDTH), is_whole=width == WIDTH)
    edge[..., :width] = terms.edge[:, first:last]
    # A block's tiles may begin left of column 0, and may end after the column of its last row.
    entries = right - left + BLOCK_ROWS + 2 * MAX_TILE_COLUMNS
    of_columns = _allocate_operand(terms.columns, (batch, entries + padding, WIDTH))
    seen = slice(inside.start, inside.stop + padding)
    torch.add(terms.columns[:, left : right + padding], origin, out=of_columns[:, seen, :width])
    bias = _allocate_operand(key_bias, (batch, HEADS, entries + -entries % 4))
    if residual_bias:
        of_heads = bias[:, : key_bias.shape[1], inside]
        torch.add(key_bias[..., left:right], row_bias[..., first : first + 1], out=of_heads)
    return GateOperands(of_rows, of_columns, edge, bias)


def _allocate_operand(like: Tensor, sizes: tuple[int, ...], *, is_whole: bool = False) -> Tensor:
    """Allocate a float32 tensor, of zeros unless all of it will be written."""
    return (like.new_empty if is_whole else like.new_zeros)(sizes, dtype=torch.float32)


def compute_row_offsets(row_bias: Tensor, chunk_rows: int) -> Tensor:
    """Return the row terms that the kernels omit from the logits, float32 [B, H, R].

    They are relative to the first row of each chunk.
    """
    origins = row_bias[..., ::chunk_rows].repeat_interleave(chunk_rows, 2)[..., : row_bias.shape[2]]
    return (row_bias - origins).float()


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

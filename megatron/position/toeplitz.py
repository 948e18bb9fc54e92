"""Spreading a table over distances n = i − j into a matrix over rows and columns."""

from typing import Any

import torch
from torch import Tensor

from .shape import Span


class _Toeplitz(torch.autograd.Function):
    """table [H, N] → matrix [H, R, C] with matrix[h, r, c] = table[h, i − j], and the table's first entry where j > i;
    but the first columns are those of the edge [H, R, e], if there is one.

    Backward sums along diagonals by shearing the gradient, which is a plain reduction: no scatter, hence fast on CPU
    and deterministic on GPUs.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, edge: Tensor | None, query: Span, key: Span, channels_last: bool) -> Tensor:
        ctx.query, ctx.key, ctx.size = query, key, table.shape[-1]
        ctx.edge = 0 if edge is None else edge.shape[-1]
        # Row r reads a line of distances from place rows − 1 − r on: a gather of the line alone, then copies of rows.
        far = query.stop - 1 - key.start
        line = torch.arange(far, far - (query.length + key.length - 1), -1, device=table.device).clamp_(min=0)
        if channels_last:
            matrix = table.t()[line].unfold(0, key.length, 1).transpose(1, 2).flip(0).permute(2, 0, 1)
        else:
            matrix = table[:, line].unfold(1, key.length, 1).flip(1)
        if edge is not None:
            matrix[..., : ctx.edge] = edge
        return matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_edge, grad = grad[..., : ctx.edge], grad[..., ctx.edge :]
        heads, rows, columns = grad.shape
        # Row r is moved right by rows − 1 − r, so that equal i − j stand in one column of width rows + columns − 1:
        # column m then holds the distance n = offset + (columns − 1) − m.
        width = rows + columns - 1
        sheared = torch.nn.functional.pad(grad.flip(1), (0, rows))  # [H, R, C + R]
        sheared = sheared.reshape(heads, -1)[:, : rows * width].view(heads, rows, width)
        diagonal = sheared.sum(1).flip(-1)  # index m' ↔ n = m' + (first row − last column)
        first = ctx.query.start - (ctx.key.stop - 1)
        result = grad.new_zeros(heads, ctx.size)
        negative = min(max(-first, 0), width)  # entries with n < 0 read table[0]
        result[:, 0] += diagonal[:, :negative].sum(-1)
        start = first + negative
        result[:, start : start + width - negative] += diagonal[:, negative:]
        return result, of_edge if ctx.edge else None, None, None, None


def toeplitz(
    table: Tensor, query: Span, key: Span, *, edge: Tensor | None = None, channels_last: bool = False
) -> Tensor:
    """Spread a table over n = i − j into a matrix [H, R, C]; entries with j > i hold the table's value at n = 0.

    Args:
        table: [H, N] with N > the largest distance.
        edge: [H, R, e], stands in the first e columns instead; not at drawn positions.
        channels_last: H lies innermost in memory.
    """
    if query.drawn is None:
        return _Toeplitz.apply(table, edge, query, key, channels_last)
    # Drawn positions leave no diagonals to sum along.
    distance = query.positions(table.device)[:, None] - key.positions(table.device)[None, :]
    return table.index_select(1, distance.clamp_(min=0).flatten()).unflatten(1, distance.shape)

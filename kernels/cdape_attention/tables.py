"""Everything that Conv1 makes of the bias alone, in differentiable PyTorch: linear in the length, so no kernel.

H heads, R query rows, N distances, D processor width, k kernel size, p = k//2.
A tap t of Conv1 reads column j + t − p, which stands at distance n − t + p. Away from the left edge its bias half is
therefore a function U of n alone, from n = −p (a hidden value right of the diagonal still sees the bias of columns
left of it). Columns j < p lose the taps that fall off the left edge, so they have their own values E for every row.
Autograd through both gives the gradients of Conv1's bias half, of its constant and of the table's share of Conv1.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cdape_attention.reference import at_least_float32, saturated


def seen_table(bias: Tensor, count: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """The table [H, count] as Conv1 sees it: zero beyond the window, finite in the compute type."""
    bias = saturated(at_least_float32(bias[:, :count]), dtype)
    if window is not None and window < count:
        bias = F.pad(bias[:, :window], (0, count - window))
    return bias


def repeated(b1: Tensor, count: int) -> Tensor:
    """The constant [D] as [count, D].

    Its gradient is summed in float64: thousands of terms nearly cancel, since a shift of all hidden values moves all
    logits of a row almost alike, and a float32 sum gave 1.2 times plain PyTorch's error.
    """
    return b1.double().expand(count, -1).to(b1.dtype)


def share_of_distances(table: Tensor, w1: Tensor, b1: Tensor) -> Tensor:
    """U [p + N, D] at n = −p … N − 1: b1 + Σ_t w1[:, :, t] · table[n − t + p], zero off the table.

    Args:
        table: [H, N], from `seen_table`.
        w1: bias half of Conv1 [D, H, k].
    """
    size = w1.shape[-1]
    count = table.shape[-1] + size // 2
    padded = F.pad(table, (size - 1, size // 2))
    share = repeated(b1, count)
    for tap in range(size):  # k small products: deterministic on every device, unlike a convolution's backward
        first = size - 1 - tap
        share = share + padded[:, first : first + count].T @ w1[:, :, tap].T
    return share


def share_at_left_edge(table: Tensor, w1: Tensor, b1: Tensor, rows: int, offset: int) -> Tensor:
    """E [R, p, D]: the bias half of Conv1 at columns j < p of rows offset …, without the taps left of column 0.

    Args:
        table: [H, N ≥ offset + R], from `seen_table`.
    """
    size = w1.shape[-1]
    padding = size // 2
    padded = F.pad(table, (size, 0))  # columns right of a row's own are at negative distances: zero
    columns = []
    for column in range(padding):
        share = repeated(b1, rows)
        for tap in range(padding - column, size):
            first = size + offset - (column + tap - padding)
            share = share + padded[:, first : first + rows].T @ w1[:, :, tap].T
        columns.append(share)
    return torch.stack(columns, dim=1) if columns else b1.new_empty(rows, 0, b1.shape[0])


def shares(
    bias: Tensor | None, w1: Tensor, b1: Tensor, rows: int, offset: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """U and E in one array [p + N + R·p, D] for the kernels, N = offset + R; float32 (float64 for float64 inputs).

    Row n + p holds U at distance n, row p + N + r·p + j holds E of row r at column j.

    Args:
        bias: [H, N or more], or None.
        w1, b1: Conv1 whole, [D, 2H, 1, k] with a bias and [D, H, 1, k] without, and [D].
        dtype: the compute type, which decides what saturates.
    """
    count, padding = offset + rows, w1.shape[-1] // 2
    b1 = at_least_float32(b1)
    if bias is None:
        return repeated(b1, padding + count + rows * padding)
    table = seen_table(bias, count, window, dtype)
    half = at_least_float32(w1[:, bias.shape[0] :, 0]).to(table.dtype)
    edge = share_at_left_edge(table, half, b1, rows, offset)
    return torch.cat([share_of_distances(table, half, b1), edge.flatten(0, 1)])

"""Everything that Conv1 makes of the bias alone, in differentiable PyTorch: linear in the length, so no kernel.

H heads, R query rows, N distances, D processor width, k kernel size, p = k//2.
A tap t of Conv1 reads column j + t − p, which stands at distance n − t + p. Away from the left edge its bias half is
therefore a function U of n alone, from n = −p (a hidden value right of the diagonal still sees the bias of columns
left of it). Columns j < p lose the taps that fall off the left edge, so they have their own values E for every row.
Autograd through both gives the gradients of Conv1's bias half, of its constant and of the table's part in Conv1.

`bias_product.py` is the same by hand, for GPUs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cdape_attention.reference import at_least_float32, saturated


def visible_table(bias: Tensor, count: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """The table [H, count] as Conv1 sees it: zero beyond the window, finite in the compute type."""
    bias = saturated(at_least_float32(bias[:, :count]), dtype)
    if window is not None and window < count:
        bias = F.pad(bias[:, :window], (0, count - window))
    return bias


def repeat_bias(b1: Tensor, count: int) -> Tensor:
    """The constant [D] as [count, D].

    Its gradient is summed in float64: thousands of terms nearly cancel, since a shift of all hidden values moves all
    logits of a row almost alike, and a float32 sum gave 1.2 times plain PyTorch's error.
    """
    return b1.double().expand(count, -1).to(b1.dtype)


def unfold_neighbourhoods(table: Tensor, kernel_size: int) -> Tensor:
    """What the taps of Conv1 see of a table [H, N] at distances −p − 1 … N − 1: [p + N + 1, H, k], zero off the table.

    The last tap comes first: it stands furthest right, at the least distance.
    """
    return F.pad(table, (kernel_size, kernel_size // 2)).unfold(1, kernel_size, 1).transpose(0, 1).contiguous()


def multiply_neighbourhoods(neighbourhoods: Tensor, weight: Tensor) -> Tensor:
    """Σ over heads and taps: [·, H, k] with a weight [D, H, k] gives [·, D].

    A product of matrices is deterministic on every device, unlike a convolution's backward pass.
    """
    return neighbourhoods.flatten(1) @ weight.flatten(1).T


def compute_left_edge_contributions(neighbourhoods: Tensor, weight: Tensor, rows: int, offset: int) -> list[Tensor]:
    """For each column j < p, the bias half of Conv1 at rows offset …, without the taps left of column 0: [R, D].

    Args:
        neighbourhoods: from `unfold_neighbourhoods`, with N = offset + R.
        weight: bias half of Conv1 [D, H, k], its last tap first.
    """
    padding = weight.shape[-1] // 2
    columns = []
    for column in range(padding):
        first = offset + padding + 1 - column
        visible_taps = F.pad(weight[:, :, : padding + column + 1], (0, padding - column))
        columns.append(multiply_neighbourhoods(neighbourhoods[first : first + rows], visible_taps))
    return columns


def compute_bias_contributions(
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
    constant = repeat_bias(at_least_float32(b1), padding + count + rows * padding)
    if bias is None:
        return constant
    table = visible_table(bias, count, window, dtype)
    weight = at_least_float32(w1[:, bias.shape[0] :, 0]).to(table.dtype).flip(-1)
    neighbourhoods = unfold_neighbourhoods(table, weight.shape[-1])
    contributions = [multiply_neighbourhoods(neighbourhoods[1:], weight)]
    if padding:
        contributions.append(
            torch.stack(compute_left_edge_contributions(neighbourhoods, weight, rows, offset), dim=1).flatten(0, 1)
        )
    return torch.cat(contributions) + constant

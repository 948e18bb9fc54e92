"""Terms that Conv1 computes from the bias alone, in differentiable PyTorch.

Linear in the length, so they need no kernel.

H heads, R query rows, N distances, D processor width, k kernel size, p = k//2. A tap t of Conv1 reads column j + t − p,
at distance n − t + p. Away from the left edge, its bias half is therefore a function U of n alone, starting at n = −p
(a hidden value right of the diagonal still reads the bias of columns left of it). At columns j < p, the taps beyond the
left edge are missing, so these columns have separate values E for every row. Autograd through both gives the gradients
of Conv1's bias half, of its constant, and of the table through Conv1.

`bias_product.py` has the same with hand-written gradients, for GPUs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def promote_to_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp x to the range of float16 if that is the type. The other types have float32's range."""
    if dtype != torch.float16:
        return x
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)


def build_visible_table(bias: Tensor, count: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the table [H, count] as Conv1 reads it: zero beyond the window, finite in the compute type."""
    bias = saturate(promote_to_float32(bias[:, :count]), dtype)
    if window is not None and window < count:
        bias = F.pad(bias[:, :window], (0, count - window))
    return bias


def repeat_bias(b1: Tensor, count: int) -> Tensor:
    """Expand the constant [D] to [count, D].

    Its gradient is summed in float64. Thousands of terms nearly cancel, since shifting all hidden values shifts all
    logits of a row almost equally. A float32 sum had 1.2 times plain PyTorch's error.
    """
    return b1.double().expand(count, -1).to(b1.dtype)


def unfold_neighborhoods(table: Tensor, kernel_size: int) -> Tensor:
    """Return the values of a table [H, N] that Conv1's taps read at distances −p − 1 … N − 1: [p + N + 1, H, k].

    Values outside the table are zero. The last tap comes first: it is furthest right, at the smallest distance.
    """
    return F.pad(table, (kernel_size, kernel_size // 2)).unfold(1, kernel_size, 1).transpose(0, 1).contiguous()


def multiply_neighborhoods(neighborhoods: Tensor, weight: Tensor) -> Tensor:
    """Sum over heads and taps: [·, H, k] times a weight [D, H, k] gives [·, D].

    A matrix product is deterministic on every device, unlike a convolution's backward pass.
    """
    return neighborhoods.flatten(1) @ weight.flatten(1).T


def compute_left_edge_contributions(neighborhoods: Tensor, weight: Tensor, rows: int, offset: int) -> list[Tensor]:
    """Return the bias half of Conv1 for each column j < p at rows offset …, without taps left of column 0: [R, D].

    Args:
        neighborhoods: from `unfold_neighborhoods`, with N = offset + R.
        weight: bias half of Conv1 [D, H, k], its last tap first.
    """
    padding = weight.shape[-1] // 2
    columns = []
    for column in range(padding):
        first = offset + padding + 1 - column
        visible_taps = F.pad(weight[:, :, : padding + column + 1], (0, padding - column))
        columns.append(multiply_neighborhoods(neighborhoods[first : first + rows], visible_taps))
    return columns


def compute_bias_contributions(
    bias: Tensor | None, w1: Tensor, b1: Tensor, rows: int, offset: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return U and E in one array [p + N + R·p, D] for the kernels, N = offset + R.

    The type is float32, or float64 for float64 inputs. Row n + p is U at distance n; row p + N + r·p + j is E of row r
    at column j.

    Args:
        bias: [H, N or more], or None.
        w1, b1: all of Conv1: [D, 2H, 1, k] with a bias or [D, H, 1, k] without, and [D].
        dtype: compute type, which determines saturation.
    """
    count, padding = offset + rows, w1.shape[-1] // 2
    constant = repeat_bias(promote_to_float32(b1), padding + count + rows * padding)
    if bias is None:
        return constant
    table = build_visible_table(bias, count, window, dtype)
    weight = promote_to_float32(w1[:, bias.shape[0] :, 0]).to(table.dtype).flip(-1)
    neighborhoods = unfold_neighborhoods(table, weight.shape[-1])
    contributions = [multiply_neighborhoods(neighborhoods[1:], weight)]
    if padding:
        contributions.append(
            torch.stack(compute_left_edge_contributions(neighborhoods, weight, rows, offset), dim=1).flatten(0, 1)
        )
    return torch.cat(contributions) + constant

"""Plain PyTorch reference without fusion; in float64 it is the ground truth for the kernels.

H heads, R query rows, C key columns, N distances, W width of FIRE's network.
"""

import torch
from torch import Tensor


def _compute_distances(rows: int, columns: int, offset: int, device: torch.device) -> Tensor:
    return offset + torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)[None, :]


def toeplitz_bias(
    table: Tensor,
    rows: int,
    columns: int,
    *,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    above: float = 0.0,
) -> Tensor:
    """Return the result of `toeplitz.toeplitz_bias`; values too large for `dtype` are not saturated here."""
    n = _compute_distances(rows, columns, offset, table.device)
    return torch.where(n < 0, above, table[:, n.clamp(min=0)]).to(dtype)


def fire_bias(
    c: Tensor,
    multiplier: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    rows: int,
    columns: int,
    *,
    half_length: float,
    offset: int = 0,
    first_column: int = 0,
    dtype: torch.dtype = torch.float32,
    above: float = 0.0,
) -> Tensor:
    """Return the result of `fire.fire_bias` (FIRE: Li et al. 2023, equation 3)."""
    n = _compute_distances(rows, columns, offset, c.device)
    i = (first_column + offset + torch.arange(rows, device=c.device)).to(c.dtype)
    normalizer = torch.log1p(c * torch.maximum(multiplier * half_length, i)) + 1e-6
    x = torch.log1p(c * n.clamp(min=0)) / normalizer[:, None]
    hidden = torch.relu(torch.nn.functional.linear(x[..., None], weight1, bias1))
    bias = torch.nn.functional.linear(hidden, weight2, bias2).permute(2, 0, 1)
    return torch.where(n < 0, above, bias).to(dtype)

"""Small pieces of arithmetic that several encodings share, in the precision that they need."""

import torch
from torch import Tensor


def promote_to_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged where it is wider already (float64 in tests)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pow_with_finite_gradient(n: Tensor, exponent: Tensor) -> Tensor:
    """n^exponent for distances n ≥ 0 and exponents > 0, broadcast against each other.

    The derivative n^r·ln(n) is 0·(−∞) = NaN at n = 0 when left to autograd; its limit is 0, which is what this gives.
    """
    positive = n > 0
    return torch.where(positive, torch.pow(torch.where(positive, n, 1.0), exponent), 0.0)


def rotary_frequencies(half: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """base^(−m/half), m = 0 … half − 1: float64 [half]."""
    return base ** (-torch.arange(half, dtype=torch.float64, device=device) / half)


def position_angles(positions: Tensor, half: int, base: float) -> Tensor:
    """positions [T] times the frequencies base^(−m/half), m = 0 … half − 1: float64 [T, half].

    In float64, because at position 65,536 a float32 angle is already off by 0.004 rad.
    """
    return positions.double()[:, None] * rotary_frequencies(half, base, positions.device)


def sinusoidal_embeddings(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """[sin; cos] of the angles of positions [T]: [T, dim]."""
    angle = position_angles(positions, dim // 2, base)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)

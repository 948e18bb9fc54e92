"""Angles of sinusoidal and rotary positions."""

import torch
from torch import Tensor


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

"""n^r with a learned exponent, and finite gradients at n = 0."""

import torch
from torch import Tensor


def pow_with_finite_gradient(n: Tensor, exponent: Tensor) -> Tensor:
    """n^exponent for distances n ≥ 0 and exponents > 0, broadcast against each other.

    The derivative n^r·ln(n) is 0·(−∞) = NaN at n = 0 when left to autograd; its limit is 0, which is what this gives.
    """
    positive = n > 0
    return torch.where(positive, torch.pow(torch.where(positive, n, 1.0), exponent), 0.0)

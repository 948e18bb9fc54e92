"""Shapes that tests and benchmarks share.

B batch, H heads, R query rows, C key columns, d head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call of the op."""

    B: int
    H: int
    R: int
    C: int
    d: int
    offset: int = 0
    window: int | None = None
    bias: bool = True
    weight: bool = False

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """q, k, v in `dtype`; a bias that falls with the distance and weights around 1, float32 [H, offset + R]."""
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(self.B, self.H, self.R, self.d, generator=generator)
        k = torch.randn(self.B, self.H, self.C, self.d, generator=generator)
        v = torch.randn(self.B, self.H, self.C, self.d, generator=generator)
        size = self.offset + self.R
        slope = -torch.log1p(torch.arange(size)) * torch.rand(self.H, 1, generator=generator)
        bias = slope + 0.1 * torch.randn(self.H, size, generator=generator)
        weight = torch.rand(self.H, size, generator=generator) + 0.5
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        return q, k, v, bias.to(device) if self.bias else None, weight.to(device) if self.weight else None


SMALL = (
    Case(1, 2, 40, 40, 16),
    Case(2, 3, 33, 33, 8, weight=True),
    Case(1, 2, 37, 50, 20, offset=13, weight=True),
    Case(1, 1, 50, 50, 16, window=7),
    Case(1, 2, 35, 90, 80, offset=55, window=40, bias=False, weight=True),
    Case(1, 5, 1, 77, 16, offset=76),
    Case(1, 1, 70, 70, 16, bias=False),
    Case(1, 1, 60, 60, 24, window=33, bias=False),
    Case(1, 1, 32, 60, 16, offset=17),
)
"""For the interpreter: ragged edges, head dimensions in two parts and padded, offsets, windows, columns nobody sees,
and a tile whose last column is the first of a block."""

MODELS = tuple(
    Case(16384 // length, heads, length, length, dim)
    for heads, dim in ((12, 64), (16, 64), (32, 80))
    for length in (512, 2048, 8192)
)
"""The shipped models with 16,384 tokens per batch, for benchmarks on a GPU."""

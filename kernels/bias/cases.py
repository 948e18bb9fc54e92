"""Shapes that tests and benchmarks share.

H heads, R query rows, C key columns, W width of FIRE's network.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One bias matrix."""

    H: int
    R: int
    C: int
    offset: int = 0
    W: int = 32
    half_length: float = 16.0

    def table(self, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
        """float32 [H, N], a little longer than needed."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.H, self.offset + self.R + 3, generator=generator).to(device)

    def fire(self, device: torch.device | str = "cpu", seed: int = 0) -> list[Tensor]:
        """c, multiplier, weight1, bias1, weight2, bias2, float32, drawn as FIRE draws them."""
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int, bound: float = 1.0) -> Tensor:
            return (2 * torch.rand(shape, generator=generator) - 1) * bound

        bound = self.W**-0.5
        second = [uniform(self.H, self.W, bound=bound), uniform(self.H, bound=bound)]
        tensors = [torch.tensor([0.1]), torch.tensor([1.1]), uniform(self.W, 1), uniform(self.W), *second]
        return [x.to(device) for x in tensors]


SMALL = (
    Case(2, 18, 18, W=16, half_length=8.0),
    Case(3, 9, 20, offset=11, W=20, half_length=8.0),
    Case(1, 19, 10, W=7, half_length=8.0),
    Case(5, 1, 23, offset=22, W=5),
)
"""For the interpreter: square, with an offset, columns that end early, one row."""

MODELS = tuple(Case(heads, length, length) for heads in (12, 16, 32) for length in (512, 2048, 8192))
"""The shipped models, for benchmarks on a GPU."""

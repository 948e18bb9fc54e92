"""Calls of the CDAPE operator with all their gradients, and the truth about them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.cdape_attention.cases import Case
from kernels.cdape_attention.reference import reference

NAMES = ("output", "q", "k", "v", "bias", "w1", "b1", "w2", "b2")
"""The output, then the operator's tensors."""


def into_output(case: Case, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A gradient of the output."""
    shape = case.batch, case.heads, case.rows, case.dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def differentiated(attend: Callable[..., Tensor], inputs: Sequence[Tensor | None], into: Tensor) -> dict[str, Tensor]:
    """Output and all gradients."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    output = attend(*leaves)
    output.backward(into)
    found = [output.detach(), *(None if x is None else x.grad for x in leaves)]
    return {name: x for name, x in zip(NAMES, found, strict=True) if x is not None}


def doubled(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """On the CPU in float64."""
    return [None if x is None else x.cpu().double() for x in tensors]


def truth(case: Case, inputs: Sequence[Tensor | None], into: Tensor) -> Callable[[], dict[str, Tensor]]:
    """The reference from the same inputs in float64, which saturates where their type does."""
    like = inputs[0].dtype
    inputs = doubled(inputs)
    attend = partial(reference, **case.options, saturate_like=like)
    return lambda: differentiated(attend, inputs, into.cpu().double())

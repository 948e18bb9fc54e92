"""Learned scalars of position encodings, and their bounds.

A kernel such as −r1·log(1 + r2·n) is only defined for positive r1 and r2. The published code clamps the half-precision
copy in place, but not the float32 master weight of the optimizer. The master drifts away, and the parameter stays at
its bound permanently. Here bounds are enforced in three ways:

* `forward` returns the clamped value, so every use obeys the bound. The gradient ignores the clamping.
* The optimizer reads `low` and `high`. It drops the gradient of a master at its bound if the step would move it further
  out. Otherwise the gradient applies, so the parameter can leave its bound.
* The optimizer projects the float32 masters onto the bounds after each step.

Only the whole gradient determines the direction of a step. Each use of a parameter (in a layer, a row block, a
rank) contributes a part of it. Judging the parts separately would make the result depend on how the work is divided.

ZeRO 3 gathers the parameters of a module around its forward call. Parameters are therefore only read by calling the
module that owns them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.position.facts import OptionError
from megatron.position.numerics import is_sharded_by_zero3, promote_to_float32


class _Clamp(torch.autograd.Function):
    """clamp(value, low, high) with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, low: float, high: float) -> Tensor:
        return value.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class BoundedParameter(nn.Module):
    """Learned tensor with bounds [low, high]. Calling it returns the clamped float32 value.

    Args:
        shape: shape of the tensor, usually (H,).
        init: initializes a new tensor in place, for example `init_uniform(0, 2)`.
        low, high: inclusive bounds; infinite if there is none.
    """

    def __init__(
        self, shape: tuple[int, ...], init: Callable[[Tensor], object], low: float = -math.inf, high: float = math.inf
    ) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.init = init
        self.value = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set start values, clamped to the bounds."""
        with torch.no_grad():
            self.init(self.value)
        self.clamp_to_bounds()

    @torch.no_grad()
    def clamp_to_bounds(self) -> None:
        """Move the tensor to the nearest value inside the bounds."""
        self.value.clamp_(self.low, self.high)

    def forward(self) -> Tensor:
        value = promote_to_float32(self.value)
        if math.isinf(self.low) and math.isinf(self.high):
            return value.clone()  # a copy, because ZeRO-3 frees the storage of the parameter after this call
        return _Clamp.apply(value, self.low, self.high)

    def extra_repr(self) -> str:
        return f"{tuple(self.value.shape)}, low={self.low}, high={self.high}"


class JoinedParameter:
    """Callable that returns a parameter of several modules, concatenated along the first dimension."""

    def __init__(self, parameters: Sequence[BoundedParameter]) -> None:
        self.parameters = parameters

    def __call__(self) -> Tensor:
        first = self.parameters[0]
        if is_sharded_by_zero3(first.value) or any((p.low, p.high) != (first.low, first.high) for p in self.parameters):
            return torch.cat([parameter() for parameter in self.parameters])
        value = promote_to_float32(torch.cat([parameter.value for parameter in self.parameters]))
        return value if math.isinf(first.low) and math.isinf(first.high) else _Clamp.apply(value, first.low, first.high)


def init_uniform(low: float, high: float) -> Callable[[Tensor], object]:
    """Return an initializer that draws from U(low, high)."""
    return lambda tensor: nn.init.uniform_(tensor, low, high)


def init_normal(std: float) -> Callable[[Tensor], object]:
    """Return an initializer that draws from N(0, std²). Raises ValueError if `std` is negative."""
    if std < 0:
        raise OptionError("std", f"is {std}; it must not be negative")
    return lambda tensor: nn.init.normal_(tensor, 0.0, std)


def init_constant(value: float) -> Callable[[Tensor], object]:
    """Return an initializer that fills a tensor with one value."""
    return lambda tensor: nn.init.constant_(tensor, value)


def build_per_head_parameter(
    option: str, num_heads: int, upper: float, *, low: float = 1e-2, high: float = math.inf
) -> BoundedParameter:
    """Build a scalar per head that starts from U(0, upper), clamped to its bounds, as in KERPLE's kernels.

    Raises:
        ValueError: `upper` is outside the bounds. The message names the option it came from.
    """
    if not low < upper <= high:
        bounds = f"greater than {low:g}" if math.isinf(high) else f"in ({low:g}, {high:g}]"
        raise OptionError(option, f"is {upper}; it must be {bounds}")
    return BoundedParameter((num_heads,), init_uniform(0, upper), low, high)

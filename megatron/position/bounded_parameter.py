"""Learned scalars of position encodings, and the bounds they must obey.

A kernel such as −r1·log(1 + r2·n) is only defined for positive r1 and r2. The published code clamps the half-precision
copy in place, which never reaches the float32 master that the optimizer keeps: the master wanders off, and the
parameter sits at its bound for good. Here a bound holds in three places:

* `forward` returns the clamped value, so whatever is used obeys the bound; the gradient passes as if it did not;
* the optimizer leaves out the gradient of a master at its bound where a step would push it further out, and takes it
  where the step would bring it back, so it can leave (`low` and `high` are read from here);
* the optimizer projects the float32 masters after each step.

Only the whole gradient says where a step goes. Each use of a parameter (in a layer, a block of rows, on a rank) has a
part of it, and to judge the parts one by one would make the result depend on how the work is divided.

`forward` matters for one more reason: ZeRO-3 gathers a module's parameters around its forward call, so parameters are
only ever read through the call of the module that owns them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.position.facts import OptionError
from megatron.position.numerics import is_divided_by_zero_3, promote_to_float32


class _Clamp(torch.autograd.Function):
    """clamp(value, low, high) whose gradient passes everywhere."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, low: float, high: float) -> Tensor:
        return value.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class BoundedParameter(nn.Module):
    """A learned tensor kept within [low, high]; calling it gives the float32 value to compute with.

    Args:
        shape: shape of the tensor, usually (H,).
        init: fills the fresh tensor in place, e.g. `uniform(0, 2)`.
        low, high: inclusive bounds; infinite where there is none.
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
        """Start values, moved inside the bounds."""
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
            return value.clone()  # a tensor of its own: ZeRO-3 frees the parameter's storage after this call
        return _Clamp.apply(value, self.low, self.high)

    def extra_repr(self) -> str:
        return f"{tuple(self.value.shape)}, low={self.low}, high={self.high}"


class JoinedParameter:
    """The same parameter of several modules as one, joined along its first dimension; to be called as it is."""

    def __init__(self, parameters: Sequence[BoundedParameter]) -> None:
        self.parameters = parameters

    def __call__(self) -> Tensor:
        first = self.parameters[0]
        if is_divided_by_zero_3(first.value) or any(
            (p.low, p.high) != (first.low, first.high) for p in self.parameters
        ):
            return torch.cat([parameter() for parameter in self.parameters])
        value = promote_to_float32(torch.cat([parameter.value for parameter in self.parameters]))
        return value if math.isinf(first.low) and math.isinf(first.high) else _Clamp.apply(value, first.low, first.high)


def init_uniform(low: float, high: float) -> Callable[[Tensor], object]:
    """Start values from U(low, high)."""
    return lambda tensor: nn.init.uniform_(tensor, low, high)


def init_normal(std: float) -> Callable[[Tensor], object]:
    """Start values from N(0, std²). Raises ValueError for a negative deviation."""
    if std < 0:
        raise OptionError("std", f"is {std}; it must not be negative")
    return lambda tensor: nn.init.normal_(tensor, 0.0, std)


def init_constant(value: float) -> Callable[[Tensor], object]:
    """The same start value everywhere."""
    return lambda tensor: nn.init.constant_(tensor, value)


def build_per_head_parameter(
    option: str, num_heads: int, upper: float, *, low: float = 1e-2, high: float = math.inf
) -> BoundedParameter:
    """A scalar per head that starts from U(0, upper), moved inside its bounds: the parameters of KERPLE's kernels.

    Raises:
        ValueError: `upper` is outside the bounds; names the option that gave it.
    """
    if not low < upper <= high:
        raise OptionError(option, f"is {upper}; it must be in ({low:g}, {high:g}]")
    return BoundedParameter((num_heads,), init_uniform(0, upper), low, high)

"""AdamW and Lion that keep bounded parameters within their bounds; for Muon see `muon.py`.

Projection
----------
The kernels of KERPLE are only defined for parameters in an interval (r1 > 0, 0 < exponent ≤ 2). Published code clamps
the model's own parameters after a step. That has no effect in half precision or under ZeRO: the optimizer updates
float32 master copies and overwrites the model's parameters with them. The base optimizer holds the masters under every
ZeRO stage and precision (as flat partitions, one per parameter group), so the projection belongs here:

    g ← 0  where θ = low and g > 0, or θ = high and g < 0        the step would leave the interval
    θ ← clip(step(θ, g), low, high)                              for each group that has the keys `low` and `high`

`megatron.model.parameter_groups.parameter_groups` builds one group per pair of bounds. Without the first line Adam's
moments would accumulate the gradients against a bound, and keep the parameter there long after its gradient has changed
sign.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch


class ProjectedOptimizer(torch.optim.Optimizer):
    """Base class of optimizers whose groups may have inclusive bounds `low` and `high`."""

    @torch.no_grad()
    def clamp_masters(self) -> None:
        """Move every bounded parameter to the nearest value within its bounds."""
        for parameter, low, high in self._iter_bounded():
            parameter.clamp_(low, high)

    @torch.no_grad()
    def mask_outward_gradients(self) -> None:
        """Set the gradient to 0 where a parameter is at its bound and the step would move it beyond."""
        for parameter, low, high in self._iter_bounded():
            if (gradient := parameter.grad) is not None:
                outward = ((parameter <= low) & (gradient > 0)) | ((parameter >= high) & (gradient < 0))
                gradient.masked_fill_(outward, 0.0)

    def _iter_bounded(self) -> Iterator[tuple[torch.Tensor, float, float]]:
        """Yield every bounded parameter with its bounds."""
        for group in self.param_groups:
            low, high = group.get("low", -math.inf), group.get("high", math.inf)
            if not (math.isinf(low) and math.isinf(high)):
                yield from ((parameter, low, high) for parameter in group["params"])

    def reset_steps(self) -> None:
        """Reset every parameter's step count to 0.

        DeepSpeed makes some optimizers take a step with zero gradients to allocate their states (the half-precision
        ones without ZeRO). The moments stay zero, but Adam's bias correction would start at step 2.
        """
        for state in self.state.values():
            if "step" in state:
                state["step"].zero_()


class ProjectedAdamW(ProjectedOptimizer, torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019) with bounds."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one AdamW step without updates beyond a bound, then project onto each group's bounds."""
        self.mask_outward_gradients()
        loss = super().step(closure)
        self.clamp_masters()
        return loss


class ProjectedLion(ProjectedOptimizer):
    """Lion (Chen et al. 2023, 2302.06675, algorithm 2) with bounds.

    The update is the sign of an interpolated momentum, with one moment.

    θ ← θ − lr·λ·θ − lr·sign(β1·m + (1 − β1)·g)
    m ← β2·m + (1 − β2)·g
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step without updates beyond a bound, then project onto each group's bounds."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.mask_outward_gradients()
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.grad is not None]
            if not masters:
                continue
            gradients: list[torch.Tensor] = [master.grad for master in masters]
            for master in masters:
                if not self.state[master]:
                    self.state[master]["exp_avg"] = torch.zeros_like(master)
            moments = [self.state[master]["exp_avg"] for master in masters]
            lr, (look_ahead, decay) = group["lr"], group["betas"]
            directions = torch._foreach_lerp(moments, gradients, 1 - look_ahead)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(masters, 1 - lr * group["weight_decay"])
            torch._foreach_add_(masters, directions, alpha=-lr)
            torch._foreach_lerp_(moments, gradients, 1 - decay)
        self.clamp_masters()
        return loss

"""The optimizer, and its learning rate: AdamW that keeps bounded parameters inside their bounds, and a schedule.

Projected AdamW
---------------
The kernels of KERPLE are only defined for parameters in an interval (r1 > 0, 0 < exponent ≤ 2). Clamping the model's
own parameters after a step, as published code does, has no effect in half precision or under ZeRO: the optimizer works
on float32 master copies and overwrites the model's from them. The base optimizer is what holds the masters under every
ZeRO stage and precision (as flat partitions, one per parameter group), so the projection belongs here:

    g ← 0  where θ = low and g > 0, or θ = high and g < 0        the step would go further out
    θ ← clip(AdamW(θ, g), low, high)                             for each group that has the keys `low` and `high`

`megatron.model.parameter_groups.parameter_groups` makes one group per pair of bounds. Without the first line Adam's
moments would remember all the pushes against a bound, and keep the parameter there long after its gradient has turned.

The schedule
------------
The learning rate as a pure function of the step, so a resumed run needs to restore nothing.

With peak rate `lr`, n = lr_decay_iters and w = warmup · n warm-up steps, step s (counted from 0) trains with

    s < w              lr · (s + 1) / (w + 1)
    w ≤ s < n          min_lr + (lr − min_lr) · f(x),   x = (s − w) / (n − w)
    s ≥ n              min_lr (constant: lr)

    cosine f(x) = (1 + cos πx) / 2      linear f(x) = 1 − x      constant f(x) = 1

The fourth, inverse_sqrt (Vaswani et al. 2017, 1706.03762, section 5.3), knows no end: from w on it is
lr · √((w + 1) / (s + 1)), and min_lr at least.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megatron.options.training import OptimizerOptions


class ProjectedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019) whose groups may have inclusive bounds `low` and `high`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One AdamW step without pushes against a bound, then the projection onto each group's bounds."""
        self.mask_outward_gradients()
        loss = super().step(closure)
        self.clamp_masters()
        return loss

    @torch.no_grad()
    def clamp_masters(self) -> None:
        """Move every bounded parameter to the nearest value inside its bounds."""
        for parameter, low, high in self._iter_bounded():
            parameter.clamp_(low, high)

    @torch.no_grad()
    def mask_outward_gradients(self) -> None:
        """Set gradients to 0 where a parameter stands at its bound and the step would push it further out."""
        for parameter, low, high in self._iter_bounded():
            if (gradient := parameter.grad) is not None:
                outward = ((parameter <= low) & (gradient > 0)) | ((parameter >= high) & (gradient < 0))
                gradient.masked_fill_(outward, 0.0)

    def _iter_bounded(self) -> Iterator[tuple[torch.Tensor, float, float]]:
        """Every bounded parameter with its bounds."""
        for group in self.param_groups:
            low, high = group.get("low", -math.inf), group.get("high", math.inf)
            if not (math.isinf(low) and math.isinf(high)):
                yield from ((parameter, low, high) for parameter in group["params"])

    def reset_steps(self) -> None:
        """Set every parameter's step count back to 0.

        DeepSpeed makes some optimizers take a step with zero gradients to allocate their states (the half-precision
        ones without ZeRO). The moments stay zero, but Adam's bias correction would begin at step 2.
        """
        for state in self.state.values():
            state["step"].zero_()


def build_optimizer(groups: list[dict[str, Any]], options: OptimizerOptions) -> ProjectedAdamW:
    """The optimizer over parameter groups (with `weight_decay`, and `low` and `high` where there are bounds).

    Its learning rate is 0 until the loop sets the schedule's, so that no step can happen at a wrong one.
    """
    params = options.optimizer.params
    # The fused kernel (CPU and CUDA) makes one pass over each tensor instead of ten.
    return ProjectedAdamW(groups, lr=0.0, betas=(params.betas[0], params.betas[1]), eps=params.eps, fused=True)


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up, then decay. Steps count from 0; `schedule(s)` is the rate of step s."""

    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int
    style: Literal["cosine", "linear", "constant", "inverse_sqrt"]

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            # (s + 1) / (w + 1): the first step already learns, and the peak is reached right after warm-up.
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if self.style == "constant":
            return self.lr
        if self.style == "inverse_sqrt":
            return max(self.min_lr, self.lr * math.sqrt((self.warmup_steps + 1) / (step + 1)))
        if step >= self.decay_steps:
            return self.min_lr
        x = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        share = (1 + math.cos(math.pi * x)) / 2 if self.style == "cosine" else 1 - x
        return self.min_lr + (self.lr - self.min_lr) * share


def build_schedule(options: OptimizerOptions, train_iters: int) -> LearningRateSchedule:
    """The schedule of a run; the decay ends at `lr_decay_iters`, or with the run."""
    decay_steps = options.lr_decay_iters or train_iters
    return LearningRateSchedule(
        lr=options.optimizer.params.lr,
        min_lr=options.min_lr,
        warmup_steps=round(options.warmup * decay_steps),
        decay_steps=decay_steps,
        style=options.lr_decay_style,
    )


def describe_rate_jump(old: LearningRateSchedule, new: LearningRateSchedule, step: int) -> str | None:
    """One line if the rate of step `step` is far from the one before it, and how to avoid that; else None.

    Extending a run does this: a decay that ends with the run ends later now, so the rate returns to where a longer
    run would have been. What is far: more than a tenth of itself, and more than the old schedule's own next step.
    """
    if step == 0:
        return None
    was, planned, now = old(step - 1), old(step), new(step)
    if abs(now - was) <= max(0.1 * max(now, was), 2 * abs(planned - was)):
        return None
    text = f"the learning rate was {was:.2e} and {'jumps' if now > was else 'drops'} to {now:.2e}"
    extended = replace(new, decay_steps=old.decay_steps, warmup_steps=old.warmup_steps)
    if old.decay_steps == new.decay_steps or extended(step) != planned:
        return text  # another rate was asked for by name
    text += f": its decay now ends at step {new.decay_steps:,}; lr_decay_iters={old.decay_steps} keeps the old schedule"
    if step >= old.decay_steps:
        text += f", which is over: it stays at min_lr={new.min_lr:g}"
        if new.min_lr == 0:
            text += ", where nothing is learned, so give a min_lr too"
    return text

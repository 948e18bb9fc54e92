"""The learning rate as a pure function of the step, so a resumed run needs to restore nothing.

With peak rate `lr`, n = lr_decay_iters and w = warmup · n warm-up steps, step s (counted from 0) trains with

    s < w              lr · (s + 1) / (w + 1)
    w ≤ s < n          min_lr + (lr − min_lr) · f(x),   x = (s − w) / (n − w)
    s ≥ n              min_lr (constant: lr)

    cosine f(x) = (1 + cos πx) / 2      linear f(x) = 1 − x      constant f(x) = 1
"""

import math
from dataclasses import dataclass
from typing import Literal

from megatron.training.options import OptimizerOptions


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then decay. Steps count from 0; `schedule(s)` is the rate of step s."""

    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int
    style: Literal["cosine", "linear", "constant"]

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            # (s + 1) / (w + 1): the first step already learns, and the peak is reached right after warm-up.
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if self.style == "constant":
            return self.lr
        if step >= self.decay_steps:
            return self.min_lr
        x = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        share = (1 + math.cos(math.pi * x)) / 2 if self.style == "cosine" else 1 - x
        return self.min_lr + (self.lr - self.min_lr) * share


def build_schedule(options: OptimizerOptions, train_iters: int) -> Schedule:
    """The schedule of a run; the decay ends at `lr_decay_iters`, or with the run."""
    decay_steps = options.lr_decay_iters or train_iters
    return Schedule(
        lr=options.optimizer.params.lr,
        min_lr=options.min_lr,
        warmup_steps=round(options.warmup * decay_steps),
        decay_steps=decay_steps,
        style=options.lr_decay_style,
    )

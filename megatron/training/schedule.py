"""Learning rate as a pure function of the step, so that a resumed run has no state of it to restore.

With peak rate `lr`, n = lr_decay_iters and w warm-up steps (lr_warmup_iters, or warmup · n), the rate of step s
(counted from 0) is

    s < w              lr · (s + 1) / (w + 1)
    w ≤ s < n          min_lr + (lr − min_lr) · f(x),   x = (s − w) / (n − w)
    s ≥ n              min_lr (constant: lr)

    cosine f(x) = (1 + cos πx) / 2      linear f(x) = 1 − x      constant f(x) = 1

as in Megatron-LM. GPT-NeoX's linear decay differs if min_lr > 0: it is max(min_lr, lr · (1 − x)).

inverse_sqrt (Vaswani et al. 2017, 1706.03762, section 5.3) has no end: from w on it is lr · √((w + 1) / (s + 1)), and
at least min_lr.

wsd, warm-up, stable, decay (Hu et al. 2024, MiniCPM, 2404.06395): the rate stays at lr until the last d steps before n
(lr_wsd_decay_iters, or lr_wsd_decay_fraction · n), and decays over them as f(x), x = (s − (n − d)) / d:

    linear f(x) = 1 − x         minus_sqrt f(x) = 1 − √x (Hägele et al. 2024, 2405.18392)
    cosine f(x) = (1 + cos πx) / 2         exponential f(x) = 2 · 2^(−x) − 1 (Megatron-LM)

infinite (Ibrahim et al. 2024, 2403.08763): after warm-up the rate decays over c = lr_cooldown_iters steps to
constant_lr, x = (s − w) / c. It stays there for any number of steps. It anneals over the last a = lr_anneal_iters steps
before n, x = (s − (n − a)) / a. With a = 0, a trunk, it never anneals:

    cosine          constant_lr + (lr − constant_lr) · (1 + cos πx) / 2
    inverse_sqrt    lr + (constant_lr − lr) · h(x) / h(1),   h(x) = 1 / √(1 + 10x) − 1
    annealing       constant_lr · (min_lr / constant_lr)^x

A schedule may start at a later step than 0 (`first_step`; a stage that sets lr_decay_style): all steps above then count
from there. This is how to restart a schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.config.stages import Stage
from megatron.options.optimizer import CooldownStyle, DecayStyle, OptimizerOptions, WsdDecayStyle

COOLDOWN_TIMESCALE = 10
"""Time scale of the inverse square root: a larger value makes the early decay steeper."""


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up followed by decay. `schedule(s)` is the rate of the run's step s ≥ `first_step`, counted from 0."""

    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int
    """Steps from `first_step` to the end of the decay."""
    style: DecayStyle
    final_steps: int = 0
    """For wsd and infinite, the number of final steps over which the rate decays to min_lr."""
    final_style: WsdDecayStyle = "linear"
    """For wsd, the shape of the final decay."""
    constant_lr: float = 0.0
    cooldown_steps: int = 0
    cooldown_style: CooldownStyle = "cosine"
    first_step: int = 0

    @property
    def has_decay(self) -> bool:
        """True if the rate reaches its final value after `decay_steps`."""
        return self.style not in ("constant", "inverse_sqrt") and (self.style != "infinite" or self.final_steps > 0)

    def __call__(self, step: int) -> float:
        step -= self.first_step
        if step < self.warmup_steps:
            # (s + 1) / (w + 1): the first step has a positive rate, and the step after warm-up has the peak rate.
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        match self.style:
            case "constant":
                return self.lr
            case "inverse_sqrt":
                return max(self.min_lr, self.lr * math.sqrt((self.warmup_steps + 1) / (step + 1)))
            case "infinite":
                return self._compute_infinite(step)
        if step >= self.decay_steps:
            return self.min_lr
        if self.style == "wsd":
            final = self._find_final_fraction(step)
            share = 1.0 if final is None else compute_decay_fraction(self.final_style, final)
        else:
            x = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
            share = compute_decay_fraction(self.style, x)
        return self.min_lr + (self.lr - self.min_lr) * share

    def _find_final_fraction(self, step: int) -> float | None:
        """Return the completed fraction of the final decay, or None before it.

        Warm-up takes precedence if both overlap.
        """
        start = self.decay_steps - self.final_steps
        return None if step < start or not self.final_steps else (step - start) / self.final_steps

    def _compute_infinite(self, step: int) -> float:
        final = self._find_final_fraction(step)
        if final is not None:
            return self.constant_lr * (self.min_lr / self.constant_lr) ** min(final, 1.0)
        after_warmup = step - self.warmup_steps
        if after_warmup >= self.cooldown_steps:
            return self.constant_lr
        x = after_warmup / self.cooldown_steps
        if self.cooldown_style == "cosine":
            return self.constant_lr + (self.lr - self.constant_lr) * compute_decay_fraction("cosine", x)
        return self.lr + (self.constant_lr - self.lr) * _invert_sqrt(x) / _invert_sqrt(1.0)


def compute_decay_fraction(style: str, x: float) -> float:
    """Return f(x) of a decay: the remaining fraction of lr − min_lr after a fraction x of its steps, 0 … 1."""
    match style:
        case "cosine":
            return (1 + math.cos(math.pi * x)) / 2
        case "minus_sqrt":
            return 1 - math.sqrt(x)
        case "exponential":
            return 2 * 0.5**x - 1
        case _:
            return 1 - x


def _invert_sqrt(x: float) -> float:
    return 1 / math.sqrt(1 + COOLDOWN_TIMESCALE * x) - 1


def build_schedule(options: OptimizerOptions, train_iters: int, first_step: int = 0) -> LearningRateSchedule:
    """Build the schedule of a run. Its decay ends at `lr_decay_iters`, or with the run.

    Args:
        options: optimizer options at the requested step.
        train_iters: last step of the schedule, as a step of the run.
        first_step: first step of the schedule.
    """
    decay_steps = options.lr_decay_iters or train_iters - first_step
    is_wsd, is_infinite = options.lr_decay_style == "wsd", options.lr_decay_style == "infinite"
    final_steps = options.lr_anneal_iters if is_infinite else 0
    if is_wsd:
        final_steps = options.lr_wsd_decay_iters or max(1, round(options.lr_wsd_decay_fraction * decay_steps))
    warmup = options.lr_warmup_iters
    return LearningRateSchedule(
        lr=options.optimizer.params.lr,
        min_lr=options.min_lr,
        warmup_steps=round(options.warmup * decay_steps) if warmup is None else warmup,
        decay_steps=decay_steps,
        style=options.lr_decay_style,
        final_steps=min(final_steps, decay_steps),
        final_style=options.lr_wsd_decay_style,
        constant_lr=(options.constant_lr or 0.0) if is_infinite else 0.0,
        cooldown_steps=options.lr_cooldown_iters if is_infinite else 0,
        cooldown_style=options.lr_cooldown_style,
        first_step=first_step,
    )


def describe_late_warmup(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return a line for each schedule of a run's stages whose warm-up is longer than its decay or than the run."""
    notes = []
    for stage in stages:
        options, first, end = stage.config.optimizer, stage.schedule_first, stage.schedule_end
        schedule = build_schedule(options, end, first)
        warmup, peak = schedule.warmup_steps, schedule.lr
        is_share = options.lr_warmup_iters is None
        given = f"warmup {options.warmup:g} ({warmup:,} steps)" if is_share else f"lr_warmup_iters {warmup}"
        if warmup >= end - first:
            last = "train_iters" if (first, end) == (0, stages[-1].end_step) else "its last step"
            reached = f"the rate reaches {schedule(end - 1) / peak:.0%} of {peak:g}"
            notes.append(f"{given}: warm-up does not end before {last} {end - first:,}; {reached}")
        elif warmup >= schedule.decay_steps and schedule.has_decay:
            drop = f"{schedule(first + warmup - 1):.2e} to {schedule(first + warmup):.2e} at step {first + warmup:,}"
            notes.append(
                f"{given}: warm-up ends after lr_decay_iters {schedule.decay_steps:,}, which leaves no decay: "
                f"the rate drops from {drop}"
            )
    return tuple(dict.fromkeys(notes))


def describe_rate_jump(old: LearningRateSchedule, new: LearningRateSchedule, step: int) -> str | None:
    """Return a line if the rate of `step` is far from the previous one, with the way to avoid it, or None.

    Extending a run causes this: a decay that ends with the run now ends later, so the rate returns to that of the
    longer run. A rate is far if it changes by more than a tenth of itself, and by more than twice the old schedule's
    next step.
    """
    if step == 0:
        return None
    was, planned, now = old(step - 1), old(step), new(step)
    if abs(now - was) <= max(0.1 * max(now, was), 2 * abs(planned - was)):
        return None
    text = f"the learning rate was {was:.2e} and {'jumps' if now > was else 'drops'} to {now:.2e}"
    extended = replace(new, decay_steps=old.decay_steps, warmup_steps=old.warmup_steps, final_steps=old.final_steps)
    if old.decay_steps == new.decay_steps or extended(step) != planned:
        return text  # the user set another rate explicitly
    text += f", because its decay now ends at step {new.decay_steps:,}; to keep the old schedule, set "
    text += f"lr_decay_iters={old.decay_steps}"
    if step >= old.decay_steps:
        text += f"; its decay has ended, so the rate would stay at min_lr={new.min_lr:g}"
        if new.min_lr == 0:
            text += "; set min_lr above 0 too, or nothing is learned"
    return text

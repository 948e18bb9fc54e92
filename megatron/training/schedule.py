"""The learning rate as a pure function of the step, so that a resumed run needs to restore nothing of it.

With peak rate `lr`, n = lr_decay_iters and w warm-up steps (lr_warmup_iters, or warmup · n), step s (counted from 0)
trains with

    s < w              lr · (s + 1) / (w + 1)
    w ≤ s < n          min_lr + (lr − min_lr) · f(x),   x = (s − w) / (n − w)
    s ≥ n              min_lr (constant: lr)

    cosine f(x) = (1 + cos πx) / 2      linear f(x) = 1 − x      constant f(x) = 1

as in Megatron-LM. GPT-NeoX's linear is another one with min_lr > 0: it is max(min_lr, lr · (1 − x)).

inverse_sqrt (Vaswani et al. 2017, 1706.03762, section 5.3) knows no end: from w on it is lr · √((w + 1) / (s + 1)),
and min_lr at least.

wsd, warm-up, stable, decay (Hu et al. 2024, MiniCPM, 2404.06395): the rate stays at lr until the last d steps before n
(lr_wsd_decay_iters, or lr_wsd_decay_fraction · n), and falls in them as f(x), x = (s − (n − d)) / d:

    linear f(x) = 1 − x         minus_sqrt f(x) = 1 − √x (Hägele et al. 2024, 2405.18392)
    cosine f(x) = (1 + cos πx) / 2         exponential f(x) = 2 · 2^(−x) − 1 (Megatron-LM)

infinite (Ibrahim et al. 2024, 2403.08763): after warm-up the rate cools down over c = lr_cooldown_iters steps to
constant_lr, x = (s − w) / c, stays there however long the run is, and anneals in the last a = lr_anneal_iters steps
before n, x = (s − (n − a)) / a; a = 0, which is a trunk, never does:

    cosine          constant_lr + (lr − constant_lr) · (1 + cos πx) / 2
    inverse_sqrt    lr + (constant_lr − lr) · h(x) / h(1),   h(x) = 1 / √(1 + 10x) − 1
    annealing       constant_lr · (min_lr / constant_lr)^x

A schedule may begin at a later step than 0 (`first_step`; a stage that names lr_decay_style): all of the above then
counts from there. That is how a schedule is restarted.
"""

import math
from dataclasses import dataclass, replace

from megatron.config.schema import Config
from megatron.config.stages import build_stages
from megatron.options.training import CooldownStyle, DecayStyle, OptimizerOptions, WsdDecayStyle

COOLDOWN_TIMESCALE = 10
"""Of the inverse square root: how much of the way is done early."""


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up, then decay. `schedule(s)` is the rate of step s of the run, counted from 0; no step before `first_step`
    may be asked for."""

    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int
    """From `first_step` to where the decay ends."""
    style: DecayStyle
    final_steps: int = 0
    """wsd and infinite: those before the end in which the rate falls to min_lr."""
    final_style: WsdDecayStyle = "linear"
    """wsd: how it falls."""
    constant_lr: float = 0.0
    cooldown_steps: int = 0
    cooldown_style: CooldownStyle = "cosine"
    first_step: int = 0

    @property
    def has_decay(self) -> bool:
        """True if the rate is at its end after `decay_steps`."""
        return self.style not in ("constant", "inverse_sqrt") and (self.style != "infinite" or self.final_steps > 0)

    def __call__(self, step: int) -> float:
        step -= self.first_step
        if step < self.warmup_steps:
            # (s + 1) / (w + 1): the first step already learns, and the peak is reached right after warm-up.
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
            final = self._find_final_share(step)
            share = 1.0 if final is None else compute_decay_share(self.final_style, final)
        else:
            x = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
            share = compute_decay_share(self.style, x)
        return self.min_lr + (self.lr - self.min_lr) * share

    def _find_final_share(self, step: int) -> float | None:
        """How much of the final decay is behind a step; None before it. Warm-up goes first where both would be."""
        start = self.decay_steps - self.final_steps
        return None if step < start or not self.final_steps else (step - start) / self.final_steps

    def _compute_infinite(self, step: int) -> float:
        final = self._find_final_share(step)
        if final is not None:
            return self.constant_lr * (self.min_lr / self.constant_lr) ** min(final, 1.0)
        after_warmup = step - self.warmup_steps
        if after_warmup >= self.cooldown_steps:
            return self.constant_lr
        x = after_warmup / self.cooldown_steps
        if self.cooldown_style == "cosine":
            return self.constant_lr + (self.lr - self.constant_lr) * compute_decay_share("cosine", x)
        return self.lr + (self.constant_lr - self.lr) * _invert_sqrt(x) / _invert_sqrt(1.0)


def compute_decay_share(style: str, x: float) -> float:
    """f(x) of a decay: what is left of lr − min_lr when the share x of its steps, 0 … 1, is behind."""
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
    """The schedule of a run: its decay ends at `lr_decay_iters`, or with the run.

    Args:
        options: as they are at the step that is asked for.
        train_iters: where the schedule ends, as a step of the run.
        first_step: where it began.
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


def describe_late_warmup(config: Config) -> tuple[str, ...]:
    """Return a line for each schedule of a run whose warm-up is longer than its decay, or than the run."""
    notes = []
    for stage in build_stages(config):
        options, first, end = stage.config.optimizer, stage.schedule_first, stage.schedule_end
        schedule = build_schedule(options, end, first)
        warmup, peak = schedule.warmup_steps, schedule.lr
        is_share = options.lr_warmup_iters is None
        given = f"warmup {options.warmup:g} ({warmup:,} steps)" if is_share else f"lr_warmup_iters {warmup}"
        if warmup >= end - first:
            last = "train_iters" if (first, end) == (0, config.training.train_iters) else "its last step"
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
    extended = replace(new, decay_steps=old.decay_steps, warmup_steps=old.warmup_steps, final_steps=old.final_steps)
    if old.decay_steps == new.decay_steps or extended(step) != planned:
        return text  # another rate was asked for by name
    text += f": its decay now ends at step {new.decay_steps:,}; lr_decay_iters={old.decay_steps} keeps the old schedule"
    if step >= old.decay_steps:
        text += f", which is over: it stays at min_lr={new.min_lr:g}"
        if new.min_lr == 0:
            text += ", where nothing is learned, so give a min_lr too"
    return text

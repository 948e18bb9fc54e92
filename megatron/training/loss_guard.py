"""When a loss is bad, and what the run does about it: it goes on, goes back to a checkpoint, or stops.

Going back is starting again from the last whole checkpoint, by the very path that a restart takes, but behind all data
that were read since: those of the bad step, and those before it that led there. What was skipped is part of the
trainer's state, so that a later resume does not meet it again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.layout import parse_step
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.schema import Config
from megatron.distributed.process_groups import ProcessGroups
from megatron.training.engine import Engine
from megatron.training.metrics import sum_over_batch

MAX_ROLLBACKS = 3
"""Rollbacks after which the run ends, unless a good step followed a new checkpoint in between."""

DECAY = 0.98
"""Of the usual loss, with every step: it is the mean over about fifty."""


@dataclass(frozen=True)
class Continue:
    """The run goes on."""

    note: str | None = None
    """A line worth telling."""


@dataclass(frozen=True)
class Rollback:
    """The run goes back."""

    load: str
    """Where to: a run's folder, or a checkpoint."""
    step: int
    """Of the checkpoint."""
    samples: int
    """Consumed when the loss was bad: the run goes on behind them."""
    count: int = 1
    """Rollbacks since a checkpoint was last proven by a good step after it, this one included."""
    total: int = 1
    """Rollbacks over all starts of the run, this one included."""
    moves_newer_aside: bool = False
    """True if the run has newer checkpoints, which did not help and are moved aside."""
    note: str = ""
    """A line worth telling."""

    def skip_samples(self, state: TrainerState) -> TrainerState:
        """The state of the checkpoint, behind the data."""
        return replace(
            state,
            consumed_samples=self.samples,
            rollbacks=self.total,
            skipped_samples=state.skipped_samples + self.samples - state.consumed_samples,
        )


@dataclass(frozen=True)
class Stop:
    """The run ends."""

    reason: str
    """What was wrong with the step."""
    message: str
    """The error that the run ends with."""


class RunningMeanLoss:
    """A running mean of the losses of single steps."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def is_spike(self, loss: float, factor: float) -> bool:
        """Is a loss more than `factor` times the usual one, or no number?"""
        return not math.isfinite(loss) or (self.mean is not None and loss > factor * self.mean)

    def add(self, loss: float) -> None:
        """A loss that is no spike."""
        self.mean = loss if self.mean is None else DECAY * self.mean + (1 - DECAY) * loss


class LossGuard:
    """Judges the loss of every step (`Stateful`).

    Args:
        config: of the run.
        engine: says whether it skipped a step, and at which loss scale.
        groups: of the run.
        list_checkpoints: returns the checkpoints that the run can go back to, oldest first, once a pending save is
            finished. Called on all ranks.
        last_rollback: by which this start of the run began, if it did.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        groups: ProcessGroups,
        list_checkpoints: Callable[[], Sequence[Path]],
        last_rollback: Rollback | None = None,
    ) -> None:
        self._config, self._engine, self._groups = config, engine, groups
        self._list_checkpoints, self._last_rollback = list_checkpoints, last_rollback
        self._usual = RunningMeanLoss()
        self.bad_steps = 0
        """Consecutive bad steps up to now. The state of such a run is not known to be good, so it is not saved."""
        self.last_good_step: int | None = None
        """Last step of this start that was good: it proves the checkpoints of earlier steps."""
        self.num_rollbacks = 0
        """How often the run went back, over all of its starts."""

    def state_dict(self) -> dict[str, Any]:
        return {"usual_loss": self._usual.mean, "rollbacks": self.num_rollbacks}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._usual.mean, self.num_rollbacks = state_dict["usual_loss"], state_dict["rollbacks"]

    def check(self, step: int, samples: int, loss: Tensor) -> Continue | Rollback | Stop:
        """What is to be done after a step. All ranks must call this, and all are told the same.

        A skipped step is bad, unless float16's loss scale was too large, which is normal and cures itself; and one
        whose loss is a spike.

        Args:
            step: steps taken, this one included.
            samples: training sequences read so far.
            loss: this rank's part of the step's loss, a scalar on its device.
        """
        if self._engine.skipped:
            return self._check_skipped_step(step, samples, sum_over_batch(self._groups, float(loss)))
        self.bad_steps = 0
        factor = self._config.training.loss_spike
        if factor is not None:
            total = sum_over_batch(self._groups, float(loss))
            if self._usual.is_spike(total, factor):
                usual = self._usual.mean
                comparison = "" if usual is None else f" is more than loss_spike × the usual {usual:.4g}"
                return self._roll_back_or_stop(step, samples, f"its loss {total:.4g}{comparison}")
            self._usual.add(total)
        self.last_good_step = step
        return Continue()

    def judge_weights(self, step: int, samples: int, problem: str) -> Rollback | Stop:
        """Decide what follows when a checkpoint cannot be saved because weights are not finite."""
        return self._roll_back_or_stop(step, samples, problem)

    def _check_skipped_step(self, step: int, samples: int, loss: float) -> Continue | Rollback | Stop:
        engine, training = self._engine, self._config.training
        is_finite, fp16 = math.isfinite(loss), training.fp16
        scalable = engine.precision == "fp16" and fp16.loss_scale == 0 and engine.loss_scale > fp16.min_loss_scale
        if scalable and is_finite:
            self.bad_steps = 0
            return Continue()
        self.bad_steps += 1
        reason = "its gradients are not finite" if is_finite else f"its loss is {loss}"
        limit = 1 if training.on_bad_loss == "stop" else training.max_bad_steps
        if self.bad_steps < limit:
            return Continue(f"step {step} skipped: {reason} ({self.bad_steps} in a row, stop at {limit})")
        key = "on_bad_loss" if training.on_bad_loss == "stop" else "max_bad_steps"
        return self._roll_back_or_stop(step, samples, f"{reason}, for {self.bad_steps} steps in a row ({key})")

    def _roll_back_or_stop(self, step: int, samples: int, reason: str) -> Rollback | Stop:
        """Go back to the newest checkpoint, or one further if that failed. Stop after `MAX_ROLLBACKS` failures."""
        problem, checkpoints = f"step {step}: {reason}", self._list_checkpoints()
        checkpoint = checkpoints[-1] if checkpoints else None
        if self._config.training.on_bad_loss == "rollback" and checkpoint is not None:
            count, last = 1, self._last_rollback
            if last is not None:
                steps = [parse_step(path) or 0 for path in checkpoints]
                if not any(last.step < saved < (self.last_good_step or 0) for saved in steps):
                    count = last.count + 1
                if steps[-1] <= last.step:  # nothing was saved since
                    older = [path for path, saved in zip(checkpoints, steps, strict=True) if saved < last.step]
                    checkpoint = older[-1] if older else checkpoint
            if count <= MAX_ROLLBACKS:
                return self._go_back_to(checkpoint, checkpoints[-1], samples, count, problem)
            problem += f"; gone back {MAX_ROLLBACKS} times, and no new checkpoint was followed by a good step"
        return Stop(reason, f"{problem}; {self._describe_checkpoints(checkpoints)}")

    def judge_end(self, step: int, losses: Sequence[float]) -> Stop | None:
        """Return why a run that has taken all its steps is not finished, or None if it is.

        Args:
            step: the last one.
            losses: those of its last validation and its test, if there are any.
        """
        if self.bad_steps:
            reason = "the last step was bad" if self.bad_steps == 1 else f"the last {self.bad_steps} steps were bad"
        elif not all(map(math.isfinite, losses)):
            reason = "the loss at its final weights is not finite"
        else:
            return None
        return Stop(reason, f"step {step}: {reason}; {self._describe_checkpoints(self._list_checkpoints())}")

    def _describe_checkpoints(self, checkpoints: Sequence[Path]) -> str:
        """Name the newest checkpoint that a good step followed, or else the newest one."""
        if not checkpoints:
            return "no checkpoint was saved"
        good_step = self.last_good_step or 0
        good = [path for path in checkpoints if (parse_step(path) or 0) < good_step]
        if good:
            return f"the last good checkpoint is {good[-1]}"
        earlier = f"; one before it is {checkpoints[-2]}" if len(checkpoints) > 1 else ""
        return f"the last checkpoint is {checkpoints[-1]}, and no good step followed it{earlier}"

    def _go_back_to(self, checkpoint: Path, newest: Path, samples: int, count: int, problem: str) -> Rollback:
        run, save = checkpoint.parent.parent, self._config.checkpoint.save
        is_own = save is not None and run.resolve() == Path(save).resolve()
        return Rollback(
            load=str(save) if is_own and checkpoint == newest else str(checkpoint),
            step=parse_step(checkpoint) or 0,
            samples=samples,
            count=count,
            total=self.num_rollbacks + 1,
            moves_newer_aside=is_own and checkpoint != newest,
            note=f"{problem}; going back to {checkpoint}, behind the data until here",
        )

"""When a loss is bad, and what the run does about it: it goes on, goes back to a checkpoint, or stops.

Going back is starting again from the last whole checkpoint, by the very path that a restart takes, but behind all data
that were read since: those of the bad step, and those before it that led there. What was skipped is part of the
trainer's state, so that a later resume does not meet it again.
"""

import math
from collections.abc import Callable, Mapping
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
"""To the same checkpoint: if other data do not help, it is not the data."""

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
    """How often the run went back to this checkpoint, this time included."""
    note: str = ""
    """A line worth telling."""

    def skip_samples(self, state: TrainerState) -> TrainerState:
        """The state of the checkpoint, behind the data."""
        return replace(
            state,
            consumed_samples=self.samples,
            rollbacks=state.rollbacks + self.count,
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
        find_checkpoint: the last checkpoint that is whole, once a pending save is finished; None if there is none.
            Called on all ranks.
        last_rollback: by which this start of the run began, if it did.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        groups: ProcessGroups,
        find_checkpoint: Callable[[], Path | None],
        last_rollback: Rollback | None = None,
    ) -> None:
        self._config, self._engine, self._groups = config, engine, groups
        self._find_checkpoint, self._last_rollback = find_checkpoint, last_rollback
        self._usual = RunningMeanLoss()
        self._bad_steps = 0
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
        self._bad_steps = 0
        factor = self._config.training.loss_spike
        if factor is None:
            return Continue()
        total = sum_over_batch(self._groups, float(loss))
        if self._usual.is_spike(total, factor):
            usual = self._usual.mean
            comparison = "" if usual is None else f" is more than loss_spike × the usual {usual:.4g}"
            return self._roll_back_or_stop(step, samples, f"its loss {total:.4g}{comparison}")
        self._usual.add(total)
        return Continue()

    def _check_skipped_step(self, step: int, samples: int, loss: float) -> Continue | Rollback | Stop:
        engine, training = self._engine, self._config.training
        is_finite, fp16 = math.isfinite(loss), training.fp16
        scalable = engine.precision == "fp16" and fp16.loss_scale == 0 and engine.loss_scale > fp16.min_loss_scale
        if scalable and is_finite:
            self._bad_steps = 0
            return Continue()
        self._bad_steps += 1
        reason = "its gradients are not finite" if is_finite else f"its loss is {loss}"
        limit = 1 if training.on_bad_loss == "stop" else training.max_bad_steps
        if self._bad_steps < limit:
            return Continue(f"step {step} skipped: {reason} ({self._bad_steps} in a row, stop at {limit})")
        key = "on_bad_loss" if training.on_bad_loss == "stop" else "max_bad_steps"
        return self._roll_back_or_stop(step, samples, f"{reason}, for {self._bad_steps} steps in a row ({key})")

    def _roll_back_or_stop(self, step: int, samples: int, reason: str) -> Rollback | Stop:
        """Stop where there is nowhere to go back to, or going back did not help."""
        problem, checkpoint = f"step {step}: {reason}", self._find_checkpoint()
        if self._config.training.on_bad_loss == "rollback" and checkpoint is not None:
            run, save = checkpoint.parent.parent, self._config.checkpoint.save
            is_own = save is not None and run.resolve() == Path(save).resolve()
            last, checkpoint_step = self._last_rollback, parse_step(checkpoint) or 0
            rollback = Rollback(
                load=str(save) if is_own else str(checkpoint),
                step=checkpoint_step,
                samples=samples,
                count=1 + (last.count if last is not None and last.step == checkpoint_step else 0),
                note=f"{problem}; going back to {checkpoint}, behind the data until here",
            )
            if rollback.count <= MAX_ROLLBACKS:
                return rollback
            problem += f"; gone back {MAX_ROLLBACKS} times to the same checkpoint already"
        remains = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint was saved"
        return Stop(reason, f"{problem}; {remains}")

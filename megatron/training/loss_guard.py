"""Detection of bad losses, and the response of the run: continue, roll back to a checkpoint, or stop.

A rollback restarts the run from the last complete checkpoint, exactly as a restart does, but skips all data read since
then: the data of the bad step, and the earlier data that led to it. The skipped samples are part of the trainer's
state, so a later resume skips them too.
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
from megatron.data.stage_order import StageOrder
from megatron.distributed.process_groups import ProcessGroups
from megatron.training.engine import Engine
from megatron.training.metrics import sum_over_batch
from megatron.utils.formatting import format_quantity

MAX_ROLLBACKS = 3
"""Number of rollbacks after which the run ends. The count restarts once a good step follows a new checkpoint."""

DECAY = 0.98
"""Decay of the running mean of the loss per step: a mean over about fifty steps."""


@dataclass(frozen=True)
class ContinueRun:
    """Decision to continue the run."""

    note: str | None = None
    """Line to print, if any."""


@dataclass(frozen=True)
class Rollback:
    """Decision to roll the run back to a checkpoint."""

    load: str
    """Folder of the run, or of the checkpoint, to load."""
    step: int
    """Step of the checkpoint."""
    samples: int
    """Samples consumed when the loss was bad; the run continues after them."""
    data_order: StageOrder | None = None
    """Order of the text at that time, or None without stages."""
    seq_length: int = 0
    """Length of the samples at that time."""
    count: int = 1
    """Rollbacks, including this one, since a good step last followed a new checkpoint."""
    total: int = 1
    """Rollbacks over all starts of the run, including this one."""
    archives_newer: bool = False
    """True if newer checkpoints of the run did not help and are moved aside."""
    note: str = ""
    """Line to print."""

    def skip_samples(self, state: TrainerState, seq_length: int) -> TrainerState:
        """Return the state of the checkpoint, advanced past the skipped data.

        Args:
            state: state in the stage that the run enters.
            seq_length: length of the samples in that stage.
        """
        samples = self.samples
        if state.data_order is not None and self.data_order is not None:
            order = StageOrder.from_dict(state.data_order)
            if order.sources == self.data_order.sources:  # otherwise the texts have no common position
                read = self.data_order.find_sequence(samples) * self.seq_length
                samples = order.first_sample - order.start + -(-read // seq_length)
        return replace(
            state,
            consumed_samples=samples,
            rollbacks=self.total,
            skipped_samples=state.skipped_samples + samples - state.consumed_samples,
        )


@dataclass(frozen=True)
class StopRun:
    """Decision to end the run."""

    reason: str
    """Description of the problem with the step."""
    message: str
    """Error message that ends the run."""


class RunningMeanLoss:
    """Running mean of the losses of steps without a spike."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def is_spike(self, loss: float, factor: float) -> bool:
        """Return True if a loss is not finite or more than `factor` times the running mean."""
        return not math.isfinite(loss) or (self.mean is not None and loss > factor * self.mean)

    def add(self, loss: float) -> None:
        """Update the mean with a loss that is not a spike."""
        self.mean = loss if self.mean is None else DECAY * self.mean + (1 - DECAY) * loss


class LossGuard:
    """Monitor of the loss of every step (`Stateful`).

    Args:
        config: configuration of the run.
        engine: engine that reports skipped steps and the loss scale.
        groups: process groups of the run.
        list_checkpoints: returns the checkpoints available for a rollback, oldest first, once a pending save is
            finished. Called on all ranks.
        last_rollback: rollback that began this start of the run, if any.
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
        self._mean_loss = RunningMeanLoss()
        self.bad_steps = 0
        """Number of consecutive bad steps so far. While it is positive the run is not saved, because its state may be
        bad.
        """
        self.last_good_step: int | None = None
        """Last good step of this start. It confirms the checkpoints of earlier steps."""
        self.num_rollbacks = 0
        """Number of rollbacks over all starts of the run."""

    def state_dict(self) -> dict[str, Any]:
        return {"usual_loss": self._mean_loss.mean, "rollbacks": self.num_rollbacks}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._mean_loss.mean, self.num_rollbacks = state_dict["usual_loss"], state_dict["rollbacks"]

    def check(self, step: int, samples: int, loss: Tensor) -> ContinueRun | Rollback | StopRun:
        """Return the decision after a step. All ranks must call this and get the same decision.

        A step is bad if its loss is a spike, or if it was skipped. An exception is a step skipped because float16's
        loss scale was too large, which is normal: the scale adapts.

        Args:
            step: steps taken, including this one.
            samples: training sequences read so far.
            loss: this rank's share of the step's loss, a scalar on its device.
        """
        if self._engine.skipped:
            return self._check_skipped_step(step, samples, sum_over_batch(self._groups, float(loss)))
        self.bad_steps = 0
        factor = self._config.training.loss_spike
        if factor is not None:
            total = sum_over_batch(self._groups, float(loss))
            if self._mean_loss.is_spike(total, factor):
                mean = self._mean_loss.mean
                comparison = "" if mean is None else f" exceeds loss_spike × its running mean {mean:.4g}"
                return self._roll_back_or_stop(step, samples, f"its loss {total:.4g}{comparison}")
            self._mean_loss.add(total)
        self.last_good_step = step
        return ContinueRun()

    def check_weights(self, step: int, samples: int, problem: str) -> Rollback | StopRun:
        """Return the decision after a checkpoint could not be saved because weights are not finite."""
        return self._roll_back_or_stop(step, samples, problem)

    def _check_skipped_step(self, step: int, samples: int, loss: float) -> ContinueRun | Rollback | StopRun:
        engine, training = self._engine, self._config.training
        is_finite, fp16 = math.isfinite(loss), training.fp16
        scalable = engine.precision == "fp16" and fp16.loss_scale == 0 and engine.loss_scale > fp16.min_loss_scale
        if scalable and is_finite:
            self.bad_steps = 0
            return ContinueRun()
        self.bad_steps += 1
        reason = "its gradients are not finite" if is_finite else f"its loss is {loss}"
        limit = 1 if training.on_bad_loss == "stop" else training.max_bad_steps
        if self.bad_steps < limit:
            return ContinueRun(f"step {step} skipped: {reason} ({self.bad_steps} of max_bad_steps {limit} in a row)")
        key = "on_bad_loss" if training.on_bad_loss == "stop" else "max_bad_steps"
        return self._roll_back_or_stop(
            step, samples, f"{reason}, for {format_quantity(self.bad_steps, 'step')} in a row ({key})"
        )

    def _roll_back_or_stop(self, step: int, samples: int, reason: str) -> Rollback | StopRun:
        """Roll back to the newest checkpoint, or to an older one if that failed; stop after `MAX_ROLLBACKS`."""
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
                return self._roll_back_to(checkpoint, checkpoints[-1], samples, count, problem)
            problem += f"; rolled back {MAX_ROLLBACKS} times without a good step after a new checkpoint"
        return StopRun(reason, f"{problem}; {self._describe_checkpoints(checkpoints)}")

    def check_end(self, step: int, losses: Sequence[float]) -> StopRun | None:
        """Return the reason why a run that took all its steps is not finished, or None if it is.

        Args:
            step: last step.
            losses: losses of its last validation and its test, if any.
        """
        if self.bad_steps:
            reason = "the last step was bad" if self.bad_steps == 1 else f"the last {self.bad_steps} steps were bad"
        elif not all(map(math.isfinite, losses)):
            reason = "the loss at its final weights is not finite"
        else:
            return None
        return StopRun(reason, f"step {step}: {reason}; {self._describe_checkpoints(self._list_checkpoints())}")

    def _describe_checkpoints(self, checkpoints: Sequence[Path]) -> str:
        """Name the newest checkpoint that a good step followed, or otherwise the newest one."""
        if not checkpoints:
            return "no checkpoint was saved"
        good_step = self.last_good_step or 0
        good = [path for path in checkpoints if (parse_step(path) or 0) < good_step]
        if good:
            return f"the last good checkpoint is {good[-1]}"
        earlier = f"; the previous one is {checkpoints[-2]}" if len(checkpoints) > 1 else ""
        return f"the last checkpoint is {checkpoints[-1]}, and no good step followed it{earlier}"

    def _roll_back_to(self, checkpoint: Path, newest: Path, samples: int, count: int, problem: str) -> Rollback:
        run, save = checkpoint.parent.parent, self._config.checkpoint.save
        is_own = save is not None and run.resolve() == Path(save).resolve()
        return Rollback(
            load=str(save) if is_own and checkpoint == newest else str(checkpoint),
            step=parse_step(checkpoint) or 0,
            samples=samples,
            count=count,
            total=self.num_rollbacks + 1,
            archives_newer=is_own and checkpoint != newest,
            note=f"{problem}; rolling back to {checkpoint} and skipping the data read since",
        )

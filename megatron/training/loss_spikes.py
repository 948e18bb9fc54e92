"""When a loss is bad, and how a run goes back because of it.

Going back is starting again from the last whole checkpoint, by the very path that a restart takes, but behind all data
that were read since: those of the bad step, and those before it that led there. What was stepped over is part of the
progress, so that a later resume does not meet it again.
"""

import math
from dataclasses import replace

from megatron.checkpoint.trainer_state import TrainerState

MAX_ROLLBACKS = 3
"""To the same checkpoint: if other data do not help, it is not the data."""

DECAY = 0.98
"""Of the usual loss, with every step: it is the mean over about fifty."""


class RunningMeanLoss:
    """A running mean of the losses of single steps.

    Args:
        mean: where an earlier session left it.
    """

    def __init__(self, mean: float | None = None) -> None:
        self.mean = mean

    def is_spike(self, loss: float, factor: float) -> bool:
        """Is a loss more than `factor` times the usual one, or no number?"""
        return not math.isfinite(loss) or (self.mean is not None and loss > factor * self.mean)

    def add(self, loss: float) -> None:
        """A loss that is no spike."""
        self.mean = loss if self.mean is None else DECAY * self.mean + (1 - DECAY) * loss


class RollbackRequested(Exception):
    """The run goes back.

    Args:
        load: where to: a run's folder, or a checkpoint.
        step: of the checkpoint.
        samples: consumed when the loss was bad: the run goes on behind them.
        before: the last time it went back, if it did.
    """

    def __init__(self, load: str, step: int, samples: int, before: "RollbackRequested | None" = None) -> None:
        super().__init__(load)
        self.load, self.step, self.samples = load, step, samples
        self.num_rollbacks: int = 1 + (before.num_rollbacks if before is not None and before.step == step else 0)

    def count_skipped_samples(self, progress: TrainerState) -> TrainerState:
        """The progress of the checkpoint, behind the data."""
        return replace(
            progress,
            consumed_samples=self.samples,
            rollbacks=progress.rollbacks + self.num_rollbacks,
            skipped_samples=progress.skipped_samples + self.samples - progress.consumed_samples,
        )

"""What a run reports: records of training intervals and of validations, and the meter that collects the first.

Numbers of single steps stay on the device until an interval ends, so that reporting makes no step wait.
"""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.training.records import DIVERGED_KIND


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan


@dataclass(frozen=True)
class TrainRecord:
    """An interval of steps up to and including `step`. Values that cannot be known are None."""

    step: int
    loss: float | None  # mean over the interval's steps in nats per token; None if all were skipped
    perplexity: float | None
    learning_rate: float  # of the last step
    grad_norm: float | None  # of the last step that was not skipped, before clipping
    tokens_per_second: float  # of the whole run, all processes together
    ms_per_step: float
    tflops: float  # per device, TFLOP/s
    mfu: float | None  # share of the device's peak
    loss_scale: float
    skipped_steps: int  # since step 0
    memory_gib: float  # the largest of any process
    tokens: int  # consumed since step 0
    seconds_left: float

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "train", **asdict(self)}


@dataclass(frozen=True)
class ValidationRecord:
    """A validation, or the test at the end."""

    step: int
    split: str
    loss: float  # nats per token
    perplexity: float
    tokens: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.split, **{k: v for k, v in asdict(self).items() if k != "split"}}


@dataclass(frozen=True)
class DivergenceRecord:
    """Why a run ended before its last step: its loss or its gradients."""

    step: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {"kind": DIVERGED_KIND, **asdict(self)}


class IntervalMetrics:
    """Collects steps until they are reported. Time spent on other things is left out with `pause` and `resume`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self, loss: float = 0.0, counted: int = 0) -> None:
        """Begin a new interval now; `loss` is the sum over `counted` steps of it that an earlier session took."""
        self.steps = self.tokens = 0
        self.flops = 0.0
        self.counted = counted
        self._losses: Tensor = torch.tensor(loss, dtype=torch.float64, device=self._device)
        self._grad_norm: Tensor | float | None = None
        self._seconds = 0.0
        self._since: float | None = time.perf_counter()

    def add(self, loss: Tensor, tokens: int, flops: float, grad_norm: Tensor | float, skipped: bool) -> None:
        """One step: this rank's share of its loss (a scalar on the device), the tokens that all ranks together read,
        and the FLOPs of that."""
        self.steps += 1
        self.tokens += tokens
        self.flops += flops
        if not skipped:
            self.counted += 1
            self._losses += loss
            self._grad_norm = grad_norm

    def pause(self) -> None:
        """Stop the clock: what follows is not training."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def resume(self) -> None:
        """Start the clock again."""
        if self._since is None:
            self._since = time.perf_counter()

    def loss_sum(self) -> float:
        """This rank's share of the sum of the losses of `counted` steps; waits for the device."""
        return float(self._losses)

    def read(self) -> tuple[float | None, float | None, float]:
        """This rank's share of the mean loss, the gradient norm, and the seconds; waits for the device."""
        loss = self.loss_sum() / self.counted if self.counted else None
        norm = None if self._grad_norm is None else float(self._grad_norm)
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return loss, norm, self._seconds + running

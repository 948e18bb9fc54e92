"""Detection of slow ranks: every rank measures its own times, and each report compares them.

    data wait          until the next batch was available, in the phase `data` of every step
    checkpoint wait    until the states of a checkpoint were copied, and the previous checkpoint was written
    forward            the forward pass of the first micro-batch of every step

Ranks of one pipeline stage do equal work, so a rank with a longer forward pass is slow itself: its GPU is throttled, or
another process uses its core. Ranks that communicate within that pass (tensor and context parallelism, ZeRO 3) become
equally slow, and any of them may be reported. After the forward pass the ranks exchange gradients, so all take the same
time.

No step waits for the measurement: on a GPU two events are recorded, and read long after the step has finished. Ranks
exchange their times together with the values that a report exchanges anyway.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from megatron.distributed.process_groups import ProcessGroups

FORWARD_FRACTION = 1 / 3
"""Fraction of the forward pass in the time of both passes; the backward pass has twice the FLOPs."""


class ForwardTimer:
    """Timer of this rank's first forward pass of each step.

    Args:
        model: model whose passes are timed during training.
        device: device of the model.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.seconds, self.count = 0.0, 0
        """Total time of the timed passes in seconds, and their number."""
        self._is_cuda, self._is_waiting = device.type == "cuda", False
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._is_cuda else []
        self._has_events, self._start_time = False, 0.0
        self._hooks = [model.register_forward_pre_hook(self._start), model.register_forward_hook(self._stop)]

    def begin_step(self) -> None:
        """Start a step, whose first pass will be timed."""
        self.read()
        self._is_waiting = True

    def read(self) -> None:
        """Add the time of the last pass if the device has finished it."""
        if self._has_events and self._events[1].query():
            self._add(self._events[0].elapsed_time(self._events[1]) / 1e3)
        self._has_events = False

    def reset(self) -> None:
        """Reset the total to 0."""
        self.seconds, self.count = 0.0, 0

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _start(self, module: nn.Module, *inputs: Any) -> None:
        if self._is_waiting and module.training:
            if self._is_cuda:
                self._events[0].record()
            else:
                self._start_time = time.perf_counter()

    def _stop(self, module: nn.Module, *inputs_and_outputs: Any) -> None:
        if not (self._is_waiting and module.training):
            return
        self._is_waiting = False
        if self._is_cuda:
            self._events[1].record()
            self._has_events = True
        else:
            self._add(time.perf_counter() - self._start_time)

    def _add(self, seconds: float) -> None:
        self.seconds, self.count = self.seconds + seconds, self.count + 1


@dataclass
class RankTimes:
    """Times of one rank in an interval, in seconds."""

    forward: float = 0.0
    """Average time of a forward pass."""
    data_wait: float = 0.0
    """Time spent waiting for data, over all steps."""
    checkpoint_wait: float = 0.0

    def to_numbers(self) -> tuple[float, ...]:
        return self.forward, self.data_wait, self.checkpoint_wait


@dataclass(frozen=True)
class RankComparison:
    """Comparison of the ranks of a run over an interval."""

    data_wait: float
    """Time that the rank that waited longest spent waiting for data, over all steps, in seconds."""
    data_wait_rank: int
    checkpoint_wait: float
    """Time that the rank that waited longest spent waiting for checkpoints, in seconds."""
    slowest_rank: int | None
    """Rank with the slowest forward pass relative to the median of its pipeline stage, or None if every stage has one
    rank.
    """
    slowdown: float | None
    """Relative slowdown of that rank against the median."""
    wait_per_step: float
    """Seconds per step that the other ranks may wait for it, over all micro-batches, forward and backward."""


def compare_ranks(times: Sequence[RankTimes], stages: Sequence[int], micro_batches: int) -> RankComparison:
    """Compare the ranks of a run.

    Args:
        times: times of each rank.
        stages: pipeline stage of each rank.
        micro_batches: micro-batches per step.
    """
    medians: dict[int, float] = {}
    for stage in set(stages):
        forward = [own.forward for own, other in zip(times, stages, strict=True) if other == stage]
        if len(forward) > 1 and min(forward) > 0:
            medians[stage] = median(forward)
    excess = {
        rank: own.forward - medians[stage]
        for rank, (own, stage) in enumerate(zip(times, stages, strict=True))
        if stage in medians
    }
    slowest = max(excess, key=lambda rank: excess[rank], default=None)
    waiting = max(range(len(times)), key=lambda rank: times[rank].data_wait)
    return RankComparison(
        data_wait=times[waiting].data_wait,
        data_wait_rank=waiting,
        checkpoint_wait=max(own.checkpoint_wait for own in times),
        slowest_rank=slowest,
        slowdown=None if slowest is None else excess[slowest] / medians[stages[slowest]],
        wait_per_step=0.0 if slowest is None else excess[slowest] * micro_batches / FORWARD_FRACTION,
    )


def exchange_times(groups: ProcessGroups, own: RankTimes, memory: float) -> tuple[list[RankTimes], float]:
    """Return the times of all ranks, and the maximum of their memory, in one exchange. All ranks must call this."""
    numbers = (memory, *own.to_numbers())
    rows = [0.0] * (len(numbers) * groups.world_size)
    rows[groups.rank * len(numbers) : (groups.rank + 1) * len(numbers)] = numbers
    rows = groups.all_reduce_sum(*rows)
    by_rank = [rows[start : start + len(numbers)] for start in range(0, len(rows), len(numbers))]
    return [RankTimes(*row[1:]) for row in by_rank], max(row[0] for row in by_rank)

"""Which rank the others wait for, and for what: times that every rank takes of itself and compares in each report.

    data wait          until the next batch was there, in the phase `data` of every step
    checkpoint wait    until the states of a checkpoint were copied, and the one before it was written
    forward            the forward pass of the first micro-batch of every step

Ranks of one pipeline stage do equal work, so one whose forward pass takes longer than the others' is slow itself: a GPU
that is throttled, a core that somebody else uses. What ranks exchange within that pass (tensor and context parallelism,
ZeRO 3) makes those that do so equally slow, and any of them may be named. Behind it, gradients are exchanged, and all
ranks take the same time.

None of it makes a step wait: on a GPU two events are recorded, and read when the step is long over. Ranks exchange
their numbers with those that a report exchanges in any case.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from megatron.distributed.process_groups import ProcessGroups

FORWARD_SHARE = 1 / 3
"""Of forward and backward; the backward pass has twice the FLOPs."""


class ForwardTimer:
    """Takes the time of this rank's first forward pass of each step.

    Args:
        model: whose passes are timed, while it trains.
        device: where it computes.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.seconds, self.count = 0.0, 0
        """Of all passes that were timed, and how many they are."""
        self._is_cuda, self._is_waiting = device.type == "cuda", False
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._is_cuda else []
        self._has_events, self._start_time = False, 0.0
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]

    def begin_step(self) -> None:
        """A step begins: the next pass is its first."""
        self.read()
        self._is_waiting = True

    def read(self) -> None:
        """Add the last pass, if the device has done it."""
        if self._has_events and self._events[1].query():
            self._add(self._events[0].elapsed_time(self._events[1]) / 1e3)
        self._has_events = False

    def reset(self) -> None:
        """Begin to add anew."""
        self.seconds, self.count = 0.0, 0

    def close(self) -> None:
        """Time nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, *inputs: Any) -> None:
        if self._is_waiting and module.training:
            if self._is_cuda:
                self._events[0].record()
            else:
                self._start_time = time.perf_counter()

    def _end(self, module: nn.Module, *inputs_and_outputs: Any) -> None:
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
    """What one rank took in an interval, in seconds."""

    forward: float = 0.0
    """On average."""
    data_wait: float = 0.0
    """Of all steps together."""
    checkpoint_wait: float = 0.0

    def to_numbers(self) -> tuple[float, ...]:
        return self.forward, self.data_wait, self.checkpoint_wait


@dataclass(frozen=True)
class RankComparison:
    """What the ranks of a run took in an interval."""

    data_wait: float
    """Seconds of all steps together, of the rank that waited most."""
    data_wait_rank: int
    checkpoint_wait: float
    """Seconds, of the rank that waited most."""
    slowest_rank: int | None
    """The rank whose forward pass took longest beside the median of its pipeline stage; None if all are alone."""
    slowdown: float | None
    """By which share of that median it took longer."""
    lost: float
    """Seconds of a step that the others may wait for it, over so many micro-batches, forward and backward."""


def compare_ranks(times: Sequence[RankTimes], stages: Sequence[int], micro_batches: int) -> RankComparison:
    """Compare the ranks of a run.

    Args:
        times: of each rank.
        stages: of each rank its pipeline stage.
        micro_batches: of a step.
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
        lost=0.0 if slowest is None else excess[slowest] * micro_batches / FORWARD_SHARE,
    )


def exchange_times(groups: ProcessGroups, own: RankTimes, memory: float) -> tuple[list[RankTimes], float]:
    """The times of all ranks, and the most memory of any, in one exchange. All ranks must call this."""
    numbers = (memory, *own.to_numbers())
    rows = [0.0] * (len(numbers) * groups.world_size)
    rows[groups.rank * len(numbers) : (groups.rank + 1) * len(numbers)] = numbers
    rows = groups.all_reduce_sum(*rows)
    by_rank = [rows[start : start + len(numbers)] for start in range(0, len(rows), len(numbers))]
    return [RankTimes(*row[1:]) for row in by_rank], max(row[0] for row in by_rank)

"""CUDA graphs without CUDA: functions that are run again instead of replayed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.model.graphed_model import CudaCapture


class Rerun(CudaCapture):
    """A replay runs the function again and writes what it returns to the tensors of the first time, as a graph does.

    The memory that graphs share is played too: a replay of the forward pass leaves garbage in the gradients.
    """

    def __init__(self) -> None:
        self.outputs: list[list[Tensor]] = []
        self.replays = 0

    def capture(self, function: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        number, outputs = len(self.outputs), list(function())
        self.outputs.append([output.detach() for output in outputs])

        def replay() -> None:
            self.replays += 1
            for later in self.outputs[number + 1 :]:
                torch._foreach_zero_(later)
                torch._foreach_add_(later, torch.nan)
            with torch.enable_grad():
                again = function()
            for output, value in zip(self.outputs[number], again, strict=True):
                output.copy_(value.detach())

        return replay, self.outputs[number]

    @contextmanager
    def use_side_stream(self) -> Iterator[None]:
        yield

    def is_device_usable(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    @contextmanager
    def forbid_synchronization(self) -> Iterator[None]:
        yield

    def measure_peak_bytes(self) -> int:
        return 0

    def measure_reserved(self) -> int:
        return 0

    def is_memory_short(self, needed: int) -> bool:
        return False

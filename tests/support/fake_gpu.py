"""Fake GPU backed by the CPU, to test device code without a GPU.

Inside `fake_gpu`, a tensor requested on "cuda" is created on the CPU, and the torch.cuda functions used by the tools
return a GPU's answers. Tensors report a CPU device, so kernels are not launched and `triton` falls back to PyTorch. A
function that is not replaced raises an error, as torch does without CUDA.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

NAME = "NVIDIA H200"
PEAK = 5_000_000
"""Peak memory that every pass reports, in bytes."""


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "elapsed_time would raise"
        self.at: float | None = None

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: "Event") -> float:
        assert self.at is not None
        assert other.at is not None
        return 1e3 * (other.at - self.at)


class OnCpu(TorchFunctionMode):
    """Mode in which every function gets "cpu" instead of "cuda"."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:  # the name should be that of a GPU
            return function(*args, **(kwargs or {}))
        return function(*map(_here, args), **{key: _here(value) for key, value in (kwargs or {}).items()})


def _here(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value == "cuda" else value


@contextmanager
def fake_gpu() -> Iterator[None]:
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(name=NAME, total_memory=141 * 2**30),
        "get_device_name": lambda device=None: NAME,
        "synchronize": lambda device=None: None,
        "memory_allocated": lambda device=None: 1_000_000,
        "max_memory_allocated": lambda device=None: 1_000_000 + PEAK,
        "reset_peak_memory_stats": lambda device=None: None,
        "Event": Event,
        # A CUDA build of torch would initialize CUDA for it, and fail without a driver.
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    with pytest.MonkeyPatch.context() as patch, OnCpu():
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.accelerator, "is_available", lambda: False)  # otherwise its stream is requested
        if torch.backends.cuda.is_built():
            # Dynamo would request the device's properties from the driver, which a CPU build lacks.
            patch.setattr(torch, "compile", lambda function=None, **options: function or (lambda given: given))
        yield

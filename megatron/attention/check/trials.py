"""Trials of backends on one problem: run each, compare it within the rounding of its type, and time the correct ones.

No failure of a backend is fatal: a backend that raises, runs out of memory or exceeds rounding errors is reported and
rejected. The only exception is an error that makes the device unusable for this process: `DeviceLostError`.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from megatron.attention.backends.backend import AttentionBackend
from megatron.attention.backends.registry import stores_scores_in_compute_type
from megatron.attention.check.check_result import BackendTrial
from megatron.attention.check.problem import CheckProblem
from megatron.utils.errors import is_out_of_memory
from megatron.utils.rounding import SAFETY_FACTOR, compute_size_ratio, estimate_rounding_sizes

CHECK_SECONDS = 20.0
"""Time limit in seconds after which no further backend is started."""
TIMING_SECONDS = 2.0
"""Time limit in seconds of all timing rounds together."""
MAX_ROUNDS, MIN_ROUNDS = 10, 2
CERTAIN_ERROR_RATIO = 100.0
"""Error ratio above which a result is wrong. A result with a smaller ratio above the tolerance is computed again."""


class DeviceLostError(Exception):
    """Error after which the device is unusable. The message names the backend and what it raised.

    `trials` are the trials so far, including the failed one.
    """

    def __init__(self, trials: list[BackendTrial]) -> None:
        super().__init__(f"attention by {trials[-1].backend} {trials[-1].refusal}")
        self.trials = trials


def time_pass(run: Callable[[], object], device: torch.device) -> float:
    """Return the duration of a forward and backward pass in seconds, from launch until the device has finished."""
    _synchronize(device)
    start_time = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start_time


def is_within_rounding(error_ratios: Mapping[str, float]) -> bool:
    """Return True if a backend's results are correct.

    Args:
        error_ratios: ratio of the error of each result to the size of rounding errors
            (`ReferenceResults.compute_error_ratio`). It is infinite for NaN, and if a value that must be zero is not.
    """
    return all(ratio <= SAFETY_FACTOR for ratio in error_ratios.values())


class ReferenceResults:
    """Exact results of a problem, and the sizes of rounding errors in its data type."""

    def __init__(self, problem: CheckProblem) -> None:
        self.problem = problem
        self._sizes: dict[bool, dict[str, Tensor]] = {}

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """Results in float64."""
        return self.problem.compute_exactly()

    def compute_error_ratio(
        self, found: Mapping[str, Tensor], is_zero_elsewhere: bool, *, rounds_every_op: bool
    ) -> dict[str, float]:
        """Compute the ratio of the error to the size of rounding errors for each result.

        Args:
            found, is_zero_elsewhere: `CheckProblem.select_results` of a backend.
            rounds_every_op: True if the backend rounds every result to the type
                (`registry.stores_scores_in_compute_type`).
        """
        result_dtypes = {name: x.dtype for name, x in found.items()}
        sizes = self._estimate_sizes(result_dtypes, rounds_every_op=rounds_every_op)
        error_ratios = {
            name: compute_size_ratio(found[name].double().view_as(exact) - exact, sizes[name])
            for name, exact in self.exact.items()
        }
        return error_ratios if is_zero_elsewhere else {**error_ratios, "rows without a gradient": float("inf")}

    def _estimate_sizes(self, result_dtypes: Mapping[str, torch.dtype], *, rounds_every_op: bool) -> dict[str, Tensor]:
        if rounds_every_op not in self._sizes:
            sizes = estimate_rounding_sizes(
                result_dtypes,
                self.exact,
                self.problem.compute_exactly,
                self.problem.dtype,
                stored=True,
                rounds_every_op=rounds_every_op,
            )
            for constant, weight in self.problem.logit_constants.items():
                sizes[constant] = torch.maximum(sizes[constant], sizes[weight])
            self._sizes[rounds_every_op] = sizes
        return self._sizes[rounds_every_op]


def try_backends(
    problem: CheckProblem,
    backends: Mapping[str, AttentionBackend],
    *,
    seconds: float | None = None,
    timer: Callable[[Callable[[], object], torch.device], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[BackendTrial]:
    """Try each backend that supports the problem, in order.

    Args:
        problem: problem to compute.
        backends: backends by name, without those that only forward such calls to another one.
        seconds: time limit after which no further backend is started; `CHECK_SECONDS` if None.
        timer: returns the duration of a pass on a device, in seconds; `time_pass` unless a test replaces it.
        clock: returns a time in seconds.

    Raises:
        DeviceLostError: a backend made the device unusable.
    """
    limit = CHECK_SECONDS if seconds is None else seconds
    deadline = clock() + limit
    try:
        references = [ReferenceResults(problem), ReferenceResults(replace(problem, seed=problem.seed + 1))]
        assert references[0].exact  # before any backend runs, so that a failure here is not attributed to a backend
    except Exception as failure:  # the exact results need memory too
        why = f"was not compared: computing in float64 {_describe_failure(failure)}"
        return [BackendTrial(name, why, is_final=not is_out_of_memory(failure)) for name in backends]
    trials: list[BackendTrial] = []
    for name, backend in backends.items():
        if clock() > deadline:
            why = f"was not tried: the check had taken {limit:.0f} s"
            trials.append(BackendTrial(name, why, is_final=False))
            continue
        try:
            trials.append(_try_backend(references, name, backend, clock))
        except Exception as failure:  # compilers, drivers and libraries can raise anything
            trials.append(BackendTrial(name, _describe_failure(failure), is_final=not is_out_of_memory(failure)))
        free_memory(problem.device)
        if not trials[-1].is_correct and not is_device_usable(problem.device):
            raise DeviceLostError(trials)
    return _time_backends(problem, backends, trials, timer or time_pass, clock)


def _try_backend(
    references: Sequence[ReferenceResults], name: str, backend: AttentionBackend, clock: Callable[[], float]
) -> BackendTrial:
    start_time = clock()
    first_seconds, error_ratios = 0.0, {}
    for reference in references:
        outputs, gradients = reference.problem.run(backend)
        results, is_zero_elsewhere = reference.problem.select_results(outputs, gradients)
        first_seconds = first_seconds or clock() - start_time
        rounds_every_op = any(
            stores_scores_in_compute_type(backend, inputs) for inputs in reference.problem.list_inputs()
        )
        error_ratios = reference.compute_error_ratio(results, is_zero_elsewhere, rounds_every_op=rounds_every_op)
        if is_within_rounding(error_ratios):
            return BackendTrial(name, excess=error_ratios, first_seconds=first_seconds)
        # Rounding may move a hidden value across a kink, which changes a gradient by more than rounding errors. The
        # change is small, and does not recur with other inputs.
        if max(error_ratios.values()) > CERTAIN_ERROR_RATIO:
            break
    worst = max(error_ratios, key=lambda result: error_ratios[result])
    type_name = str(references[0].problem.dtype).removeprefix("torch.")
    why = f"errs in {worst} by {error_ratios[worst]:.3g} times the rounding error of {type_name}"
    return BackendTrial(name, why, excess=error_ratios, first_seconds=first_seconds)


def _time_backends(
    problem: CheckProblem,
    backends: Mapping[str, AttentionBackend],
    trials: list[BackendTrial],
    timer: Callable[[Callable[[], object], torch.device], float],
    clock: Callable[[], float],
) -> list[BackendTrial]:
    """Return the trials with the times of correct backends: medians over rounds in which the backends alternate."""
    passes: dict[str, list[float]] = {trial.backend: [] for trial in trials if trial.is_correct}
    memory: dict[str, float | None] = {}
    failed: dict[str, BackendTrial] = {}
    start_time = clock()
    for round_index in range(MAX_ROUNDS):
        if round_index >= MIN_ROUNDS and clock() - start_time > TIMING_SECONDS:
            break
        for name in [name for name in passes if name not in failed]:
            try:
                before = _reset_peak_memory(problem.device)
                passes[name].append(timer(lambda name=name: problem.run(backends[name]), problem.device))  # type: ignore[misc]
                memory[name] = _read_peak_memory(problem.device, before)
            except Exception as failure:  # as in the first pass
                failed[name] = BackendTrial(name, _describe_failure(failure), is_final=not is_out_of_memory(failure))
    free_memory(problem.device)
    if failed and not is_device_usable(problem.device):
        raise DeviceLostError([*trials, *failed.values()])
    return [
        failed.get(trial.backend, trial)
        if trial.backend in failed or not trial.is_correct
        else replace(trial, milliseconds=1e3 * median(passes[trial.backend]), memory_mb=memory[trial.backend])
        for trial in trials
    ]


def is_device_usable(device: torch.device) -> bool:
    """Return True if the device still works.

    An illegal address, for example, makes it unusable for the whole process.
    """
    try:
        torch.zeros(1, device=device).add_(1)
        _synchronize(device)
    except RuntimeError:
        return False
    return True


def _describe_failure(failure: Exception) -> str:
    if is_out_of_memory(failure):
        return "ran out of memory"
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"raised {type(failure).__name__}: {lines[0][:200]}" if lines else f"raised {type(failure).__name__}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Free memory held by tracebacks and by the allocator, so that the next trial starts with an empty device.

    Nothing is freed on an unusable device, on which every call raises the error that made it unusable.
    """
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def _reset_peak_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _read_peak_memory(device: torch.device, before: int) -> float | None:
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6

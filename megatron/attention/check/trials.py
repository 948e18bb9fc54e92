"""Runs each backend on one problem, holds it to the rounding of its type, and times those that are right.

No failure of a backend is fatal: one that raises, runs out of memory or errs by more than rounding is named and left.
The one exception is an error after which the device itself is of no use to this process: `DeviceLostError`.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from megatron.attention.backends.backend import AttentionBackend
from megatron.attention.backends.registry import rounds_throughout
from megatron.attention.check.evidence import Trial
from megatron.attention.check.problem import CheckProblem
from megatron.utils.rounding import SAFETY_FACTOR, compute_size_ratio, estimate_rounding_sizes

CHECK_SECONDS = 20.0
"""After so many seconds no further backend is begun."""
TIMING_SECONDS = 2.0
"""That the rounds of timing may take together."""
MAX_ROUNDS, MIN_ROUNDS = 10, 2
CERTAIN_EXCESS = 100.0
"""Times the size of rounding errors: a result that errs by more is wrong, one by less is computed once more."""


class DeviceLostError(Exception):
    """A backend left the device in a state in which nothing runs any more: its name and what it raised; `trials` are
    those until then, its own included."""

    def __init__(self, trials: list[Trial]) -> None:
        super().__init__(f"attention by {trials[-1].backend} {trials[-1].refusal}")
        self.trials = trials


def time_pass(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a forward and backward pass, launches included, until the device has done it."""
    _synchronize(device)
    begun = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - begun


def is_within_rounding(excess: Mapping[str, float]) -> bool:
    """Are a backend's results right?

    Args:
        excess: of each result, its error over the size of rounding errors (`compute_excess` of the problem); infinite
            for what is not a number, and where something is not zero that must be.
    """
    return all(ratio <= SAFETY_FACTOR for ratio in excess.values())


class Judge:
    """The exact results of a problem, and the sizes of rounding errors in its type."""

    def __init__(self, problem: CheckProblem) -> None:
        self.problem = problem
        self._sizes: dict[bool, dict[str, Tensor]] = {}

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """The results in float64."""
        return self.problem.compute_exactly()

    def compute_excess(
        self, found: Mapping[str, Tensor], others_are_zero: bool, *, throughout: bool
    ) -> dict[str, float]:
        """Of each result, the error over the size of rounding errors.

        Args:
            found, others_are_zero: `CheckProblem.select_results` of a backend.
            throughout: whether the backend rounds every result to the type (`registry.rounds_throughout`).
        """
        kinds = {name: x.dtype for name, x in found.items()}
        sizes = self._estimate_sizes(kinds, throughout=throughout)
        excess = {
            name: compute_size_ratio(found[name].double().view_as(exact) - exact, sizes[name])
            for name, exact in self.exact.items()
        }
        return excess if others_are_zero else {**excess, "rows without a gradient": float("inf")}

    def _estimate_sizes(self, kinds: Mapping[str, torch.dtype], *, throughout: bool) -> dict[str, Tensor]:
        if throughout not in self._sizes:
            sizes = estimate_rounding_sizes(
                kinds,
                self.exact,
                self.problem.compute_exactly,
                self.problem.dtype,
                stored=True,
                throughout=throughout,
            )
            for constant, weight in self.problem.logit_constants.items():
                sizes[constant] = torch.maximum(sizes[constant], sizes[weight])
            self._sizes[throughout] = sizes
        return self._sizes[throughout]


def try_backends(
    problem: CheckProblem,
    backends: Mapping[str, AttentionBackend],
    *,
    timer: Callable[[Callable[[], object], torch.device], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Trial]:
    """Try each backend that can do the problem, in their order.

    Args:
        problem: what they compute.
        backends: by name; one that only hands such calls to another is not among them.
        timer: seconds of a pass on a device; `time_pass` unless a test gives another.
        clock: seconds since some time.

    Raises:
        DeviceLostError: a backend left the device in a state in which nothing runs any more.
    """
    deadline = clock() + CHECK_SECONDS
    try:
        judges = [Judge(problem), Judge(replace(problem, seed=problem.seed + 1))]
        assert judges[0].exact  # before any backend: where this fails, no backend is to blame
    except Exception as failure:  # the exact results take memory too
        why = f"was not compared: computing in float64 {_describe_failure(failure)}"
        return [Trial(name, why, is_final=not _is_out_of_memory(failure)) for name in backends]
    trials: list[Trial] = []
    for name, backend in backends.items():
        if clock() > deadline:
            why = f"was not tried: the check had taken {CHECK_SECONDS:.0f} s"
            trials.append(Trial(name, why, is_final=False))
            continue
        try:
            trials.append(_try_backend(judges, name, backend, clock))
        except Exception as failure:  # whatever a compiler, a driver or a library may raise
            trials.append(Trial(name, _describe_failure(failure), is_final=not _is_out_of_memory(failure)))
        free_memory(problem.device)
        if not trials[-1].is_right and not is_device_usable(problem.device):
            raise DeviceLostError(trials)
    return _time_backends(problem, backends, trials, timer or time_pass, clock)


def _try_backend(judges: Sequence[Judge], name: str, backend: AttentionBackend, clock: Callable[[], float]) -> Trial:
    begun = clock()
    first_seconds, excess = 0.0, {}
    for judge in judges:
        outputs, gradients = judge.problem.run(backend)
        found, others_are_zero = judge.problem.select_results(outputs, gradients)
        first_seconds = first_seconds or clock() - begun
        throughout = any(rounds_throughout(backend, inputs) for inputs in judge.problem.list_inputs())
        excess = judge.compute_excess(found, others_are_zero, throughout=throughout)
        if is_within_rounding(excess):
            return Trial(name, excess=excess, first_seconds=first_seconds)
        # Rounding may carry a hidden value over a kink, which changes a gradient by more than rounding does. It does
        # not do so by much, nor again for other numbers.
        if max(excess.values()) > CERTAIN_EXCESS:
            break
    worst = max(excess, key=lambda result: excess[result])
    type_name = str(judges[0].problem.dtype).removeprefix("torch.")
    why = f"errs in {worst} by {excess[worst]:.3g} times what rounding in {type_name} gives"
    return Trial(name, why, excess=excess, first_seconds=first_seconds)


def _time_backends(
    problem: CheckProblem,
    backends: Mapping[str, AttentionBackend],
    trials: list[Trial],
    timer: Callable[[Callable[[], object], torch.device], float],
    clock: Callable[[], float],
) -> list[Trial]:
    """The trials of right backends with their times: medians over rounds in which they take turns."""
    passes: dict[str, list[float]] = {trial.backend: [] for trial in trials if trial.is_right}
    memory: dict[str, float | None] = {}
    failed: dict[str, Trial] = {}
    begun = clock()
    for round_index in range(MAX_ROUNDS):
        if round_index >= MIN_ROUNDS and clock() - begun > TIMING_SECONDS:
            break
        for name in [name for name in passes if name not in failed]:
            try:
                before = _reset_peak_memory(problem.device)
                passes[name].append(timer(lambda name=name: problem.run(backends[name]), problem.device))  # type: ignore[misc]
                memory[name] = _read_peak_memory(problem.device, before)
            except Exception as failure:  # as in the first pass
                failed[name] = Trial(name, _describe_failure(failure), is_final=not _is_out_of_memory(failure))
    free_memory(problem.device)
    if failed and not is_device_usable(problem.device):
        raise DeviceLostError([*trials, *failed.values()])
    return [
        failed.get(trial.backend, trial)
        if trial.backend in failed or not trial.is_right
        else replace(trial, milliseconds=1e3 * median(passes[trial.backend]), memory_mb=memory[trial.backend])
        for trial in trials
    ]


def is_device_usable(device: torch.device) -> bool:
    """Does anything still run on the device? An illegal address, for one, ends that for the whole process."""
    try:
        torch.zeros(1, device=device).add_(1)
        _synchronize(device)
    except RuntimeError:
        return False
    return True


def _describe_failure(failure: Exception) -> str:
    if _is_out_of_memory(failure):
        return "ran out of memory"
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"raised {type(failure).__name__}: {lines[0][:200]}" if lines else f"raised {type(failure).__name__}"


def _is_out_of_memory(failure: Exception) -> bool:
    return isinstance(failure, torch.OutOfMemoryError | MemoryError)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """What an error's traceback held and what the allocator keeps, so that each begins with an empty device, and the
    run after them too."""
    gc.collect()
    if device.type == "cuda":
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

"""Profiles of single steps, and snapshots of a GPU's memory, in the run's folder.

    profile/steps_10-12/rank_0.pt.trace.json.gz    what ran when, of torch's profiler: for https://ui.perfetto.dev, or
                                                   `tensorboard --logdir RUN/profile` with torch-tb-profiler
    profile/steps_10-12/rank_0.kernels.txt         the time of each kernel, on a CPU of each operator
    profile/memory_step_12/rank_0.pickle           what holds the memory, with the allocations before: for
                                                   https://docs.pytorch.org/memory_viz
    profile/out_of_memory/rank_0.pickle            the same where it did not suffice

A name that is taken, by an earlier start of the run or by somebody else, is left as it is, and another one found.
The phases of a step (`Watchdog.enter_phase`) are in the traces.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from megatron.config.schema import Config
from megatron.distributed.process_groups import ProcessGroups
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import RunError, describe_cause, is_out_of_memory

PROFILE = "profile"
"""In the run's folder: profiles and snapshots."""
TRACE_SUFFIX, TABLE_SUFFIX, SNAPSHOT_SUFFIX = ".pt.trace.json.gz", ".kernels.txt", ".pickle"
"""The first is the one that TensorBoard's plugin looks for."""
MAX_HISTORY = 100_000
"""Allocations that a snapshot tells of at most, the last ones: hundreds of MB on the host."""
MAX_KERNELS = 100
"""Rows of the table of kernels."""
Log = Callable[[str], None]


def build_profiler(config: Config, groups: ProcessGroups, step: int, log: Log) -> "StepProfiler | None":
    """What records the steps after `step`; None where there is nothing left to record for this rank."""
    logging = config.logging
    is_here = config.checkpoint.save is not None and groups.rank in logging.profile.ranks
    steps = range(max(logging.profile.steps.start, step + 1), logging.profile.steps.stop)
    snapshot = logging.memory_snapshot
    if not is_here or not (steps or (snapshot is not None and snapshot > step)):
        return None
    folder = Path(config.checkpoint.save or "") / PROFILE
    return StepProfiler(
        folder, groups, steps, snapshot, first_step=step + 1, log=log, with_stack=logging.profile.with_stack
    )


def begin_memory_history(config: Config, groups: ProcessGroups, step: int) -> None:
    """Record this rank's allocations from now on, if a snapshot is asked for that is still to come. The device is
    this process's already."""
    snapshot, ranks = config.logging.memory_snapshot, config.logging.profile.ranks
    if groups.device.type == "cuda" and snapshot is not None and snapshot > step and groups.rank in ranks:
        torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY)


@contextmanager
def dump_memory_if_exhausted(config: Config, rank: int) -> Iterator[None]:
    """Write a snapshot if a GPU's memory does not suffice for what is done, while all that holds it is still there. A
    note of the error says where it is."""
    try:
        yield
    except RuntimeError as error:
        if config.checkpoint.save is not None and is_out_of_memory(error) and torch.cuda.is_initialized():
            with suppress(OSError, RuntimeError):  # which would hide the error
                path = _find_free_path(Path(config.checkpoint.save) / PROFILE / "out_of_memory", rank, SNAPSHOT_SUFFIX)
                _dump_snapshot(path)
                error.add_note(f"what held the memory of rank {rank} is in {path}")
        raise


class StepProfiler:
    """Records some steps of a rank. `begin_step` and `end_step` stand around every step, whether it is recorded or not.

    Args:
        folder: for what is recorded.
        groups: of the run.
        steps: to profile, counted from 1.
        snapshot: after which step the memory is written down; None: after none.
        first_step: the first that will be taken.
        log: gets a line for each file.
        with_stack: do traces say which lines of Python issued what?
    """

    def __init__(
        self, folder: Path, groups: ProcessGroups, steps: range, snapshot: int | None, *, first_step: int, log: Log,
        with_stack: bool = False,
    ) -> None:  # fmt: skip
        self._folder, self._groups, self._steps, self._snapshot, self._log = folder, groups, steps, snapshot, log
        self._with_stack = with_stack
        # The step before lets the tracer start; without one the first kernels are slower.
        self._start = max(first_step, steps.start - 1)
        self._profile: profile | None = None
        self._phase: record_function | None = None
        self._last_step, self._start_time = first_step - 1, 0.0

    def begin_step(self, step: int) -> None:
        """A step begins."""
        if self._profile is not None:
            self._profile.step()
        elif self._steps and step == self._start:
            self._profile = self._start_profile(step)
        if step == self._steps.start:
            self._start_time = time.perf_counter()

    def enter_phase(self, phase: str, step: int) -> None:
        """A phase of a step begins (`PhaseListener`)."""
        self._leave_phase()
        if self._profile is not None:
            self._phase = record_function(phase)
            self._phase.__enter__()

    def end_step(self, step: int) -> None:
        """A step is over; what was recorded is written if it was the last.

        Raises:
            RunError: the disk refuses.
        """
        self._leave_phase()
        self._last_step = step
        if self._profile is not None and step == self._steps[-1]:
            self._end_profile()
        if step == self._snapshot and self._groups.device.type == "cuda":
            path = self._write(f"memory_step_{step}", SNAPSHOT_SUFFIX, _dump_snapshot)
            self._log(f"step {step}: what holds the memory of rank {self._groups.rank} is in {path}")
            torch.cuda.memory._record_memory_history(enabled=None)
            self._snapshot = None

    def close(self) -> None:
        """The run ends, perhaps within the steps to profile: those that were are written."""
        self._leave_phase()
        if self._profile is not None and self._last_step >= self._steps.start:
            with suppress(RunError):  # whatever ends the run is told
                self._end_profile()
        elif self._profile is not None:
            self._profile.stop()
            self._profile = None
        if self._snapshot is not None and self._groups.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start_profile(self, step: int) -> profile:
        is_cuda = self._groups.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]

        def choose_action(number: int) -> ProfilerAction:
            return ProfilerAction.WARMUP if number < self._steps.start else ProfilerAction.RECORD

        profiler = profile(
            activities=activities, schedule=choose_action, record_shapes=True, with_stack=self._with_stack
        )
        # Steps are named in the trace as in the log.
        profiler.step_num = step
        profiler.current_action = choose_action(step)  # type: ignore[assignment]
        profiler.start()
        return profiler

    def _end_profile(self) -> None:
        """Write what was recorded up to this step."""
        assert self._profile is not None
        profiler, self._profile = self._profile, None
        if self._groups.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start_time
        profiler.stop()
        steps = range(self._steps.start, self._last_step + 1)
        name = f"steps_{steps.start}-{self._last_step}"
        trace = self._write(name, TRACE_SUFFIX, lambda path: profiler.export_chrome_trace(str(path)))
        table = format_kernels(profiler.key_averages(), steps, seconds, on_device=self._groups.device.type == "cuda")
        self._write(name, TABLE_SUFFIX, lambda path: write_text_atomically(path, table))
        self._log(f"step {self._last_step}: {table.partition(chr(10))[0]}; {trace}")

    def _write(self, name: str, suffix: str, write: Callable[[Path], object]) -> Path:
        path = self._folder / name
        try:
            path = _find_free_path(path, self._groups.rank, suffix)
            write(path)
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({describe_cause(error)})") from None
        return path

    def _leave_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None


def format_kernels(averages: Sequence[Any], steps: range, seconds: float, *, on_device: bool) -> str:
    """A table of the kernels of some steps, or of the operators on a CPU, those that took longest first.

    Args:
        averages: of torch's profiler, by name (`key_averages`).
        steps: that were profiled, which took so many `seconds` under the profiler.
        on_device: kernels of a GPU rather than operators of the CPU, if there are any: a machine may not let them be
            traced.
    """
    rows = _list_rows(averages, on_device)
    unit, missing = "kernel" if on_device else "operator", ""
    if on_device and not rows:
        rows, unit = _list_rows(averages, False), "operator"
        missing = "; kernels could not be traced (CUPTI), so these are the host's"
    total = sum(row[0] for row in rows)
    head = (
        f"steps {steps.start} to {steps.stop - 1}, {1e3 * seconds / len(steps):,.1f} ms per step under the profiler, "
        f"{total / 1e3 / len(steps):,.1f} ms of it in {unit}s{missing}"
    )
    lines = [head, "", f"{'ms per step':>12} {'share':>6} {'calls per step':>14} {'µs per call':>12}  {unit}"]
    for microseconds, count, name in rows[:MAX_KERNELS]:
        lines.append(
            f"{microseconds / 1e3 / len(steps):>12,.3f} {microseconds / total:>6.1%} {count / len(steps):>14,.1f} "
            f"{microseconds / count:>12,.1f}  {name}"
        )
    if len(rows) > MAX_KERNELS:
        rest = sum(row[0] for row in rows[MAX_KERNELS:])
        others = f"{len(rows) - MAX_KERNELS} others"
        lines.append(f"{rest / 1e3 / len(steps):>12,.3f} {rest / total:>6.1%} {'':>14} {'':>12}  {others}")
    return "\n".join(lines) + "\n"


def _list_rows(averages: Sequence[Any], on_device: bool) -> list[tuple[float, int, str]]:
    """Microseconds, calls and name of each kernel, or of each operator of the host, the longest first."""
    rows: list[tuple[float, int, str]] = []
    for average in averages:
        if average.is_user_annotation or (average.device_type == DeviceType.CUDA) != on_device:
            continue
        microseconds = average.self_device_time_total if on_device else average.self_cpu_time_total
        if microseconds > 0 and not average.key.startswith("ProfilerStep#"):
            rows.append((microseconds, average.count, average.key))
    return sorted(rows, reverse=True)


def _dump_snapshot(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    torch.cuda.memory._dump_snapshot(str(temporary))
    os.replace(temporary, path)


def _find_free_path(folder: Path, rank: int, suffix: str) -> Path:
    """A name of a rank's that nobody has: TensorBoard takes the number in it for that of a later profile."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"rank_{rank}{'' if number == 1 else f'.{number}'}{suffix}" for number in itertools.count(1))
    return next(path for name in names if not (path := folder / name).exists())

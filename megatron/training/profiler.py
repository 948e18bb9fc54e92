"""Profiles of single steps, and snapshots of a GPU's memory, in the run's folder.

    profile/steps_10-12/rank_0.pt.trace.json.gz    trace of torch's profiler, for https://ui.perfetto.dev or
                                                   `tensorboard --logdir RUN/profile` with torch-tb-profiler
    profile/steps_10-12/rank_0.kernels.txt         time of each kernel, or of each operator on a CPU
    profile/memory_step_12/rank_0.pickle           allocated memory, with the allocation history, for
                                                   https://docs.pytorch.org/memory_viz
    profile/out_of_memory/rank_0.pickle            the same after an out-of-memory error

Existing files are never overwritten; a new file gets an unused name. The traces include the phases of a step
(`Watchdog.enter_phase`).
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
"""Subfolder of the run's folder for profiles and snapshots."""
TRACE_SUFFIX, TABLE_SUFFIX, SNAPSHOT_SUFFIX = ".pt.trace.json.gz", ".kernels.txt", ".pickle"
"""Suffixes of the files; TensorBoard's plugin looks for the first one."""
MAX_HISTORY = 100_000
"""Maximum number of allocations in the history of a snapshot, the last ones: hundreds of MB on the host."""
MAX_KERNELS = 100
"""Maximum number of rows in the table of kernels."""
Log = Callable[[str], None]


def build_profiler(config: Config, groups: ProcessGroups, step: int, log: Log) -> "StepProfiler | None":
    """Build the profiler for the steps after `step`, or return None if this rank has nothing left to record."""
    logging = config.logging
    is_profiled = config.checkpoint.save is not None and groups.rank in logging.profile.ranks
    steps = range(max(logging.profile.steps.start, step + 1), logging.profile.steps.stop)
    snapshot = logging.memory_snapshot
    if not is_profiled or not (steps or (snapshot is not None and snapshot > step)):
        return None
    folder = Path(config.checkpoint.save or "") / PROFILE
    return StepProfiler(
        folder, groups, steps, snapshot, first_step=step + 1, log=log, with_stack=logging.profile.with_stack
    )


def begin_memory_history(config: Config, groups: ProcessGroups, step: int) -> None:
    """Start to record this rank's allocations if a memory snapshot is still to come.

    This process must have selected its device before.
    """
    snapshot, ranks = config.logging.memory_snapshot, config.logging.profile.ranks
    if groups.device.type == "cuda" and snapshot is not None and snapshot > step and groups.rank in ranks:
        torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY)


@contextmanager
def dump_memory_if_exhausted(config: Config, rank: int) -> Iterator[None]:
    """Write a memory snapshot if a GPU runs out of memory, while the memory is still allocated.

    A note on the error gives the path of the snapshot.
    """
    try:
        yield
    except RuntimeError as error:
        if config.checkpoint.save is not None and is_out_of_memory(error) and torch.cuda.is_initialized():
            with suppress(OSError, RuntimeError):  # a second error would hide the first
                path = _find_free_path(Path(config.checkpoint.save) / PROFILE / "out_of_memory", rank, SNAPSHOT_SUFFIX)
                _dump_snapshot(path)
                error.add_note(f"memory snapshot of rank {rank}: {path}")
        raise


class StepProfiler:
    """Profiler of selected steps of a rank. Call `begin_step` and `end_step` around every step, recorded or not.

    Args:
        folder: folder for the files.
        groups: process groups of the run.
        steps: steps to profile, counted from 1.
        snapshot: step after which a memory snapshot is written; None for no snapshot.
        first_step: first step that will be taken.
        log: called with a line for each file.
        with_stack: True if traces include the Python stack of each operation.
    """

    def __init__(
        self, folder: Path, groups: ProcessGroups, steps: range, snapshot: int | None, *, first_step: int, log: Log,
        with_stack: bool = False,
    ) -> None:  # fmt: skip
        self._folder, self._groups, self._steps, self._snapshot, self._log = folder, groups, steps, snapshot, log
        self._with_stack = with_stack
        # The step before warms up the tracer; otherwise the first kernels are slower.
        self._start = max(first_step, steps.start - 1)
        self._profile: profile | None = None
        self._phase: record_function | None = None
        self._last_step, self._start_time = first_step - 1, 0.0

    def begin_step(self, step: int) -> None:
        """Start a step."""
        if self._profile is not None:
            self._profile.step()
        elif self._steps and step == self._start:
            self._profile = self._start_profile(step)
        if step == self._steps.start:
            self._start_time = time.perf_counter()

    def enter_phase(self, phase: str, step: int) -> None:
        """Start a phase of a step (`PhaseListener`)."""
        self._leave_phase()
        if self._profile is not None:
            self._phase = record_function(phase)
            self._phase.__enter__()

    def end_step(self, step: int) -> None:
        """End a step, and write the profile after the last recorded one.

        Raises:
            RunError: if a file cannot be written.
        """
        self._leave_phase()
        self._last_step = step
        if self._profile is not None and step == self._steps[-1]:
            self._end_profile()
        if step == self._snapshot and self._groups.device.type == "cuda":
            path = self._write(f"memory_step_{step}", SNAPSHOT_SUFFIX, _dump_snapshot)
            self._log(f"step {step}: wrote the memory snapshot of rank {self._groups.rank} to {path}")
            torch.cuda.memory._record_memory_history(enabled=None)
            self._snapshot = None

    def close(self) -> None:
        """Write what was recorded if the run ends within the profiled steps."""
        self._leave_phase()
        if self._profile is not None and self._last_step >= self._steps.start:
            with suppress(RunError):  # the error that ends the run takes precedence
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
        # Number the steps in the trace as in the log.
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
    """Format a table of the kernels of some steps, or of the operators on a CPU, the slowest first.

    Args:
        averages: averages of torch's profiler by name (`key_averages`).
        steps: profiled steps.
        seconds: duration of all these steps under the profiler.
        on_device: True to list the kernels of a GPU instead of CPU operators. Operators are listed if the machine
            does not allow kernels to be traced.
    """
    rows = _list_rows(averages, on_device)
    unit, missing = "kernel" if on_device else "operator", ""
    if on_device and not rows:
        rows, unit = _list_rows(averages, False), "operator"
        missing = "; kernels could not be traced (CUPTI), so these are host operators"
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
    """Return microseconds, calls and name of each kernel, or of each host operator, the slowest first."""
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
    """Return an unused file name for a rank. TensorBoard reads the number in it as the number of a later profile."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"rank_{rank}{'' if number == 1 else f'.{number}'}{suffix}" for number in itertools.count(1))
    return next(path for name in names if not (path := folder / name).exists())

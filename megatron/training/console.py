"""Progress of a run on the console: a progress bar on a terminal, and one line per interval everywhere."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, TextColumn

from megatron.training.metrics_log import TaskRecord, TrainRecord, ValidationRecord
from megatron.utils.formatting import (
    format_approximate_duration,
    format_decimal,
    format_duration,
    format_flops_per_second,
    format_quantity,
)
from megatron.utils.progress import build_progress_bar

QUIET_SECONDS = 10.0
"""Seconds without output after which, without a progress bar, the first steps and a validation print their progress."""
WARMUP_SECONDS = 5.0
"""Seconds of training before the first steps are used to estimate the speed of the run."""


MIN_WAIT = 0.05
"""Minimum fraction of the time for a wait to be reported."""
MIN_SLOWDOWN = 0.1
"""Minimum relative slowdown for a slow rank to be reported."""


def describe_waits(record: TrainRecord) -> list[str]:
    """List the waits of training that are long enough to report: for data, for checkpoints, and for a slower rank."""
    waits = []
    if record.data_wait >= MIN_WAIT:
        rank = "" if record.data_wait_rank is None else f" (rank {record.data_wait_rank})"
        waits.append(f"data {record.data_wait:.0%}{rank}")
    if record.checkpoint_wait >= MIN_WAIT:
        waits.append(f"checkpoint {record.checkpoint_wait:.0%}")
    if record.slowest_rank_wait >= MIN_WAIT and (record.slowdown or 0.0) >= MIN_SLOWDOWN:
        waits.append(f"rank {record.slowest_rank} is {record.slowdown:.0%} slower")
    return waits


def format_train_record(record: TrainRecord, train_iters: int) -> str:
    """Format one interval as one line, without values that carry no information (no loss scale, no skipped steps)."""
    width = len(str(train_iters))
    parts = [f"step {record.step:>{width}}/{train_iters}"]
    if record.loss is not None and record.perplexity is not None:
        parts += [f"loss {format_decimal(record.loss, 4)}", f"ppl {format_decimal(record.perplexity, 2)}"]
    else:
        parts.append("loss –")
    if record.z_loss is not None:
        parts.append(f"z-loss {record.z_loss:.2e}")
    parts.append(f"lr {record.learning_rate:.2e}")
    if record.grad_norm is not None:
        parts.append(f"grad {format_decimal(record.grad_norm, 2)}")
    parts += [
        f"{record.tokens_per_second:,.0f} tok/s",
        f"{record.ms_per_step:,.1f} ms",
        format_flops_per_second(record.tflops),
    ]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    if record.loss_scale != 1.0:
        parts.append(f"scale {record.loss_scale:g}")
    if record.skipped_steps:
        parts.append(f"skipped {record.skipped_steps}")
    parts += describe_waits(record)
    parts.append(f"{record.memory_gib:.2f} GiB")
    if record.step < train_iters:
        parts.append(f"{format_duration(record.seconds_left)} left")
    return "  ".join(parts)


def format_norms(record: TrainRecord) -> str | None:
    """Format the norms of an interval as one line, or return None if not measured.

    Each norm is followed by that of the last update.
    """
    if record.param_norm is None or record.update_norm is None:
        return None
    updates = record.update_norm
    norms = (f"{label} {norm:.4g} ({updates[label]:.2e})" for label, norm in record.param_norm.items())
    return f"norms of parameters (and their last update): {', '.join(norms)}"


def format_validation_record(record: ValidationRecord, train_iters: int) -> str:
    """Format one validation as one line."""
    width = len(str(train_iters))
    return (
        f"step {record.step:>{width}}/{train_iters}  {record.split} loss {record.loss:.4f}  "
        f"ppl {format_decimal(record.perplexity, 2)}  {record.tokens:,} tokens in {record.seconds:.1f} s"
    )


def format_task_record(record: TaskRecord, train_iters: int) -> str:
    """Format the evaluation on a task as one line, with standard errors in parentheses."""
    width = len(str(train_iters))
    values = [
        f"{name} {value:.4g}" + (f" ({record.stderrs[name]:.2g})" if name in record.stderrs else "")
        for name, value in record.values.items()
    ]
    return (
        f"step {record.step:>{width}}/{train_iters}  {record.task} {'  '.join(values) or 'has no values'}  "
        f"{format_quantity(record.requests, 'request')}"
    )


class ConsoleReporter:
    """Reporter that prints lines, and on a terminal keeps a progress bar below them.

    Args:
        console: output console; None prints nothing.
        train_iters: last step of the run.
        clock: function that returns the time in seconds; replaced in tests.
    """

    def __init__(
        self, console: Console | None, train_iters: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.train_iters = console, train_iters
        self._clock = clock
        self._start_time = self._last_line_time = 0.0
        self._first_step = self._step = 0  # start of the speed measurement, and last finished step
        self._is_warm = False  # True once the first, slower step is excluded from the measurement
        self._estimate: float | None = None  # seconds; shown until a measured time replaces it
        self._has_record = False  # True once an interval line has reported the speed
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            self._bar = build_progress_bar(console, TextColumn("{task.fields[step]}/{task.total:.0f}"))
            self._task = self._bar.add_task("training", total=train_iters, left="", step=0)

    def log(self, line: str) -> None:
        """Print one line."""
        self._last_line_time = self._clock()
        if self.console is not None:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _log_progress(self, line: str) -> None:
        """Print a line if there is no progress bar and nothing was printed for a while."""
        if self._bar is None and self._clock() - self._last_line_time >= QUIET_SECONDS:
            self.log(line)

    def begin(self, step: int, estimate: float | None = None) -> None:
        """Start training after `step` steps and start the clock for the time left.

        `estimate` is the expected duration of the rest, in seconds. It is shown until the first steps allow a better
        one.
        """
        self._first_step = self._step = step
        self._start_time = self._last_line_time = self._clock()
        self._is_warm, self._estimate = False, estimate
        if self._bar is not None:
            left = "" if estimate is None else f"{format_approximate_duration(estimate)} left"
            self._bar.update(self._task, completed=step, total=self.train_iters, step=step, left=left)
            self._bar.start()

    def report_micro_step(self, done: int, total: int) -> None:
        """Report that `done` of the `total` micro-batches of the next step are finished."""
        if self._bar is not None and done < total:
            self._bar.update(self._task, description=f"training {done}/{total}", completed=self._step + done / total)
        if not self._has_record and 0 < done < total:
            self._log_progress(f"step {self._step + 1}/{self.train_iters}: {done} of {total} micro-batches")

    def report_step(self, step: int) -> None:
        """Report that a step is finished."""
        self._step = step
        now = self._clock()
        left = (now - self._start_time) / max(1, step - self._first_step) * (self.train_iters - step)
        if self._bar is not None:
            self._bar.update(
                self._task, description="training", completed=step, step=step, left=f"{format_duration(left)} left"
            )
        if not self._is_warm:
            self._first_step, self._start_time, self._is_warm = step, now, True
        elif self._estimate is not None and now - self._start_time >= WARMUP_SECONDS:
            self._estimate = None
            self.log(f"{format_approximate_duration(left)} left, estimated from the first steps")
        if not self._has_record:
            time_left = f", {format_approximate_duration(left)} left" if step > self._first_step else ""
            self._log_progress(f"step {step}/{self.train_iters} is done{time_left}")

    def show_validation(self, split: str, done: int, total: int, unit: str = "batches") -> None:
        """Report that `done` of the `total` batches of a validation, or requests of tasks, are finished; 0 starts."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{split} {done}/{total}" if done < total else "training")
        if done == 0:
            self._last_line_time = self._clock()
        elif done < total:
            self._log_progress(f"{split}: {done} of {total} {unit}")

    def report_training(self, record: TrainRecord) -> None:
        self._estimate, self._has_record = None, True  # this line reports the time left as well
        self.log(format_train_record(record, self.train_iters))
        if (norms := format_norms(record)) is not None:
            self.log(norms)

    def report_validation(self, record: ValidationRecord | TaskRecord) -> None:
        if isinstance(record, TaskRecord):
            self.log(format_task_record(record, self.train_iters))
        else:
            self.log(format_validation_record(record, self.train_iters))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

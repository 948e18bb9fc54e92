"""The run on the user's console: a bar with the time left on a terminal, and one tidy line per interval anywhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megatron.training.metrics import EvaluationRecord, TrainRecord


def duration(seconds: float) -> str:
    """0:07, 12:05, 3:04:00."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def train_line(record: TrainRecord, train_iters: int) -> str:
    """One interval in one line; what is not worth a word (no loss scale, nothing skipped) is left out."""
    width = len(str(train_iters))
    parts = [f"step {record.step:>{width}}/{train_iters}"]
    if record.loss is not None and record.perplexity is not None:
        parts += [f"loss {record.loss:.4f}", f"ppl {record.perplexity:.2f}"]
    else:
        parts.append("loss –")
    parts.append(f"lr {record.learning_rate:.2e}")
    if record.grad_norm is not None:
        parts.append(f"grad {record.grad_norm:.2f}")
    parts += [f"{record.tokens_per_second:,.0f} tok/s", f"{record.ms_per_step:,.1f} ms", f"{record.tflops:.3g} TFLOP/s"]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    if record.loss_scale != 1.0:
        parts.append(f"scale {record.loss_scale:g}")
    if record.skipped_steps:
        parts.append(f"skipped {record.skipped_steps}")
    parts.append(f"{record.memory_gib:.2f} GiB")
    if record.step < train_iters:
        parts.append(f"{duration(record.seconds_left)} left")
    return "  ".join(parts)


def evaluation_line(record: EvaluationRecord, train_iters: int) -> str:
    """One validation in one line."""
    width = len(str(train_iters))
    return (
        f"step {record.step:>{width}}/{train_iters}  {record.split} loss {record.loss:.4f}  "
        f"ppl {record.perplexity:.2f}  {record.tokens:,} tokens in {record.seconds:.1f} s"
    )


class ConsoleReporter:
    """Prints lines, and on a terminal keeps a bar below them. `console` None prints nothing."""

    def __init__(self, console: Console | None, train_iters: int) -> None:
        self.console, self.train_iters = console, train_iters
        self._first, self._begun = 0, 0.0
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("[cyan]{task.fields[left]}"),
                console=console,
                transient=True,
                expand=True,
            )
            self._task = self._bar.add_task("", total=train_iters, left="")

    def say(self, line: str) -> None:
        """A line of its own."""
        if self.console is not None:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, step: int) -> None:
        """Training begins after `step` steps: the time left is counted from here."""
        self._first, self._begun = step, time.monotonic()
        if self._bar is not None:
            self._bar.start()

    def step(self, step: int) -> None:
        """A step is done."""
        if self._bar is not None:
            spent = time.monotonic() - self._begun
            left = spent / max(1, step - self._first) * (self.train_iters - step)
            self._bar.update(self._task, completed=step, left=f"{duration(left)} left")

    def train(self, record: TrainRecord) -> None:
        self.say(train_line(record, self.train_iters))

    def evaluation(self, record: EvaluationRecord) -> None:
        self.say(evaluation_line(record, self.train_iters))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

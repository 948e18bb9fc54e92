"""Progress display for a list of jobs, with an estimate of the remaining time of all of them.

The estimate is made per job: its remaining startup time, plus its remaining work divided by its speed. A job's own
values are used once work has been observed twice, so that startup and work can be separated. Before that, the values of
other jobs of its kind are used, or of any job. Values of the kind still count for a short time afterwards. Work can be
in any unit that is comparable within a kind (FLOPs here). An estimate is therefore inaccurate only if speeds differ
within a kind, and corrects itself when that job runs. A job's speed is a median over parts of its work, so one pause
does not move the estimate. If several jobs run at once, the remaining time is divided among them.

On a terminal this is a progress bar. In a pipe or a log file, plain lines are printed at the start of each job and
every few seconds, also during long pauses. The control characters of a bar would fill the file.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from megatron.utils.formatting import format_duration

IMPORTING = "importing PyTorch"
"""Message shown while PyTorch is imported, if that takes long."""

MAX_OBSERVATIONS = 17
"""Observations kept of a job. Every other one is dropped beyond, so that intervals grow and include regular pauses."""

PRIOR_WORK_FRACTION = 0.05
"""Fraction of a job's work after which its own speed counts as much as that of others."""


@dataclass
class WorkItem:
    """Job with an amount of work, and its progress."""

    name: str
    kind: str
    work: float
    done: float = 0.0
    seconds: float = 0.0  # elapsed so far
    observations: list[tuple[float, float]] = field(default_factory=list)
    """Done and seconds at the first observed work and at later points; at most `MAX_OBSERVATIONS`."""

    def advance(self, done: float, seconds: float) -> None:
        """Record the work done after a number of seconds."""
        self.done, self.seconds = done, seconds
        if done > 0 and (not self.observations or done > self.observations[-1][0]):
            self.observations.append((done, seconds))
            if len(self.observations) > MAX_OBSERVATIONS:
                del self.observations[1:-1:2]
        elif len(self.observations) > 1:
            self.observations[-1] = (self.observations[-1][0], seconds)  # time without progress, such as saving

    @property
    def is_measured(self) -> bool:
        """True if work has been observed twice, so that startup and work can be separated."""
        return self._speed is not None

    @property
    def _speed(self) -> float | None:
        """Median of the speeds between observations, weighted by their work, or None without two observations.

        Unlike a mean, it does not follow a single pause.
        """
        intervals = [
            (done - done_before, seconds - seconds_before)
            for (done_before, seconds_before), (done, seconds) in pairwise(self.observations)
            if seconds > seconds_before
        ]
        return compute_weighted_median([(done / seconds, done) for done, seconds in intervals]) if intervals else None

    @property
    def is_finished(self) -> bool:
        return self.done >= self.work

    @property
    def throughput(self) -> "Throughput | None":
        """Throughput of this job, or None if it is not known yet.

        A job that finished before work was observed twice is too short to separate startup from work: all of its time
        counts as work.
        """
        if (speed := self._speed) is not None:
            done, seconds = self.observations[0]
            return Throughput(max(0.0, seconds - done / speed), speed)
        if self.is_finished and self.done > 0 and self.seconds > 0:
            return Throughput(0.0, self.done / self.seconds)
        return None


@dataclass(frozen=True)
class Throughput:
    """Startup time and speed of jobs."""

    start: float  # seconds before the first work
    speed: float  # work per second afterwards


@dataclass
class _MeasuredWork:
    """Sums over the measurements of several jobs, from which a job can be subtracted again."""

    num_jobs: int = 0
    done: float = 0.0
    seconds: float = 0.0  # duration of all work, without startup
    start: float = 0.0  # startup of all jobs, in seconds

    def add(self, job: WorkItem, throughput: Throughput, sign: int = 1) -> None:
        """Add a job, or subtract it with sign -1."""
        self.num_jobs += sign
        self.done += sign * job.done
        self.seconds += sign * job.done / throughput.speed
        self.start += sign * throughput.start

    @property
    def throughput(self) -> Throughput | None:
        """Mean startup time, and total work per total time; None without a job."""
        if self.num_jobs == 0:
            return None
        return Throughput(self.start / self.num_jobs, self.done / self.seconds)


def estimate_seconds_left(jobs: Sequence[WorkItem], at_once: int = 1) -> float | None:
    """Estimate the remaining time of all jobs, or None if no speed is known yet.

    The time is linear in the number of jobs.

    Args:
        at_once: number of jobs that run at the same time, each at the observed speed. The last ones are assumed to end
            together, without waiting for each other.
    """
    measured = {id(job): throughput for job in jobs if (throughput := job.throughput) is not None}
    everything, by_kind = _MeasuredWork(), defaultdict[str, _MeasuredWork](_MeasuredWork)
    for job in jobs:
        if id(job) in measured:
            everything.add(job, measured[id(job)])
            by_kind[job.kind].add(job, measured[id(job)])
    left = longest = 0.0
    for job in jobs:
        if job.is_finished:
            continue
        others, own = by_kind[job.kind], measured.get(id(job))
        if own is not None:
            others = replace(others)
            others.add(job, own, -1)
        throughput = _blend_estimates(job, own, others.throughput) or others.throughput or everything.throughput
        if throughput is None:
            return None
        start = 0.0 if job.done > 0 else max(0.0, throughput.start - job.seconds)
        seconds = start + (job.work - job.done) / throughput.speed
        left, longest = left + seconds, max(longest, seconds)
    return max(left / at_once, longest)


def _blend_estimates(job: WorkItem, own: Throughput | None, kind_throughput: Throughput | None) -> Throughput | None:
    """Blend a job's throughput with that of its kind, because a speed measured over a short interval is mostly noise.

    The result is as if `PRIOR_WORK_FRACTION` of its work had run at the kind's speed.
    """
    if own is None or kind_throughput is None or not job.observations:
        return own
    done = job.done - job.observations[0][0]
    prior_work = PRIOR_WORK_FRACTION * job.work
    return Throughput(own.start, (done + prior_work) / (done / own.speed + prior_work / kind_throughput.speed))


def compute_weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the median of values with weights, given as (value, weight): half of the weight is on each side."""
    ordered = sorted(values)
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for index, (value, weight) in enumerate(ordered):
        below += weight
        if below == half and index + 1 < len(ordered):
            return (value + ordered[index + 1][0]) / 2
        if below > half:
            return value
    return ordered[-1][0]


def build_progress_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """Build a bar of the terminal's width that disappears when it stops.

    It shows the description, the bar, `columns`, and the remaining time.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        *columns,
        TextColumn("[cyan]{task.fields[left]}"),
        console=console,
        expand=True,
        transient=True,
    )


class ProgressMeter:
    """Progress display of jobs that run one after another, or several at once.

    Args:
        console: console to show it on; None shows nothing.
        jobs: all jobs, in order.
        clock: returns a time in seconds; for tests.
        interval: minimum seconds between plain lines.
        forecast: called once with the remaining seconds, when the speed of a job has first been measured.
        at_once: number of jobs that run at the same time.
    """

    def __init__(
        self,
        console: Console | None,
        jobs: Sequence[WorkItem],
        *,
        clock: Callable[[], float] = time.monotonic,
        interval: float = 8.0,
        forecast: Callable[[float], None] | None = None,
        at_once: int = 1,
    ) -> None:
        self.console, self.jobs, self.at_once = console, list(jobs), at_once
        self._forecast = forecast
        self._clock, self._interval = clock, interval
        self._current: WorkItem | None = None
        self._detail = ""
        self._printed_at = self._updated_at = clock()
        self._since: dict[str, float] = {}  # start times by name of started jobs
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            self._bar = build_progress_bar(console, TaskProgressColumn(), TimeElapsedColumn())
            self._task = self._bar.add_task("", total=1.0, left="")

    def __enter__(self) -> "ProgressMeter":
        if self._bar is not None:
            self._bar.start()
        elif self.console is not None:
            threading.Thread(target=self._print_plain_line, name="progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over.set()
        if self._bar is not None:
            self._bar.stop()

    def begin(self, job: WorkItem, detail: str = "") -> None:
        """Start a job. Time from here on counts for its speed."""
        with self._lock:
            self._current, self._since[job.name] = job, self._clock() - job.seconds
            self._detail, self._updated_at = detail, self._clock()
            self._show(is_start=True)

    def update(self, done: float, detail: str = "", job: WorkItem | None = None) -> None:
        """Update the work done by a job: the one started last, or another started job."""
        with self._lock:
            self._current = job or self._current
            assert self._current is not None
            self._current.advance(done, self._clock() - self._since[self._current.name])
            self._detail, self._updated_at = detail, self._clock()
            if self._forecast is not None and self._current.is_measured:
                forecast, self._forecast = self._forecast, None
                left = self.estimate_seconds_left()
                assert left is not None  # the speed of this job is known
                forecast(left)
            self._show(is_start=False)

    def estimate_seconds_left(self) -> float | None:
        """Estimate the remaining time of all jobs in seconds, or None if no speed is known yet."""
        return estimate_seconds_left(self.jobs, self.at_once)

    def report_stage(self, stage: str, done: int, total: int) -> None:
        """Report the steps done in a stage of the current job. Each stage counts as the whole job.

        The first job starts with its first stage, unless a job was started before.
        """
        if self._current is None:
            self.begin(self.jobs[0], stage)
        assert self._current is not None
        self.update(self._current.work * done / max(total, 1), stage)

    def finish(self, job: WorkItem | None = None) -> None:
        """Finish a job: the one started last, or another."""
        job = job or self._current
        assert job is not None
        self.update(job.work, job=job)

    def skip(self, job: WorkItem) -> None:
        """Skip a job that is already done: it takes no time and does not count for the speed."""
        job.work = job.done = 0.0

    def log(self, line: str) -> None:
        """Print a line without disturbing the bar."""
        if self.console is not None:
            self.console.print(escape(line), highlight=False, soft_wrap=True)

    def _print_plain_line(self) -> None:
        """Print plain lines while no work is reported."""
        while not self._over.wait(min(1.0, self._interval / 4)):
            with self._lock:
                if not self._over.is_set():
                    self._show(is_start=False)

    def _describe_time(self, left: float | None, *, is_start: bool) -> str:
        """Describe the remaining time, or else the elapsed time of the current job; empty at its start.

        left: estimate of the remaining time at the last report of work, or None if unknown.
        """
        assert self._current is not None
        if all(job.is_finished for job in self.jobs):
            return "done"
        now = self._clock()
        # If work exceeds its estimate, its remaining time is unknown.
        left = None if left is None else left - (now - self._updated_at)
        if left is not None and left > 0:
            # With several jobs, the time is for all of them, not for the one shown.
            return f"about {format_duration(left)} left{' in total' if len(self.jobs) > 1 else ''}"
        if is_start or self._bar is not None:  # a bar has a column for the elapsed time
            return ""
        return format_duration(now - self._since[self._current.name])

    def _show(self, *, is_start: bool) -> None:
        job = self._current
        if job is None or self.console is None:
            return
        is_due = is_start or self._clock() - self._printed_at >= self._interval
        if self._bar is None and not is_due:
            return
        left = self.estimate_seconds_left()
        time_text = self._describe_time(left, is_start=is_start)
        text = f"{job.name}: {self._detail}" if self._detail else job.name
        if self._bar is not None:
            spent = sum(item.seconds for item in self.jobs) / self.at_once
            fraction = 0.0 if left is None or spent + left == 0 else spent / (spent + left)
            self._bar.update(self._task, description=escape(text), completed=fraction, left=time_text)
        else:
            self._printed_at = self._clock()
            line = f"{text} ({time_text})" if time_text else text
            self.console.print(escape(line), highlight=False, soft_wrap=True)


class WaitAnnouncer:
    """Announcement of a long wait, repeated regularly, so that a terminal is never silent for more than ten seconds.

    Args:
        log: receives a line; called from a thread.
        activity: description of the work in progress, such as `reading 100,000 tokens`.
        first: seconds until the first line.
        every: seconds between further lines.
    """

    def __init__(self, log: Callable[[str], object], activity: str, *, first: float = 3.0, every: float = 8.0) -> None:
        self._log, self._activity, self._first, self._every = log, activity, first, every
        self._over = threading.Event()

    def begin(self) -> None:
        """Start announcing the wait."""
        threading.Thread(target=self._run, name="announce", daemon=True).start()

    def end(self) -> None:
        """Stop announcing. Further calls have no effect."""
        self._over.set()

    def __enter__(self) -> "WaitAnnouncer":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _run(self) -> None:
        start_time = time.monotonic()
        if not self._over.wait(self._first):
            self._log(self._activity)
        while not self._over.wait(self._every):
            self._log(f"{self._activity} ({format_duration(time.monotonic() - start_time)})")

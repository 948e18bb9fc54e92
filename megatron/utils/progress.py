"""One progress display over a list of jobs, with an estimate of the time left for all of them.

The estimate works job by job: what starting up still takes, and what is left of the work divided by its speed. Both are
the job's own once work has been seen twice, so that starting up can be told from working; before that they are those of
other jobs of its kind, else of any. Those of its kind still count for a little while after it. Work can be in any unit
that is alike within a kind (FLOPs here), so an estimate is bad only where speeds differ within a kind, and corrects
itself when that job runs. Where several jobs run at once, what is left is divided among them.

On a terminal this is one moving bar. In a pipe or a log file it is a plain line at the beginning of each job and one
every few seconds, also where no work is done for long, since a bar's control characters would fill the file.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
"""What is said of that where it takes a while."""

PRIOR_WORK_FRACTION = 0.05
"""The fraction of a job's work after which its own speed counts as much as that of others."""


@dataclass
class WorkItem:
    """A piece of work and how far it is."""

    name: str
    kind: str
    work: float
    done: float = 0.0
    seconds: float = 0.0  # spent so far
    first: tuple[float, float] | None = None  # done and seconds when the first work was seen

    def advance(self, done: float, seconds: float) -> None:
        """So much is done after so many seconds."""
        self.done, self.seconds = done, seconds
        if self.first is None and done > 0:
            self.first = (done, seconds)

    @property
    def is_measured(self) -> bool:
        """Has work been seen twice, so that starting up can be told from working?"""
        return self.first is not None and self.done > self.first[0] and self.seconds > self.first[1]

    @property
    def is_finished(self) -> bool:
        return self.done >= self.work

    @property
    def throughput(self) -> "Throughput | None":
        """What this job alone tells, None before it tells anything.

        A job that finished before work was seen twice is too short to tell starting up from working: it counts as work
        alone.
        """
        if self.is_measured:
            assert self.first is not None
            done, seconds = self.first
            speed = (self.done - done) / (self.seconds - seconds)
            return Throughput(max(0.0, seconds - done / speed), speed)
        if self.is_finished and self.done > 0 and self.seconds > 0:
            return Throughput(0.0, self.done / self.seconds)
        return None


@dataclass(frozen=True)
class Throughput:
    """How long jobs take."""

    start: float  # seconds before the first work
    speed: float  # work per second after that


@dataclass
class _MeasuredWork:
    """What several jobs tell together, in sums that a job can be taken out of again."""

    num_jobs: int = 0
    done: float = 0.0
    seconds: float = 0.0  # that all the work took, without starting up
    start: float = 0.0  # seconds that all took to start

    def add(self, job: WorkItem, throughput: Throughput, sign: int = 1) -> None:
        """Count a job, or with sign -1 take one out that was counted."""
        self.num_jobs += sign
        self.done += sign * job.done
        self.seconds += sign * job.done / throughput.speed
        self.start += sign * throughput.start

    @property
    def throughput(self) -> Throughput | None:
        """The mean of what the jobs need to start, and all their work over all its time; None without a job."""
        if self.num_jobs == 0:
            return None
        return Throughput(self.start / self.num_jobs, self.done / self.seconds)


def estimate_seconds_left(jobs: Sequence[WorkItem], at_once: int = 1) -> float | None:
    """Estimate for all that is left, or None before any speed is known. Its time grows as the number of jobs.

    at_once: jobs that run at the same time, each at the speed that jobs were seen at. The last ones are taken to end
        together, and none to wait for another.
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
    """A job's own pace, as if `PRIOR_WORK_FRACTION` of its work had been seen to go at the pace of its kind.

    A speed between two looks that are a moment apart is mostly chance.
    """
    if own is None or kind_throughput is None or job.first is None:
        return own
    done, seconds = job.done - job.first[0], job.seconds - job.first[1]
    prior_work = PRIOR_WORK_FRACTION * job.work
    return Throughput(own.start, (done + prior_work) / (seconds + prior_work / kind_throughput.speed))


def build_progress_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """A bar over the width of the terminal, gone when it stops: description, bar, `columns`, and the time left."""
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
    """Shows the progress of jobs that run one after the other, or several at once.

    Args:
        console: where to show it; None shows nothing.
        jobs: all jobs, in order.
        clock: seconds; for tests.
        interval: seconds between plain lines, at most.
        forecast: called once, with the seconds that are left, when the speed of a job has first been measured.
        at_once: jobs that run at the same time.
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
        self._since: dict[str, float] = {}  # by the names of the jobs that have begun
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
            threading.Thread(target=self._speak, name="progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over.set()
        if self._bar is not None:
            self._bar.stop()

    def begin(self, job: WorkItem, detail: str = "") -> None:
        """Turn to a job. Time from here on counts for its speed."""
        with self._lock:
            self._current, self._since[job.name] = job, self._clock() - job.seconds
            self._detail, self._updated_at = detail, self._clock()
            self._show(is_start=True)

    def update(self, done: float, detail: str = "", job: WorkItem | None = None) -> None:
        """So much of a job's work is done: of the one that began last, or of another that has begun."""
        with self._lock:
            self._current = job or self._current
            assert self._current is not None
            self._current.advance(done, self._clock() - self._since[self._current.name])
            self._detail, self._updated_at = detail, self._clock()
            if self._forecast is not None and self._current.is_measured:
                forecast, self._forecast = self._forecast, None
                left = self.estimate_seconds_left()
                assert left is not None  # this job has a speed
                forecast(left)
            self._show(is_start=False)

    def estimate_seconds_left(self) -> float | None:
        """For all that is left; None before any speed is known."""
        return estimate_seconds_left(self.jobs, self.at_once)

    def report_stage(self, stage: str, done: int, total: int) -> None:
        """So many steps of a stage of the current job are done, of so many. Each stage counts as the whole job. The
        first job begins with its first stage, if nobody turned to it before."""
        if self._current is None:
            self.begin(self.jobs[0], stage)
        assert self._current is not None
        self.update(self._current.work * done / max(total, 1), stage)

    def finish(self, job: WorkItem | None = None) -> None:
        """A job is done: the one that began last, or another."""
        job = job or self._current
        assert job is not None
        self.update(job.work, job=job)

    def skip(self, job: WorkItem) -> None:
        """A job turned out to be done already: it takes no time and says nothing about speed."""
        job.work = job.done = 0.0

    def log(self, line: str) -> None:
        """Print a line without disturbing the bar."""
        if self.console is not None:
            self.console.print(escape(line), highlight=False, soft_wrap=True)

    def _speak(self) -> None:
        """Plain lines while no work is reported."""
        while not self._over.wait(min(1.0, self._interval / 4)):
            with self._lock:
                if not self._over.is_set():
                    self._show(is_start=False)

    def _describe_time_left(self, left: float | None, *, is_start: bool) -> str:
        """`left`: as it was when work was last reported."""
        assert self._current is not None
        if all(job.is_finished for job in self.jobs):
            return "done"
        now = self._clock()
        # Work that takes longer than it was estimated to says nothing about how much longer.
        left = None if left is None else left - (now - self._updated_at)
        if left is not None and left > 0:
            # Of several jobs it is the time for all, and not for the one that stands there.
            return f"about {format_duration(left)} left{' in all' if len(self.jobs) > 1 else ''}"
        if is_start or self._bar is not None:
            return "estimating the time left"
        # The time that passed tells a line from the one before.
        return f"estimating the time left, {format_duration(now - self._since[self._current.name])} so far"

    def _show(self, *, is_start: bool) -> None:
        job = self._current
        if job is None or self.console is None:
            return
        is_due = is_start or self._clock() - self._printed_at >= self._interval
        if self._bar is None and not is_due:
            return
        left = self.estimate_seconds_left()
        time_left = self._describe_time_left(left, is_start=is_start)
        text = f"{job.name}: {self._detail}" if self._detail else job.name
        if self._bar is not None:
            spent = sum(item.seconds for item in self.jobs) / self.at_once
            fraction = 0.0 if left is None or spent + left == 0 else spent / (spent + left)
            self._bar.update(self._task, description=escape(text), completed=fraction, left=time_left)
        else:
            self._printed_at = self._clock()
            self.console.print(escape(f"{text} ({time_left})"), highlight=False, soft_wrap=True)


class WaitAnnouncer:
    """Says what is waited for once that takes a while, and again now and then: nobody looks at a silent terminal for
    longer than ten seconds.

    Args:
        log: takes a line; it is called from a thread.
        activity: what is under way, as `reading 100,000 tokens`.
        first: seconds until the first line.
        every: seconds between the others.
    """

    def __init__(self, log: Callable[[str], object], activity: str, *, first: float = 3.0, every: float = 8.0) -> None:
        self._log, self._activity, self._first, self._every = log, activity, first, every
        self._over = threading.Event()

    def begin(self) -> None:
        """Start to wait."""
        threading.Thread(target=self._run, name="announce", daemon=True).start()

    def end(self) -> None:
        """It came; calling this again changes nothing."""
        self._over.set()

    def __enter__(self) -> "WaitAnnouncer":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _run(self) -> None:
        begun = time.monotonic()
        if not self._over.wait(self._first):
            self._log(self._activity)
        while not self._over.wait(self._every):
            self._log(f"{self._activity} ({format_duration(time.monotonic() - begun)})")

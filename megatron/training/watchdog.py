"""Does a run still move? Every process tells where it is, and one watches all.

A rank that hangs stops all others in their next collective, and the library's own timeout names nobody. So each rank
tells its step and its phase as it goes (`Watchdog.enter_phase`, microseconds), and a thread of the first rank looks at
what all have told. If one has told nothing new for `hang_timeout` seconds, the rank that is behind the others is named,
every rank writes the stacks of its threads and its last collectives to the run's `stacks` folder (`hang_report.py`),
and all end with one line, which says what each waits for, and exit code 75, which stands for "try again" and lets a
scheduler requeue.

Three things may keep a rank from answering, and each has its own way to be found:

    it waits in a collective, sleeps, reads   its thread answers, writes the stacks and ends the process
    it computes in C with Python's lock held  a signal from another rank of its machine (SIGUSR2) has `faulthandler`
                                              write the stacks without Python's help; of a lone one they go a little
                                              later to a process beside it, which keeps and tells them
    it was stopped (SIGSTOP)                  no sign of life comes, and the line says so; when all others have told
                                              where they are, one of its machine sends SIGUSR2 and lets it go on
                                              (SIGCONT), so that it too writes its stacks, as they were, and ends
    its machine is gone                       no sign of life comes, and the line says so

What follows when one of them concludes that another hangs is in `hang_report.py`.
"""

import faulthandler
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.distributed.process_groups import HeartbeatStore, ProcessGroups
from megatron.training.hang_report import HangReporter, HangVerdict, StacksFile
from megatron.training.metrics_log import HEARTBEAT_FILE
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import HangError

HANG_REPORTER = """
import sys
beat, stacks = b"", []
for line in sys.stdin.buffer:
    if line.startswith(b"at ") and not stacks:
        beat = line[3:].strip()
    elif stacks or line.startswith(b"Timeout"):
        stacks.append(line)
if stacks:
    rank, seconds, path = sys.argv[1:]
    kept = ""
    if path:
        with open(path, "ab") as file:
            file.writelines(stacks)
        kept = f"; its stacks are in {path}"
    _, step, phase = beat.decode().split(" ", 2)
    print(f"error: rank {rank} hangs in {phase} of step {step} for {seconds} s (hang_timeout), in native code that "
          f"holds Python's lock{kept}", file=sys.stderr, flush=True)
"""
"""A program that reads where a rank is, line by line, and in the end what `faulthandler` writes of one that hangs: it
says so then, which the rank itself cannot."""
WRITE_INTERVAL = 10.0
"""Seconds between two heartbeat files."""
MAX_ARM_INTERVAL = 1.0
"""Seconds at most between two settings of the timer that needs no Python: each ends a thread and starts another, for
which a step would wait several times."""

HangHandler = Callable[[HangError, bool], None]
"""Ends this process at once, for its main thread may never come back. True: this rank is the one that tells it."""


PhaseListener = Callable[[str, int], None]
"""Hears of a phase of a step."""


def exit_on_hang(error: HangError, report: bool) -> None:
    """End the process, with a line on standard error."""
    if report:
        print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank is."""

    count: int
    """Of its beats: ranks go through the same phases, so the one with fewer is behind."""
    step: int
    phase: str

    @staticmethod
    def parse(text: str) -> "Heartbeat":
        """What `str` wrote."""
        count, step, phase = text.split(" ", 2)
        return Heartbeat(int(count), int(step), phase)

    def __str__(self) -> str:
        return f"{self.count} {self.step} {self.phase}"


def diagnose_hang(heartbeats: dict[int, Heartbeat], silent: set[int], seconds: float) -> str:
    """Which rank hangs, in one sentence.

    Args:
        heartbeats: the last one of every rank.
        silent: ranks whose threads give no sign of life.
        seconds: for which nothing has moved.
    """
    behind = min(beat.count for beat in heartbeats.values())
    late = sorted(silent) or sorted(rank for rank, beat in heartbeats.items() if beat.count == behind)
    heartbeat = heartbeats[late[0]]
    location = f"in {heartbeat.phase} of step {heartbeat.step} for {seconds:.0f} s (hang_timeout)"
    if len(late) == len(heartbeats) > 1:
        return f"all {len(heartbeats)} ranks hang {location}"
    ranks = f"rank {late[0]} hangs" if len(late) == 1 else f"ranks {', '.join(map(str, late))} hang"
    others = sorted({beat.phase for rank, beat in heartbeats.items() if rank not in late})
    waiting = f", while the others are in {' and '.join(others)}" if others else ""
    dead = "; no sign of life: stopped, computing without end, or gone with its machine" if silent else ""
    return f"{ranks} {location}{waiting}{dead}"


class Watchdog:
    """Watches a run from its first step to its end; every rank has one.

    Args:
        groups: of the run.
        timeout: seconds without a new beat that mean that a rank hangs; None: nothing is watched but the heartbeat
            file is written.
        folder: the run's, for heartbeat and stacks; None: neither is written to files.
        on_hang: ends the process with the error.
        stderr_fd: the descriptor that the user reads errors from.
        phase_listeners: called with each phase that this rank enters, and its step, before it does.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        timeout: float | None,
        folder: Path | None,
        on_hang: HangHandler | None = None,
        stderr_fd: int = 2,
        phase_listeners: Sequence[PhaseListener] = (),
    ) -> None:
        self._phase_listeners = phase_listeners
        self.groups, self.timeout, self.folder, self.on_hang = groups, timeout, folder, on_hang or exit_on_hang
        self._store = HeartbeatStore(groups)
        self._poll_interval = min(5.0, (timeout or 20.0) / 4)
        self._grace = min(30.0, timeout or 0.0)
        self._limit = (timeout or 0.0) + self._grace
        """Seconds without a new beat after which a process ends that Python does not get to any more."""
        if groups.world_size > 1:
            # Beyond the end that the others prepare: a rank that was stopped is the last to be let go on, and must not
            # find its time over.
            self._limit += self._grace + 4 * self._poll_interval
        self._silence = 2 * self._poll_interval + 1
        """Seconds after which a thread that gives no sign of life is taken for dead."""
        self._heartbeat, self._moved = Heartbeat(0, 0, "start"), time.monotonic()
        self._answered = time.monotonic()
        self._arm_interval, self._armed_at = min(MAX_ARM_INTERVAL, (timeout or 0.0) / 10), -math.inf
        self._closed, self._ending, self._end_lock = threading.Event(), threading.Event(), threading.Lock()
        self._processes: list[tuple[str, int]] = []
        """Of each rank its machine and the number of its process."""
        self._stacks = StacksFile(folder, groups.rank)
        self._stderr_fd = stderr_fd
        self._reporter: subprocess.Popen[bytes] | None = None
        self._threads = [threading.Thread(target=self._poll_heartbeats, name="watch", daemon=True)]
        if groups.rank > 0 and timeout is not None:
            self._threads.append(threading.Thread(target=self._expect_answers, name="watch-store", daemon=True))

    def begin(self, step: int) -> None:
        """Start to watch. Every rank must come here."""
        if self.timeout is not None:
            if self.groups.is_main:
                self._stacks.set_earlier_aside()
            self._processes = self.groups.gather_objects((socket.gethostname(), os.getpid()))
            path = "" if self._stacks.path is None else str(self._stacks.path.absolute())
            self._stacks.listen()
            self._reporter = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", HANG_REPORTER, str(self.groups.rank), f"{self._limit:.0f}",
                 path],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._stderr_fd, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        self.enter_phase("start", step)
        self._store.set("alive", "0")
        for thread in self._threads:
            thread.start()

    def enter_phase(self, phase: str, step: int) -> None:
        """This rank begins a phase of a step."""
        if self._ending.is_set():  # it goes no further: the others stand still too, while they tell where they are
            self._wait_for_end()
        for listener in self._phase_listeners:
            listener(phase, step)
        self._heartbeat, self._moved = Heartbeat(self._heartbeat.count + 1, step, phase), time.monotonic()
        self._store.set("beat", str(self._heartbeat))
        if self.timeout is not None:
            # Should Python itself not come to its turn any more.
            file = self._stacks.open()
            if self._reporter is not None and self._reporter.stdin is not None:
                with suppress(OSError):  # somebody ended it
                    self._reporter.stdin.write(f"at {self._heartbeat}\n".encode())
                    file = self._reporter.stdin
            if self._moved - self._armed_at >= self._arm_interval:
                self._armed_at = self._moved
                faulthandler.dump_traceback_later(self._limit + self._arm_interval, exit=True, file=file)

    def close(self) -> None:
        """The run has ended, well or not."""
        if self._ending.is_set():
            # The end that is under way is the reason for what this thread met: a rank that is gone already.
            self._wait_for_end()
        self._closed.set()
        if self.timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._reporter is not None and self._reporter.stdin is not None:
            # It has nothing to report. That its input ends would not tell it: processes that load batches were forked
            # from this one, and hold the other end open as long as they live.
            self._reporter.kill()
            self._reporter.stdin.close()
            self._reporter.wait()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(self._poll_interval + 1)
        self._stacks.close()
        if self.folder is not None and self.groups.is_main:
            (self.folder / HEARTBEAT_FILE).unlink(missing_ok=True)

    def _wait_for_end(self) -> None:
        """Let the thread that ends this process do so."""
        time.sleep(2 * self._grace + 6 * self._poll_interval + 2)

    def _poll_heartbeats(self) -> None:
        """Tell that this process lives, and look at the others or for what one has found."""
        store = self._store.copy()
        heartbeats: dict[int, str] = {}
        moved_at: dict[int, float] = {}
        signs_of_life: dict[int, tuple[str, float]] = {}
        count, written_at, polled_at = 0, 0.0, time.monotonic()
        while not self._closed.wait(self._poll_interval):
            count += 1
            try:
                store.set("alive", str(count))
                if self.timeout is not None and (text := store.get("verdict")) is not None:
                    self._end_run(HangVerdict.parse(text), store)
                    return
                self._answered = now = time.monotonic()
                pause, polled_at = now - polled_at, now
                if pause > self._silence:  # this process was stopped: others may have lived meanwhile
                    moved_at = {rank: at + pause for rank, at in moved_at.items()}
                    signs_of_life = {rank: (sign, at + pause) for rank, (sign, at) in signs_of_life.items()}
                if not self.groups.is_main:
                    continue
                if now - written_at >= WRITE_INTERVAL:
                    self._write_heartbeat()
                    written_at = now
                if self.timeout is None:
                    continue
                for rank in range(self.groups.world_size):
                    text, sign = store.get("beat", rank), store.get("alive", rank)
                    if text is not None and text != heartbeats.get(rank):
                        heartbeats[rank], moved_at[rank] = text, now
                    if sign is not None and sign != signs_of_life.get(rank, ("", 0.0))[0]:
                        signs_of_life[rank] = sign, now
                idle = max((now - at for at in moved_at.values()), default=0.0)
            except Exception:  # the store is gone because the run is
                continue
            if idle > self.timeout and not self._closed.is_set():
                silent = {rank for rank, (_, at) in signs_of_life.items() if now - at > self._silence}
                line = diagnose_hang({rank: Heartbeat.parse(text) for rank, text in heartbeats.items()}, silent, idle)
                verdict = HangVerdict(line, tuple(sorted(silent)), reporter=0, time=time.time())
                store.set("verdict", verdict.to_json())
                self._end_run(verdict, store)
                return

    def _write_heartbeat(self) -> None:
        if self.folder is None or not self.folder.is_dir():  # a folder that was moved away is not made anew
            return
        heartbeat = {
            "time": time.time(), "step": self._heartbeat.step, "phase": self._heartbeat.phase,
            "ranks": self.groups.world_size, "host": socket.gethostname(), "process": os.getpid(),
        }  # fmt: skip
        try:
            write_text_atomically(self.folder / HEARTBEAT_FILE, json.dumps(heartbeat) + "\n")
        except OSError:
            return  # a full disk is told by whoever must write

    def _expect_answers(self) -> None:
        """The store is served by the first rank: if nothing comes back, that one is stopped or gone."""
        assert self.timeout is not None
        polled_at = time.monotonic()
        while not self._closed.wait(self._poll_interval):
            now = time.monotonic()
            pause, polled_at = now - polled_at, now
            if pause > self._silence:  # this process was stopped, and has not asked meanwhile
                self._answered = now
            if now - self._answered > self.timeout and now - self._moved > self.timeout:
                beat = self._heartbeat
                line = (
                    f"rank 0 hangs: no sign of life for {now - self._answered:.0f} s (hang_timeout), while rank "
                    f"{self.groups.rank} is in {beat.phase} of step {beat.step}"
                )
                self._end_run(HangVerdict(line, (0,), reporter=1, time=time.time()), self._store)
                return

    def _end_run(self, verdict: HangVerdict, store: HeartbeatStore) -> None:
        """End this process with a line of what all ranks wait for."""
        if not self._end_lock.acquire(blocking=False):
            return  # the other thread does
        self._ending.set()
        faulthandler.cancel_dump_traceback_later()
        reporter = HangReporter(self.groups.rank, self._processes, self._stacks, self._grace, self._poll_interval)
        self.on_hang(HangError(reporter.report(verdict, store)), self.groups.rank == verdict.reporter)

"""Hang detection: every process reports its progress, and one process monitors all.

A rank that hangs blocks all others in their next collective, and the library's own timeout does not name the rank. Each
rank therefore publishes its step and its phase (`Watchdog.enter_phase`, microseconds), and a thread of the first rank
polls them. If no rank has advanced for `hang_timeout` seconds, the watchdog names the rank that is behind the others.
Every rank writes the stacks of its threads and its last collectives to the run's `stacks` folder (`hang_report.py`).
All exit with one line that states the operation in which each rank waits. Exit code 75, "try again", lets a scheduler
requeue the job.

A rank can fail to respond in four ways, and each is detected differently:

    it waits in a collective, sleeps, reads   its watchdog thread responds, writes the stacks and ends the process
    it computes in C and holds the GIL        another rank of its machine sends SIGUSR2, and `faulthandler` writes the
                                              stacks without Python. For a single process the stacks go to a helper
                                              process a little later, which stores and reports them
    it was stopped (SIGSTOP)                  its heartbeat stops, which the line states. When all others have reported,
                                              one rank of its machine sends SIGUSR2 and resumes it (SIGCONT), so that
                                              it too writes its unchanged stacks and exits
    its machine is down                       its heartbeat stops, which the line states

`hang_report.py` writes the report after the detection.
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
from megatron.training.hang_report import HangDiagnosis, HangReporter, StacksFile
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
    print(f"error: rank {rank} hangs at step {step} in phase `{phase}` for {seconds} s (hang_timeout), "
          f"in native code that holds the GIL{kept}", file=sys.stderr, flush=True)
"""
"""Program of a helper process. It reads the rank's progress, line by line, and finally the output of `faulthandler` if
the rank hangs; it then prints the error that the rank itself cannot print.
"""
WRITE_INTERVAL = 10.0
"""Interval between two heartbeat files, in seconds."""
MAX_ARM_INTERVAL = 1.0
"""Maximum interval, in seconds, between two settings of the timer that needs no Python. Each setting ends a thread and
starts another, which is too slow for several times a step.
"""

HangHandler = Callable[[HangError, bool], None]
"""Function that ends this process at once, because its main thread may never return. The flag is True on the reporter.
"""


PhaseListener = Callable[[str, int], None]
"""Function called with each phase of a step."""


def exit_on_hang(error: HangError, report: bool) -> None:
    """End the process. The reporter prints a line on standard error."""
    if report:
        print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


@dataclass(frozen=True)
class Heartbeat:
    """Progress of a rank."""

    count: int
    """Number of heartbeats so far. Ranks go through the same phases, so the rank with the fewest is behind."""
    step: int
    phase: str

    @staticmethod
    def parse(text: str) -> "Heartbeat":
        """Parse the output of `str`."""
        count, step, phase = text.split(" ", 2)
        return Heartbeat(int(count), int(step), phase)

    def __str__(self) -> str:
        return f"{self.count} {self.step} {self.phase}"


def diagnose_hang(heartbeats: dict[int, Heartbeat], silent: set[int], seconds: float) -> str:
    """Describe in one sentence which rank hangs.

    Args:
        heartbeats: last heartbeat of every rank.
        silent: ranks whose watchdog threads do not respond.
        seconds: time since any rank advanced.
    """
    behind = min(beat.count for beat in heartbeats.values())
    late = sorted(silent) or sorted(rank for rank, beat in heartbeats.items() if beat.count == behind)
    heartbeat = heartbeats[late[0]]
    location = f"at step {heartbeat.step} in phase `{heartbeat.phase}` for {seconds:.0f} s (hang_timeout)"
    if len(late) == len(heartbeats) > 1:
        return f"all {len(heartbeats)} ranks hang {location}"
    ranks = f"rank {late[0]} hangs" if len(late) == 1 else f"ranks {', '.join(map(str, late))} hang"
    others = sorted({f"`{beat.phase}`" for rank, beat in heartbeats.items() if rank not in late})
    waiting = f", while the others are in {' and '.join(others)}" if others else ""
    dead = "; no heartbeat: stopped, stuck in a computation, or its machine is down" if silent else ""
    return f"{ranks} {location}{waiting}{dead}"


class Watchdog:
    """Monitor of a run from its first step to its end; every rank has one.

    Args:
        groups: process groups of the run.
        timeout: seconds without a new heartbeat after which a rank counts as hung; None writes the heartbeat file only.
        folder: folder of the run, for heartbeat and stacks; None writes no files.
        on_hang: ends the process with the error.
        stderr_fd: file descriptor of the user's standard error.
        phase_listeners: called with each phase that this rank enters, and its step, before it starts.
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
        """Seconds without a heartbeat after which a process that can no longer run Python ends."""
        if groups.world_size > 1:
            # Longer than the orderly end needs: a stopped rank is resumed last, and must not exceed its limit by then.
            self._limit += self._grace + 4 * self._poll_interval
        self._silence = 2 * self._poll_interval + 1
        """Seconds without a response after which a watchdog thread counts as dead."""
        self._heartbeat, self._moved = Heartbeat(0, 0, "start"), time.monotonic()
        self._answered = time.monotonic()
        self._arm_interval, self._armed_at = min(MAX_ARM_INTERVAL, (timeout or 0.0) / 10), -math.inf
        self._closed, self._ending, self._end_lock = threading.Event(), threading.Event(), threading.Lock()
        self._processes: list[tuple[str, int]] = []
        """Host name and process ID of each rank."""
        self._stacks = StacksFile(folder, groups.rank)
        self._stderr_fd = stderr_fd
        self._reporter: subprocess.Popen[bytes] | None = None
        self._threads = [threading.Thread(target=self._poll_heartbeats, name="watch", daemon=True)]
        if groups.rank > 0 and timeout is not None:
            self._threads.append(threading.Thread(target=self._watch_store, name="watch-store", daemon=True))

    def begin(self, step: int) -> None:
        """Start to monitor. All ranks must call this."""
        if self.timeout is not None:
            if self.groups.is_main:
                self._stacks.archive_earlier_folder()
            self._processes = self.groups.gather_objects((socket.gethostname(), os.getpid()))
            path = "" if self._stacks.path is None else str(self._stacks.path.absolute())
            self._stacks.install_handler()
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
        """Start a phase of a step on this rank."""
        if self._ending.is_set():  # stop here: the other ranks wait too, while they report their state
            self._wait_for_end()
        for listener in self._phase_listeners:
            listener(phase, step)
        self._heartbeat, self._moved = Heartbeat(self._heartbeat.count + 1, step, phase), time.monotonic()
        self._store.set("beat", str(self._heartbeat))
        if self.timeout is not None:
            # Timer that works even if Python can no longer run.
            file = self._stacks.open()
            if self._reporter is not None and self._reporter.stdin is not None:
                with suppress(OSError):  # the helper process was ended
                    self._reporter.stdin.write(f"at {self._heartbeat}\n".encode())
                    file = self._reporter.stdin
            if self._moved - self._armed_at >= self._arm_interval:
                self._armed_at = self._moved
                faulthandler.dump_traceback_later(self._limit + self._arm_interval, exit=True, file=file)

    def close(self) -> None:
        """Stop monitoring at the end of the run, regular or not."""
        if self._ending.is_set():
            # The end in progress explains the error of this thread: another rank has already exited.
            self._wait_for_end()
        self._closed.set()
        if self.timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._reporter is not None and self._reporter.stdin is not None:
            # The helper has nothing to report. Closing its input would not end it: forked data loader workers keep the
            # other end open as long as they live.
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
        """Wait until the other thread ends this process."""
        time.sleep(2 * self._grace + 6 * self._poll_interval + 2)

    def _poll_heartbeats(self) -> None:
        """Publish that this process is alive, and check the other ranks or wait for a verdict."""
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
                    self._end_run(HangDiagnosis.parse(text), store)
                    return
                self._answered = now = time.monotonic()
                pause, polled_at = now - polled_at, now
                if pause > self._silence:  # this process was stopped: other ranks may have been alive meanwhile
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
            except Exception:  # the store ended with the run
                continue
            if idle > self.timeout and not self._closed.is_set():
                silent = {rank for rank, (_, at) in signs_of_life.items() if now - at > self._silence}
                line = diagnose_hang({rank: Heartbeat.parse(text) for rank, text in heartbeats.items()}, silent, idle)
                diagnosis = HangDiagnosis(line, tuple(sorted(silent)), reporter=0, time=time.time())
                store.set("verdict", diagnosis.to_json())
                self._end_run(diagnosis, store)
                return

    def _write_heartbeat(self) -> None:
        if self.folder is None or not self.folder.is_dir():  # a folder that was moved is not created again
            return
        heartbeat = {
            "time": time.time(), "step": self._heartbeat.step, "phase": self._heartbeat.phase,
            "ranks": self.groups.world_size, "host": socket.gethostname(), "process": os.getpid(),
        }  # fmt: skip
        try:
            write_text_atomically(self.folder / HEARTBEAT_FILE, json.dumps(heartbeat) + "\n")
        except OSError:
            return  # code that must write reports a full disk

    def _watch_store(self) -> None:
        """Detect a stopped or dead first rank, which serves the store, by missing responses of the store."""
        assert self.timeout is not None
        polled_at = time.monotonic()
        while not self._closed.wait(self._poll_interval):
            now = time.monotonic()
            pause, polled_at = now - polled_at, now
            if pause > self._silence:  # this process was stopped, and sent no requests meanwhile
                self._answered = now
            if now - self._answered > self.timeout and now - self._moved > self.timeout:
                beat = self._heartbeat
                line = (
                    f"rank 0 hangs: no heartbeat for {now - self._answered:.0f} s (hang_timeout), while rank "
                    f"{self.groups.rank} is at step {beat.step} in phase `{beat.phase}`"
                )
                self._end_run(HangDiagnosis(line, (0,), reporter=1, time=time.time()), self._store)
                return

    def _end_run(self, diagnosis: HangDiagnosis, store: HeartbeatStore) -> None:
        """End this process with a line about what all ranks wait for."""
        if not self._end_lock.acquire(blocking=False):
            return  # the other thread does it
        self._ending.set()
        faulthandler.cancel_dump_traceback_later()
        reporter = HangReporter(self.groups.rank, self._processes, self._stacks, self._grace, self._poll_interval)
        self.on_hang(HangError(reporter.report(diagnosis, store)), self.groups.rank == diagnosis.reporter)

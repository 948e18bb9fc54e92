"""Process groups of a run: start processes, monitor them, stop all when one fails, and report the cause.

The children are ranks on this machine, or connections to hosts that monitor their own ranks (`ssh_launcher.py`).

Each rank has its own session, so that a keyboard interrupt reaches only the launcher, which forwards it to all ranks.
The ranks exit even if the launcher is killed (`exit_with_parent` in `megatron/utils/signals.py`).

torch.distributed.elastic.multiprocessing offers much of this. It is not used because importing torch delays the
launcher's first line by several seconds, and because it supports neither our errors nor ranks that save before exiting.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.config.schema import CONFIG_FILE, Config
from megatron.distributed.hardware import count_cores
from megatron.distributed.launcher_environment import RankInfo
from megatron.utils.atomic_directory import temporary_folder
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.console import UnexpectedError
from megatron.utils.errors import FarfieldError, HangError, RunError, UserError
from megatron.utils.imports import SAFE_PATH_VARIABLE
from megatron.utils.project import join_python_path
from megatron.utils.signals import HANDLED_SIGNALS, build_signal_exception, get_parent_variable, list_handled_signals

STOP_TIMEOUT = 5.0  # seconds ranks have to exit after another failed, and again after SIGTERM
POLL_SECONDS = 0.05
WORKER = (sys.executable, "-m", "megatron.launch.worker")


@dataclass(frozen=True)
class ErrorKind:
    """Class and priority of a rank's error."""

    error: type[FarfieldError]
    priority: int
    """Priority of the error; the lowest number is raised.

    When a rank fails, the others fail in their next collective, and their errors are not informative.
    """


ERROR_KINDS = {
    "user": ErrorKind(UserError, 0),
    "hang": ErrorKind(HangError, 0),
    "unexpected": ErrorKind(UnexpectedError, 2),  # usually a consequence of another error
    "run": ErrorKind(RunError, 0),
    "exit": ErrorKind(RunError, 1),  # only an exit code or a signal
}
"""Error kinds by their name in a report, more specific ones first."""


@dataclass(frozen=True)
class ErrorReport:
    """Error of a rank, serialized for the launcher."""

    kind: str
    message: str
    time: float
    key: str | None = None
    """Configuration key that caused a user error."""

    @staticmethod
    def from_error(error: FarfieldError) -> ErrorReport:
        """Build the report of an error raised now."""
        kind = next(name for name, kind in ERROR_KINDS.items() if isinstance(error, kind.error))
        return ErrorReport(kind, str(error), time.time(), getattr(error, "key", None))

    @staticmethod
    def parse(text: str) -> ErrorReport:
        """Parse a report written by `to_json`. Raises ValueError if the text is not a report."""
        values = json.loads(text)
        if not isinstance(values, dict) or not values.keys() >= {"kind", "message", "time"}:
            raise ValueError("not an error report")
        return ErrorReport(values["kind"], values["message"], values["time"], values.get("key"))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def priority(self) -> int:
        return ERROR_KINDS[self.kind].priority

    def build_error(self) -> FarfieldError:
        """Return the error as the rank raised it."""
        error = ERROR_KINDS[self.kind].error(self.message)
        if isinstance(error, UserError):
            error.key = self.key
        return error


def get_error_path(job: Path, rank: int) -> Path:
    """Return the path of a rank's error report."""
    return job / f"error_{rank}.json"


class RankGroup:
    """Child processes that are stopped together.

    Args:
        starters: functions that each start a child.
        read_report: returns the report of a child, or a line, given its index and exit code.
    """

    def __init__(
        self,
        starters: Iterable[Callable[[], subprocess.Popen[bytes]]],
        read_report: Callable[[int, int], ErrorReport | str],
    ) -> None:
        self.children: list[subprocess.Popen[bytes]] = []
        self.first_signal = 0
        """Number of the first signal received by this process, or 0."""
        self._starters, self._read_report = starters, read_report
        self._exit_times: dict[int, float] = {}  # by index, as observed
        self._stopped: set[int] = set()  # indices of children that `stop` terminated

    def run(self) -> int:
        """Start the children and monitor them until all exit; stop all when one fails, and forward signals.

        Returns and raises as `run_ranks`.
        """
        with self._forward_signals():
            try:
                self.start()
                signaled_at_start = bool(self.first_signal)
                self.wait()
            finally:
                self.stop()
        failed = self._list_failed()
        if failed and not (self.first_signal and all(self.children[index].returncode < 0 for index in failed)):
            raise self.find_root_cause(failed)
        if self.first_signal and (failed or signaled_at_start):  # children may exit before handling signals
            raise build_signal_exception(self.first_signal)
        if self.first_signal:
            return 128 + self.first_signal
        return max(child.returncode for child in self.children)

    def start(self) -> None:
        """Start the children one after another, until a signal arrives."""
        for start_child in self._starters:
            if self.first_signal:
                break
            self.children.append(start_child())
            if self.first_signal:  # it arrived during the start and reached only the others
                self.children[-1].send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until all have exited, or one has failed and the timeout for the others has passed."""
        deadline: float | None = None
        while len(self._exit_times) < len(self.children):
            for index, child in enumerate(self.children):
                if index not in self._exit_times and child.poll() is not None:
                    self._exit_times[index] = time.time()
                    if not _is_clean_exit(child.returncode) and deadline is None:
                        deadline = time.monotonic() + STOP_TIMEOUT
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Stop running children with SIGTERM, then with SIGKILL."""
        self._stopped = {index for index, child in enumerate(self.children) if child.poll() is None}
        for kind in (signal.SIGTERM, signal.SIGKILL):
            running = [child for child in self.children if child.poll() is None]
            for child in running:
                child.send_signal(kind)
            deadline = time.monotonic() + STOP_TIMEOUT
            for child in running:
                try:
                    child.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue

    def find_root_cause(self, failed: Sequence[int]) -> FarfieldError:
        """Return the error to raise for failed children: the earliest one of the highest priority."""
        reports = []
        for index in failed:
            report = self._read_report(index, self.children[index].returncode)
            if isinstance(report, str):
                report = ErrorReport("exit", report, self._exit_times.get(index, time.time()))
            reports.append(report)
        return min(reports, key=lambda report: (report.priority, report.time)).build_error()

    def _list_failed(self) -> list[int]:
        """Return the indices of children that failed on their own."""
        return [
            index
            for index, child in enumerate(self.children)
            if index not in self._stopped and not _is_clean_exit(child.returncode)
        ]

    @contextmanager
    def _forward_signals(self) -> Iterator[None]:
        """Forward signals of this process to the children: the first as SIGTERM, a second one as SIGKILL."""
        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # only the main thread may install handlers
            handlers = {number: signal.signal(number, self._forward_signal) for number in list_handled_signals()}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        if self.first_signal and number == signal.SIGHUP:
            return  # a closing terminal may send it twice while the ranks are saving
        kind = signal.SIGKILL if self.first_signal else signal.SIGTERM
        self.first_signal = self.first_signal or number
        for child in self.children:
            if child.poll() is None:
                child.send_signal(kind)


def _is_clean_exit(code: int) -> bool:
    """Return True if a rank completed its work, or exited cleanly after a signal."""
    return code in (0, *(128 + number for number in HANDLED_SIGNALS))


def run_ranks(
    config: Config, log: Path, rank_infos: Sequence[RankInfo], address: str, port: int, command: Sequence[str] = WORKER
) -> int:
    """Run ranks on this machine to their end.

    The first SIGINT, SIGTERM or SIGHUP is forwarded to the ranks, which save after their current step and exit; a
    second one kills them.

    Args:
        config: resolved configuration; the ranks read it from the job's folder.
        log: file for output that is not shown to the user.
        rank_infos: ranks to run: all ranks of the run, or those of this machine.
        address, port: rendezvous address.
        command: command of each rank, with the job's folder, the log and the rank as arguments. The environment
            contains torchrun's variables (`RankInfo.to_environment`).

    Returns:
        0, or 128 + n if signal n ended the run early.

    Raises:
        FarfieldError: root cause of a failure, after all ranks have exited.
        KeyboardInterrupt, StoppedBySignal: a signal ended ranks that did not handle it.
    """
    with temporary_folder("ranks") as job:
        if config.data.data_cache is None and config.checkpoint.save is None:
            config = config.replace(data_cache=str(job / "data_cache"))  # the ranks share one sample index
        write_text_atomically(job / CONFIG_FILE, config.to_yaml(only_set=True))

        def read_report(index: int, code: int) -> ErrorReport | str:
            rank = rank_infos[index].rank
            path = get_error_path(job, rank)
            if path.is_file():
                return ErrorReport.parse(path.read_text(encoding="utf-8"))
            return _describe_exit(rank, code, log)

        starters = (partial(_start_rank, command, job, log, rank_info, address, port) for rank_info in rank_infos)
        return RankGroup(starters, read_report).run()


def _start_rank(
    command: Sequence[str], job: Path, log: Path, rank_info: RankInfo, address: str, port: int
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **rank_info.to_environment(address, port), **get_parent_variable()}
    environment |= SAFE_PATH_VARIABLE
    environment.setdefault("OMP_NUM_THREADS", str(count_threads_per_process(rank_info.ranks_on_node)))
    environment["PYTHONPATH"] = join_python_path()
    with open(log, "ab") as output:
        # Rank 0 keeps the real streams for the user's console. It redirects output to the log itself.
        stream = None if rank_info.rank == 0 else output
        arguments = [*command, str(job), str(log), str(rank_info.rank)]
        return subprocess.Popen(
            arguments, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )


def _describe_exit(rank: int, code: int, log: Path) -> str:
    if code >= 0:
        return f"the process of rank {rank} died with exit code {code}; see {log}"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"the process of rank {rank} was killed by {name}{hint}; see {log}"


def count_threads_per_process(ranks: int) -> int:
    """Return the number of threads per process that divides the cores; oversubscription was up to 30 times slower."""
    return max(1, count_cores() // ranks)

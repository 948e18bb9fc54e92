"""Several processes of one run: start them, watch them, end them all when one fails, and say why.

What is watched are the ranks on this machine, or connections to machines that watch theirs (`ssh_launcher.py`).

Each rank is a session of its own, so an interrupt from the keyboard reaches the launcher alone, which hands it to all
ranks. Should the launcher be killed outright, the ranks end all the same (`end_with_parent` in
`megatron/utils/signals.py`).

torch.distributed.elastic.multiprocessing does much of this; it is not used because importing torch costs the launcher
several seconds before its first line, and because it knows neither our errors nor a rank that saves before it ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
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

from megatron.config.schema import Config
from megatron.distributed.hardware import count_cores
from megatron.distributed.launcher_environment import ADDRESS, RankInfo
from megatron.launch.console import UnexpectedError
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import FarfieldError, HangError, RunError, UserError
from megatron.utils.imports import SAFE_PATH_VARIABLE
from megatron.utils.signals import HANDLED_SIGNALS, build_signal_exception, get_parent_variable, list_handled_signals
from megatron.utils.temporary_folder import temporary_folder

ROOT = Path(__file__).resolve().parents[2]
CONFIG_FILE = "config.yml"
STOP_TIMEOUT = 5.0  # seconds that ranks get to end by themselves once another has failed, and again after SIGTERM
POLL_SECONDS = 0.05
WORKER = (sys.executable, "-m", "megatron.launch.worker")


@dataclass(frozen=True)
class ErrorKind:
    """What a rank's error may be."""

    error: type[FarfieldError]
    priority: int
    """Of several errors the one of the lowest number is raised: when a rank goes, the others fail in their next
    collective, and those failures say nothing."""


ERROR_KINDS = {
    "user": ErrorKind(UserError, 0),
    "hang": ErrorKind(HangError, 0),
    "unexpected": ErrorKind(UnexpectedError, 2),  # nobody wrote a message for it: mostly a consequence
    "run": ErrorKind(RunError, 0),
    "exit": ErrorKind(RunError, 1),  # a process that left nothing but an exit code, or was ended by a signal
}
"""By the name that stands in a report, the more special first."""


@dataclass(frozen=True)
class ErrorReport:
    """A rank's error on its way to the launcher."""

    kind: str
    message: str
    time: float
    key: str | None = None
    """The configuration's to blame, of what the user wrote."""

    @staticmethod
    def from_error(error: FarfieldError) -> ErrorReport:
        """The report of an error that was raised now."""
        kind = next(name for name, kind in ERROR_KINDS.items() if isinstance(error, kind.error))
        return ErrorReport(kind, str(error), time.time(), getattr(error, "key", None))

    @staticmethod
    def parse(text: str) -> ErrorReport:
        """The report that `to_json` wrote. Raises ValueError if the text is none."""
        values = json.loads(text)
        if not isinstance(values, dict) or not values.keys() >= {"kind", "message", "time"}:
            raise ValueError("no report of an error")
        return ErrorReport(values["kind"], values["message"], values["time"], values.get("key"))

    def to_json(self) -> str:
        """The report as a line."""
        return json.dumps(asdict(self))

    @property
    def priority(self) -> int:
        return ERROR_KINDS[self.kind].priority

    def build_error(self) -> FarfieldError:
        """The error as the rank raised it."""
        error = ERROR_KINDS[self.kind].error(self.message)
        if isinstance(error, UserError):
            error.key = self.key
        return error


def get_error_path(job: Path, rank: int) -> Path:
    """Where a rank leaves its error for the launcher."""
    return job / f"error_{rank}.json"


class RankGroup:
    """Child processes that end together.

    Args:
        starters: each starts a child.
        read_report: what the child of an index that ended with an exit code left: its report, or a line.
    """

    def __init__(
        self,
        starters: Iterable[Callable[[], subprocess.Popen[bytes]]],
        read_report: Callable[[int, int], ErrorReport | str],
    ) -> None:
        self.children: list[subprocess.Popen[bytes]] = []
        self.first_signal = 0
        """The number of the first signal that reached this process, 0 before one does."""
        self._starters, self._read_report = starters, read_report
        self._exit_times: dict[int, float] = {}  # by index, as they were seen
        self._stopped: set[int] = set()  # indices of the children that `stop` had to end

    def run(self) -> int:
        """Start the children and watch them to their end; end all when one fails, and hand signals on.

        Returns, Raises: as `run_ranks`.
        """
        with self._forwarding_signals():
            try:
                self.start()
                signaled_at_start = bool(self.first_signal)
                self.wait()
            finally:
                self.stop()
        failed = self._list_failed()
        if failed and not (self.first_signal and all(self.children[index].returncode < 0 for index in failed)):
            raise self.find_root_cause(failed)
        if self.first_signal and (failed or signaled_at_start):  # children that ended before they listened say nothing
            raise build_signal_exception(self.first_signal)
        if self.first_signal:
            return 128 + self.first_signal
        return max(child.returncode for child in self.children)

    def start(self) -> None:
        """Start the children, one after the other, until a signal comes."""
        for start_child in self._starters:
            if self.first_signal:
                break
            self.children.append(start_child())
            if self.first_signal:  # it came while this child was started, and reached the others alone
                self.children[-1].send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until all have ended, or one has failed and the others had their time."""
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
        """End what still runs: SIGTERM, and SIGKILL for what does not listen."""
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
        """The error to raise for the children that failed: the first of those whose kind says most."""
        reports = []
        for index in failed:
            report = self._read_report(index, self.children[index].returncode)
            if isinstance(report, str):
                report = ErrorReport("exit", report, self._exit_times.get(index, time.time()))
            reports.append(report)
        return min(reports, key=lambda report: (report.priority, report.time)).build_error()

    def _list_failed(self) -> list[int]:
        """The indices of the children that failed by themselves."""
        return [
            index
            for index, child in enumerate(self.children)
            if index not in self._stopped and not _is_clean_exit(child.returncode)
        ]

    @contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        """Hand signals that reach this process to the children: the first as SIGTERM, a second one as SIGKILL."""
        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # only it may install handlers
            handlers = {number: signal.signal(number, self._forward_signal) for number in list_handled_signals()}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        if self.first_signal and number == signal.SIGHUP:
            return  # a terminal that closes may say so twice, and the ranks are saving
        kind = signal.SIGKILL if self.first_signal else signal.SIGTERM
        self.first_signal = self.first_signal or number
        for child in self.children:
            if child.poll() is None:
                child.send_signal(kind)


def _is_clean_exit(code: int) -> bool:
    """Did a rank do its work, or end in good order after a signal?"""
    return code in (0, *(128 + number for number in HANDLED_SIGNALS))


def run_ranks(
    config: Config, log: Path, rank_infos: Sequence[RankInfo], address: str, port: int, command: Sequence[str] = WORKER
) -> int:
    """Run ranks on this machine to their end.

    A first SIGINT, SIGTERM or SIGHUP is handed to the ranks, which end after their step and save; a second ends them.

    Args:
        config: resolved; the ranks read it from the job's folder.
        log: where they write what is not for the user.
        rank_infos: of the ranks: all of the run, or those of this machine.
        address, port: where they meet.
        command: what each rank runs, given the job's folder, the log and its rank as arguments; torchrun's variables
            in its environment say the rest (`RankInfo.to_environment`).

    Returns:
        0, or 128 + n if signal n ended the run early.

    Raises:
        FarfieldError: the first cause of a failure, after all ranks have ended.
        KeyboardInterrupt, StoppedBySignal: a signal ended ranks that did not listen to it.
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
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with open(log, "ab") as output:
        # Rank 0 keeps the real streams: its console is the user's. It turns to the log by itself.
        stream = None if rank_info.rank == 0 else output
        arguments = [*command, str(job), str(log), str(rank_info.rank)]
        return subprocess.Popen(
            arguments, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )


def _describe_exit(rank: int, code: int, log: Path) -> str:
    if code >= 0:
        return f"the process of rank {rank} ended with exit code {code}; see {log}"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"the process of rank {rank} was ended by {name}{hint}; see {log}"


def count_threads_per_process(ranks: int) -> int:
    """Threads that leave a core to each: two ranks with all cores each ran up to 30 times slower."""
    return max(1, count_cores() // ranks)


def find_free_port() -> int:
    """A TCP port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        return listener.getsockname()[1]

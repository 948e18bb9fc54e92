"""Several processes of one run: start them, watch them, end them all when one fails.

What is watched are the ranks on this machine, or connections to machines that watch theirs (`nodes.py`).

Each rank is a session of its own, so an interrupt from the keyboard reaches the launcher alone, which hands it to all
ranks. Should the launcher be killed outright, the ranks end all the same (see `parent.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.config.schema import Config
from megatron.distributed.hardware import count_cores
from megatron.distributed.launcher_environment import ADDRESS, RankInfo
from megatron.launch.worker import CONFIG_FILE, ERROR_KINDS, get_error_path
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.signals import HANDLED_SIGNALS, build_signal_exception, get_parent_variable, list_handled_signals

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT = 5.0  # seconds that ranks get to end by themselves once another has failed, and again after SIGTERM
# -P: a folder called megatron in the user's working directory must not stand in for ours.
WORKER = (sys.executable, "-P", "-m", "megatron.launch.worker")


def find_free_port() -> int:
    """A TCP port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        return listener.getsockname()[1]


def count_threads_per_process(ranks: int) -> int:
    """Threads that leave a core to each: two ranks with all cores each ran up to 30 times slower."""
    return max(1, count_cores() // ranks)


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
        command: what each rank runs, given the job's folder, the log and its rank as arguments.

    Returns:
        0, or 128 + n if signal n ended the run early.

    Raises:
        FarfieldError: the first cause of a failure, after all ranks have ended.
        KeyboardInterrupt, Stopped: a signal ended ranks that did not listen to it.
    """
    with tempfile.TemporaryDirectory(prefix="farfield-") as folder:
        job = Path(folder)
        if config.data.data_cache is None and config.checkpoint.save is None:
            config = config.replace(data_cache=str(job / "data_cache"))  # the ranks share one sample index
        write_text_atomically(job / CONFIG_FILE, config.to_yaml(only_set=True))
        first_rank = rank_infos[0].rank

        def report(index: int, code: int) -> dict[str, Any] | str:
            file = get_error_path(job, first_rank + index)
            return (
                json.loads(file.read_text(encoding="utf-8"))
                if file.is_file()
                else _describe_exit(first_rank + index, code, log)
            )

        starts = (partial(_start_rank, command, job, log, rank_info, address, port) for rank_info in rank_infos)
        return supervise(starts, report)


def supervise(
    starts: Iterable[Callable[[], subprocess.Popen[bytes]]], report: Callable[[int, int], dict[str, Any] | str]
) -> int:
    """Start children and watch them to their end; end all when one fails, and hand signals on.

    Args:
        starts: each starts a child.
        report: what the child of an index that ended with a code left: a report as `worker.main` writes it, or a line.

    Returns, Raises: as `run_ranks`.
    """
    children: list[subprocess.Popen[bytes]] = []
    with _SignalForwarding(children) as signals:
        try:
            for start in starts:
                if signals.first:
                    break
                children.append(start())
                if signals.first:  # it came while this child was started, and has told the others alone
                    children[-1].send_signal(signal.SIGTERM)
            stopped_early = bool(signals.first)
            ended = _wait_for_first_exit(children)
        finally:
            stopped = _stop_ranks(children)
    failed = {index for index, child in enumerate(children) if not _is_clean_exit(child.returncode)} - stopped
    if failed and not (signals.first and all(children[index].returncode < 0 for index in failed)):
        raise _find_root_cause({index: report(index, children[index].returncode) for index in failed}, ended)
    if signals.first and (failed or stopped_early):  # ranks that were ended before they listened have said nothing
        raise build_signal_exception(signals.first)
    if signals.first:
        return 128 + signals.first
    return max(child.returncode for child in children)


def _is_clean_exit(code: int) -> bool:
    """Did a rank do its work, or end in good order after a signal?"""
    return code in (0, *(128 + number for number in HANDLED_SIGNALS))


class _SignalForwarding:
    """While entered, hands signals that reach the launcher to the ranks; `first` is the number of the first."""

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self.first = 0
        self._children = children
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _SignalForwarding:
        if threading.current_thread() is threading.main_thread():  # only it may install handlers
            self._before = {signum: signal.signal(signum, self._forward) for signum in list_handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        if self.first and signum == signal.SIGHUP:
            return  # a terminal that closes may say so twice, and the ranks are saving
        kind = signal.SIGKILL if self.first else signal.SIGTERM
        self.first = self.first or signum
        for child in self._children:
            if child.poll() is None:
                child.send_signal(kind)


def _start_rank(
    command: Sequence[str], job: Path, log: Path, rank_info: RankInfo, address: str, port: int
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **rank_info.to_environment(address, port), **get_parent_variable()}
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


def _wait_for_first_exit(children: list[subprocess.Popen[bytes]]) -> dict[int, float]:
    """Wait until all have ended or one has failed and the others had their time; when each was seen to end."""
    ended: dict[int, float] = {}
    deadline: float | None = None
    while len(ended) < len(children):
        for rank, child in enumerate(children):
            if rank not in ended and child.poll() is not None:
                ended[rank] = time.time()
                if not _is_clean_exit(child.returncode) and deadline is None:
                    deadline = time.monotonic() + STOP_TIMEOUT
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return ended


def _stop_ranks(children: list[subprocess.Popen[bytes]]) -> set[int]:
    """End what still runs: SIGTERM, and SIGKILL for what does not listen. Returns their ranks."""
    running = {rank for rank, child in enumerate(children) if child.poll() is None}
    for kind in (signal.SIGTERM, signal.SIGKILL):
        left = [child for child in children if child.poll() is None]
        for child in left:
            child.send_signal(kind)
        deadline = time.monotonic() + STOP_TIMEOUT
        for child in left:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
    return running


def _find_root_cause(reports: dict[int, dict[str, Any] | str], ended: dict[int, float]) -> FarfieldError:
    """The error to report: what somebody wrote a message for, before a signal, before what nobody foresaw.

    When one rank goes, the others fail in their next collective; those failures say nothing.
    """
    candidates: list[tuple[int, float, FarfieldError]] = []
    for index, report in sorted(reports.items()):
        if isinstance(report, str):
            candidates.append((1, ended.get(index, time.time()), RunError(report)))
            continue
        priority = {"user": 0, "run": 0, "hang": 0, "unexpected": 2}[report["kind"]]
        error = ERROR_KINDS[report["kind"]](report["message"])
        if isinstance(error, UserError):
            error.key = report.get("key")
        candidates.append((priority, report["time"], error))
    return min(candidates, key=lambda item: item[:2])[2]


def _describe_exit(rank: int, code: int, log: Path) -> str:
    if code >= 0:
        return f"the process of rank {rank} ended with exit code {code}; see {log}"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"the process of rank {rank} was ended by {name}{hint}; see {log}"

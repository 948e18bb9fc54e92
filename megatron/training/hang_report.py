"""End of a run that hangs: every rank writes its stacks and last collectives, and one rank reports what all wait for.

The *reporter* is the rank that concludes that another rank hangs (`watchdog.py`): the first rank, or the second if the
first one hangs. Keys in the store:

    verdict    written by the reporter: its diagnosis, with one line and the ranks that are silent
    report     written by each rank after its stacks: the operation in which it waits
    wake       written by the reporter once all live ranks have reported: asks ranks to signal silent ones nearby
    line       written by the reporter: the diagnosis with all reports; a rank that reads it exits

The flight recorder of torch keeps the last 2,000 collectives of a process in memory, for NCCL and gloo
(`TORCH_FR_BUFFER_SIZE`), and is on by default. Its dump goes to the run's `stacks` folder too, in torch's own format:

    stacks/rank_3.txt           stacks of a rank's threads
    stacks/nccl_trace_rank_3    collectives over NCCL; compare all ranks with
                                `python -m torch.distributed.flight_recorder.fr_trace RUN/stacks --prefix
                                nccl_trace_rank_`
    stacks/gloo_trace_rank_3    the same for gloo
    stacks/waiting.txt          what each rank waits for
"""

import ctypes
import faulthandler
import itertools
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch._C import _distributed_c10d

from megatron.distributed.process_groups import HeartbeatStore, get_group_ranks
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.formatting import format_ranks
from megatron.utils.project import find_own_path

STACKS = "stacks"
"""Subfolder of the run's folder for the dumps of a hang. Those of earlier starts are in `stacks_1`, `stacks_2` …"""
DUMP_SIGNAL = signal.SIGUSR2
"""Signal that makes a watched rank write the stacks of its threads at any time."""
WRAPPERS = ("megatron/distributed/", "megatron/training/hang_report.py", "megatron/training/watchdog.py")
"""Our source files that issue collectives for other code."""
FLIGHT_RECORDERS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
"""Functions of torch that dump the flight recorder of each backend; a build without NCCL lacks the first."""
DTYPES = {
    "Long": "int64", "Int": "int32", "Byte": "uint8", "Float": "float32", "Double": "float64", "Half": "float16",
    "BFloat16": "bfloat16",
}  # fmt: skip
"""Python names of torch's data types, by the names in flight recorder entries."""
MAX_SHOWN = 4
"""Maximum number of groups of ranks in the line; `waiting.txt` lists all."""
WAITING_FILE = "waiting.txt"
"""File in the `stacks` folder that lists what each rank waits for."""

ResultT = TypeVar("ResultT")


class StacksFile:
    """File for the stacks of a rank's threads. It is opened before it is needed and removed if it stays empty.

    Args:
        folder: folder of the run; None writes to standard error.
        rank: rank of this process.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder = None if folder is None else folder / STACKS
        self.path = None if self.folder is None else self.folder / f"rank_{rank}.txt"
        self._file: Any = None

    def archive_earlier_folder(self) -> None:
        """Rename the `stacks` folder that an earlier, hung start of the run left behind."""
        if self.folder is None:
            return
        with suppress(OSError):
            if any(path.stat().st_size for path in self.folder.iterdir()):
                names = (self.folder.with_name(f"{STACKS}_{number}") for number in itertools.count(1))
                self.folder.rename(next(path for path in names if not path.exists()))

    def open(self) -> Any:
        """Return the open file."""
        if self.path is None:
            return sys.stderr
        while self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another rank may be removing the folder because it was empty
                self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        return self._file

    def install_handler(self) -> None:
        """Register a handler that writes the stacks on `DUMP_SIGNAL`, unless the signal already has another handler."""
        if self.path is not None and signal.getsignal(DUMP_SIGNAL) is signal.SIG_DFL:
            faulthandler.register(DUMP_SIGNAL, file=self.open(), all_threads=True)

    def is_empty(self) -> bool:
        """Return True if nothing has been written yet."""
        return self.path is None or not os.fstat(self.open().fileno()).st_size

    def close(self) -> None:
        """Close the file at the end of the run, and remove it if it is empty."""
        if self.path is None or self._file is None:
            return
        faulthandler.unregister(DUMP_SIGNAL)
        self._file.close()
        with suppress(OSError):  # other ranks exit at the same time, and only an empty folder can be removed
            if not self.path.stat().st_size:
                self.path.unlink()
                self.path.parent.rmdir()


@dataclass(frozen=True)
class HangDiagnosis:
    """Diagnosis of a hang: which ranks are silent, and which rank reports them."""

    line: str
    silent: tuple[int, ...]
    """Ranks that stopped sending heartbeats."""
    reporter: int
    """Rank that reports the hang."""
    time: float
    """Time of the diagnosis, in seconds since 1970."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "HangDiagnosis":
        """Parse the output of `to_json`."""
        values = json.loads(text)
        return HangDiagnosis(**{**values, "silent": tuple(values["silent"])})


@dataclass(frozen=True)
class RankReport:
    """State of one rank of a run that hangs."""

    location: str
    """Innermost line of our code on the stack of the main thread: `file:line function`."""
    collective: str | None = None
    """Description of the first pending collective, if any."""
    num_pending: int = 0
    """Number of pending collectives; with NCCL the host continues while its device waits."""

    def describe(self, is_single: bool) -> str:
        """Describe the rank, for example as waiting in a collective.

        The format is `waits in all_reduce of 4 int64 over gloo among ranks 0-1 (megatron/…/trainer.py:222 step)`.
        """
        if self.collective is None:
            return f"{'is' if is_single else 'are'} at {self.location}"
        behind = f", with {self.num_pending - 1} more pending" if self.num_pending > 1 else ""
        return f"{'waits' if is_single else 'wait'} in {self.collective}{behind} ({self.location})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "RankReport":
        """Parse the output of `to_json`."""
        return RankReport(**json.loads(text))


def build_rank_report(folder: Path | None, rank: int, until: float | None = None) -> RankReport:
    """Return the state of this process's main thread, and write its flight recorders to `folder` if it is given.

    `until` excludes collectives that started later, in seconds since 1970.
    """
    pending: list[dict[str, Any]] = []
    for backend, name in FLIGHT_RECORDERS.items():
        read: Callable[..., bytes] | None = getattr(_distributed_c10d, name, None)
        if read is None:
            continue
        dump = pickle.loads(read(includeCollectives=True, includeStackTraces=True, onlyActive=False))  # our own data
        entries = dump["entries"] = [
            entry for entry in dump.get("entries", []) if until is None or entry["time_created_ns"] <= 1e9 * until
        ]
        if not entries:
            continue
        for name, purpose in {entry["process_group"] for entry in entries}:  # torch records the groups of NCCL only
            ranks = json.dumps(get_group_ranks(name))
            dump["pg_config"].setdefault(name, {"name": name, "desc": purpose, "ranks": ranks})
        dump["pg_config"].pop("", None)
        if folder is not None:
            with suppress(OSError):
                (folder / f"{backend}_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
        pending += [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    location = _find_location(_list_main_frames())
    if not pending:
        return RankReport(location)
    first = min(pending, key=lambda entry: entry["time_created_ns"])
    frames = ((frame["filename"], frame["line"], frame["name"]) for frame in first.get("frames", []))
    return RankReport(_find_location(frames) or location, _describe_collective(first), len(pending))


def describe_reports(reports: Mapping[int, RankReport]) -> list[str]:
    """Return a sentence, without its period, per state of the ranks; the rarest states come first."""
    ranks: dict[RankReport, list[int]] = {}
    for rank, report in sorted(reports.items()):
        ranks.setdefault(report, []).append(rank)
    sentences = []
    for report, members in sorted(ranks.items(), key=lambda item: (len(item[1]), item[1])):
        subject = f"rank {members[0]}" if len(members) == 1 else f"ranks {format_ranks(members)}"
        sentences.append(f"{subject} {report.describe(len(members) == 1)}")
    return sentences


def _describe_collective(entry: Mapping[str, Any]) -> str:
    """Describe an entry of the flight recorder: `all_reduce of 4 int64 over gloo among ranks 0-1`."""
    backend, _, operation = entry["profiling_name"].partition(":")
    elements = 0
    for shape in entry["input_sizes"]:
        size = 1
        for length in shape:
            size *= length
        elements += size
    dtypes = dict.fromkeys(DTYPES.get(name, name) for name in entry["input_dtypes"])
    what = f" of {elements:,} {' and '.join(dtypes)}" if elements else ""
    ranks = get_group_ranks(entry["process_group"][0])
    among = f" among ranks {format_ranks(ranks)}" if ranks else ""
    return f"{operation}{what} over {backend}{among}"


def _list_main_frames() -> Iterable[tuple[str, int, str]]:
    """Yield file, line and function of the frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _find_location(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the innermost frame of our code that does not issue collectives for other code.

    Return the innermost frame of all if there is none.
    """
    innermost = ""
    for filename, line, function in frames:
        innermost = innermost or f"{filename}:{line} {function}"
        path = find_own_path(filename)
        if path is not None and not path.as_posix().startswith(WRAPPERS):
            return f"{path.as_posix()}:{line} {function}"
    return innermost


@dataclass
class HangReporter:
    """Reporter of one rank's state at the end of a run that hangs."""

    rank: int
    processes: list[tuple[str, int]]
    """Host name and process ID of each rank."""
    stacks: StacksFile
    grace: float
    """Time that ranks have for their reports, in seconds."""
    poll_interval: float
    """Interval at which a rank polls the store, in seconds."""

    def report(self, diagnosis: HangDiagnosis, store: HeartbeatStore) -> str:
        """Write the state of this rank and wait for the other ranks. Return the line that ends the run."""
        deadline = time.monotonic() + self.grace + 2 * self.poll_interval
        own = self._write(diagnosis)
        if 0 in diagnosis.silent and self.rank != 0:
            # The store belongs to the first rank: nothing can be written until it continues, or ever if it is dead.
            self._wake(diagnosis)
            answering = _call_within(self.grace, store.copy)
            if answering is None or self.rank != diagnosis.reporter:
                return diagnosis.line
            store = answering
            store.set("verdict", diagnosis.to_json(), rank=0)
        try:
            store.set("report", own.to_json())
            if self.rank != diagnosis.reporter:
                return self._wait_for_line(diagnosis, store, deadline + 4 * self.poll_interval + 2)
            line = self._collect(diagnosis, own, store, deadline)
            store.set("line", line, rank=0)
        except Exception:  # the store is dead
            return diagnosis.line
        return line

    def _wait_for_line(self, diagnosis: HangDiagnosis, store: HeartbeatStore, deadline: float) -> str:
        """Wait for the reporter's line. Meanwhile wake the silent ranks of this machine when the reporter asks."""
        has_woken = False
        while time.monotonic() < deadline:
            if not has_woken and store.get("wake") is not None:
                self._wake(diagnosis)
                has_woken = True
            if (line := store.get("line")) is not None:
                return line
            time.sleep(self.poll_interval / 4)
        return diagnosis.line

    def _collect(self, diagnosis: HangDiagnosis, own: RankReport, store: HeartbeatStore, deadline: float) -> str:
        """Collect the reports of all ranks that answer, and return the diagnosis with them."""
        reports, ranks = {self.rank: own}, set(range(store.world_size))
        alive, has_woken = ranks - {*diagnosis.silent}, 0 in diagnosis.silent
        while ranks != reports.keys() and time.monotonic() < deadline:
            for rank in sorted(ranks - reports.keys()):
                if (text := store.get("report", rank)) is not None:
                    reports[rank] = RankReport.parse(text)
            if not has_woken and (alive <= reports.keys() or time.monotonic() + self.poll_interval > deadline):
                # Not earlier: once woken, a stopped rank could release other ranks from their waits.
                has_woken = True
                store.set("wake", "yes", rank=0)
                self._wake(diagnosis)
                deadline = time.monotonic() + 3 * self.poll_interval + 1
            time.sleep(self.poll_interval / 4)
        # The current state of a silent rank does not show where it hung.
        sentences = describe_reports({rank: report for rank, report in reports.items() if rank in alive})
        line = "; ".join([diagnosis.line, *sentences[:MAX_SHOWN]])
        line += f"; and {len(sentences) - MAX_SHOWN} more" if len(sentences) > MAX_SHOWN else ""
        if self.stacks.folder is None:
            return line
        with suppress(OSError):
            write_text_atomically(self.stacks.folder / WAITING_FILE, "\n".join([diagnosis.line, *sentences]) + "\n")
        return f"{line}; stacks and last collectives of the ranks are in {self.stacks.folder}"

    def _write(self, diagnosis: HangDiagnosis) -> RankReport:
        """Write the stacks of this rank's threads and its last collectives, and return its state."""
        is_silent = self.rank in diagnosis.silent
        if not is_silent or self.stacks.is_empty():
            # A stopped rank has written its unchanged stacks when it continued.
            faulthandler.dump_traceback(file=self.stacks.open(), all_threads=True)
        return build_rank_report(self.stacks.folder, self.rank, until=diagnosis.time if is_silent else None)

    def _wake(self, diagnosis: HangDiagnosis) -> None:
        """Make the silent ranks of this machine write their stacks and continue.

        Only the first live rank of the machine does this.
        """
        machine = self.processes[self.rank][0]
        here = [rank for rank, (name, _) in enumerate(self.processes) if name == machine]
        if next((rank for rank in here if rank not in diagnosis.silent), None) != self.rank:
            return
        for rank in {*here} & {*diagnosis.silent}:
            process = self.processes[rank][1]
            with suppress(OSError):
                _signal_main_thread(process, DUMP_SIGNAL)
                os.kill(process, signal.SIGCONT)


def _signal_main_thread(process: int, number: int) -> None:
    """Send a signal to the main thread of a process, which has the ID of the process.

    A signal to the process goes to any of its threads once a stopped process continues, and by then the main thread may
    be elsewhere.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc 2.30 and later
    if tgkill is None or tgkill(process, process, number):
        os.kill(process, number)


def _call_within(seconds: float, function: Callable[[], ResultT]) -> ResultT | None:
    """Return the result of a function, or None if it fails or takes too long: a stopped store never answers."""
    results: list[ResultT] = []

    def call() -> None:
        with suppress(Exception):
            results.append(function())

    thread = threading.Thread(target=call, name="watch-call", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None

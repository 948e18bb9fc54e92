"""Parallel execution of a sweep's members in worker processes.

A worker trains a member in a subprocess, like `member_run.py`, and evaluates it itself, so it imports torch only once
for all of its members. It uses its share of the machine's cores. Over a pipe it receives members and sends job progress
and, at the end, the member's records or error.

Workers have their own sessions: Ctrl-C reaches only the sweep, which sends them SIGTERM. A worker then stops its
training, which saves after its current step, and exits. A worker whose sweep has died does the same
(`utils/signals.py`).
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from megatron.distributed.hardware import count_cores
from megatron.reports.records import Record
from megatron.sweeps.member_run import run_member
from megatron.sweeps.remaining_work import MemberWork
from megatron.sweeps.spec import SweepMember
from megatron.utils.errors import FarfieldError, RunError, forbid_exits
from megatron.utils.imports import SAFE_PATH_VARIABLE
from megatron.utils.progress import ProgressMeter, WorkItem
from megatron.utils.project import join_python_path
from megatron.utils.signals import (
    StoppedBySignal,
    convert_signals_to_exceptions,
    exit_with_parent,
    get_parent_variable,
)

UPDATE_SECONDS = 0.5
"""Minimum time between two progress messages, in seconds."""
Outcome = list[Record] | FarfieldError


def run_members(
    pending: Mapping[SweepMember, MemberWork], meter: ProgressMeter, num_workers: int
) -> Iterator[tuple[SweepMember, Outcome]]:
    """Run members and yield each with its records or its error as soon as it has ended.

    A branch waits for the run that it continues from, and members with the same run folder wait for each other. In
    parallel runs, members with the most work start first, so that no long one remains at the end.

    Args:
        pending: members and their remaining work.
        meter: receives the progress of their jobs.
        num_workers: number of parallel processes; with 1, everything runs in this process.
    """
    if num_workers == 1:
        for member, work in pending.items():
            yield member, _run_to_outcome(member, work, meter)
        return
    waiting = sorted(pending, key=lambda member: -sum(item.work for item in pending[member].items))
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.member is not None for worker in workers):
            running = [worker.member for worker in workers if worker.member is not None]
            while len(running) < num_workers and (chosen := _choose_next(waiting, running)) is not None:
                waiting.remove(chosen)
                running.append(chosen)
                free = next((worker for worker in workers if worker.member is None), None)
                if free is None:
                    free = _Worker.start(max(1, count_cores() // num_workers))
                    workers.append(free)
                free.assign(chosen, pending[chosen])
            for connection in wait([worker.connection for worker in workers if worker.member is not None]):
                worker = next(worker for worker in workers if worker.connection is connection)
                outcome = worker.receive(meter)
                if outcome is None:
                    continue
                assert worker.member is not None
                yield worker.member, outcome
                worker.member = None
                if worker.process.poll() is not None:
                    workers.remove(worker)
    finally:
        _stop_workers(workers)


def _run_to_outcome(member: SweepMember, work: MemberWork, meter: Any) -> Outcome:
    try:
        with forbid_exits():
            return run_member(member, work, meter)
    except FarfieldError as error:
        return error


def _choose_next(waiting: list[SweepMember], running: list[SweepMember]) -> SweepMember | None:
    """Return the first member that does not depend on an unfinished one."""
    unfinished = {id(member) for member in (*waiting, *running)}
    folders = {member.folder for member in running}
    for member in waiting:
        if member.folder not in folders and (member.trunk is None or id(member.trunk) not in unfinished):
            return member
    return None


@dataclass
class _Worker:
    """Worker process, as seen by the sweep."""

    process: subprocess.Popen[bytes]
    connection: Connection
    member: SweepMember | None = None
    """Member that it is running, or None."""
    jobs: Mapping[str, WorkItem] | None = None

    @classmethod
    def start(cls, num_threads: int) -> "_Worker":
        here, there = Pipe()
        environment = {"OMP_NUM_THREADS": str(num_threads), **os.environ, **get_parent_variable()}
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron.sweeps.worker_pool", str(there.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            env=environment | SAFE_PATH_VARIABLE | {"PYTHONPATH": join_python_path()},
            start_new_session=True,
        )
        there.close()
        return cls(process, here)

    def assign(self, member: SweepMember, work: MemberWork) -> None:
        self.member, self.jobs = member, {job.name: job for job in work.items}
        self.connection.send_bytes(pickle.dumps((member, work)))

    def receive(self, meter: ProgressMeter) -> Outcome | None:
        """Forward one message. Returns the member's outcome if the message contains it."""
        assert self.jobs is not None
        try:
            what, *arguments = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return RunError(f"its process died with exit code {self.process.wait()}")
        if what == "outcome":
            return arguments[0]
        if what == "log":
            meter.log(*arguments)
            return None
        job = self.jobs[arguments[0]]
        if what == "begin":
            meter.begin(job, arguments[1])
        elif what == "update":
            meter.update(arguments[1], arguments[2], job)
        elif what == "finish":
            meter.finish(job)
        else:
            meter.skip(job)
        return None


def _stop_workers(workers: list[_Worker]) -> None:
    """Stop all workers; those that are training wait until their training has saved."""
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.terminate() if worker.member is not None else worker.connection.close()
    try:
        for worker in workers:
            worker.process.wait()
    except BaseException:  # a second signal
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
        raise


class _MessageMeter:
    """Meter in a worker that sends job progress to the sweep."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.job: WorkItem | None = None
        self._sent_at = 0.0

    def begin(self, job: WorkItem, detail: str = "") -> None:
        self.job, self._sent_at = job, 0.0
        self.send("begin", job.name, detail)

    def update(self, done: float, detail: str = "") -> None:
        assert self.job is not None
        if time.monotonic() - self._sent_at >= UPDATE_SECONDS:
            self._sent_at = time.monotonic()
            self.send("update", self.job.name, done, detail)

    def finish(self) -> None:
        assert self.job is not None
        self.send("finish", self.job.name)

    def skip(self, job: WorkItem) -> None:
        self.send("skip", job.name)

    def log(self, line: str) -> None:
        self.send("log", line)

    def send(self, *message: object) -> None:
        self.connection.send_bytes(pickle.dumps(message))


def main(descriptor: int) -> None:
    """Run members received from the pipe until it is closed."""
    exit_with_parent()
    connection = Connection(descriptor)
    meter = _MessageMeter(connection)
    try:
        with convert_signals_to_exceptions():
            while True:
                member, work = pickle.loads(connection.recv_bytes())
                meter.send("outcome", _run_to_outcome(member, work, meter))
    except EOFError:
        pass  # no more members
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the sweep has died
    except StoppedBySignal as stop:
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main(int(sys.argv[1]))

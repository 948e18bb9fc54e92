"""Members of a sweep that run at once, each in a worker: a process that takes one member after the other.

A worker trains a member by a process of its own, as `member_run.py` does, and evaluates it itself, so it imports torch
once for all of its members. It has its share of the machine's cores. Over a pipe it is sent members, and it sends what
there is to tell of their jobs, and in the end their records or their error.

Workers have sessions of their own: Ctrl-C reaches the sweep alone, which ends them by SIGTERM. A worker then ends its
training, which saves after its step, and itself. A worker whose sweep is gone does the same (`utils/signals.py`).
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
from pathlib import Path
from typing import Any

from megatron.distributed.hardware import count_cores
from megatron.reports.records import Record
from megatron.sweeps.member_run import run_member
from megatron.sweeps.remaining_work import MemberWork
from megatron.sweeps.spec import SweepMember
from megatron.utils.errors import FarfieldError, RunError, refuse_exits
from megatron.utils.imports import SAFE_PATH_VARIABLE
from megatron.utils.progress import ProgressMeter, WorkItem
from megatron.utils.signals import (
    StoppedBySignal,
    end_with_parent,
    get_parent_variable,
    raising_on_signals,
)

ROOT = Path(__file__).resolve().parents[2]
UPDATE_SECONDS = 0.5
"""Between two messages on how far a job is."""
Outcome = list[Record] | FarfieldError


def run_members(
    pending: Mapping[SweepMember, MemberWork], meter: ProgressMeter, num_workers: int
) -> Iterator[tuple[SweepMember, Outcome]]:
    """Run members, and yield each with its records or its error as soon as it has ended.

    A branch waits for the run that it goes on from, and members that share a run folder for each other. Where several
    run at once, those with the most work begin, so that no long one is left alone at the end.

    Args:
        pending: the members, and what is left to do for them.
        meter: is told of their jobs.
        num_workers: processes at once; with 1 all runs in this process.
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
        with refuse_exits():
            return run_member(member, work, meter)
    except FarfieldError as error:
        return error


def _choose_next(waiting: list[SweepMember], running: list[SweepMember]) -> SweepMember | None:
    """The first member that needs nothing which is still to be trained."""
    unfinished = {id(member) for member in (*waiting, *running)}
    folders = {member.folder for member in running}
    for member in waiting:
        if member.folder not in folders and (member.trunk is None or id(member.trunk) not in unfinished):
            return member
    return None


@dataclass
class _Worker:
    """A worker as the sweep sees it."""

    process: subprocess.Popen[bytes]
    connection: Connection
    member: SweepMember | None = None
    """That it runs."""
    jobs: Mapping[str, WorkItem] | None = None

    @classmethod
    def start(cls, num_threads: int) -> "_Worker":
        here, there = Pipe()
        environment = {"OMP_NUM_THREADS": str(num_threads), **os.environ, **get_parent_variable()}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron.sweeps.worker_pool", str(there.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            env=environment | SAFE_PATH_VARIABLE | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        there.close()
        return cls(process, here)

    def assign(self, member: SweepMember, work: MemberWork) -> None:
        self.member, self.jobs = member, {job.name: job for job in work.items}
        self.connection.send_bytes(pickle.dumps((member, work)))

    def receive(self, meter: ProgressMeter) -> Outcome | None:
        """Pass one message on. Returns what the member ended with, if it is that."""
        assert self.jobs is not None
        try:
            what, *arguments = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return RunError(f"its process ended with exit code {self.process.wait()}")
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
    """End all workers; those that train wait until their training has saved."""
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
    """In a worker: sends what there is to tell of jobs."""

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
    """Take members from the pipe until it is closed."""
    end_with_parent()
    connection = Connection(descriptor)
    meter = _MessageMeter(connection)
    try:
        with raising_on_signals():
            while True:
                member, work = pickle.loads(connection.recv_bytes())
                meter.send("outcome", _run_to_outcome(member, work, meter))
    except EOFError:
        pass  # nothing more to do
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the sweep is gone
    except StoppedBySignal as stop:
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main(int(sys.argv[1]))

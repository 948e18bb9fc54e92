"""Train on this machine.

A process that srun, mpirun or torchrun started is one rank of a run. Otherwise one rank runs in this process, and
several are started as processes (`num_gpus`, on a CPU too). They meet over NCCL on GPUs and gloo on CPUs. What can be
known to fail was refused before (`megatron.training.preflight`), and torch is imported only by a process that trains.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.checkpoint.lock import LOCK
from megatron.checkpoint.run_files import refuse_files_of_others
from megatron.config.schema import Config
from megatron.data.paths import SPLITS, split_prefixes
from megatron.distributed.place import Place
from megatron.distributed.surroundings import ADDRESS, Started, job_line
from megatron.errors import FarfieldError, RunError, UserError
from megatron.files import make_folder, remove_empty
from megatron.launch import worker
from megatron.launch.console import temporary_log
from megatron.launch.processes import free_port, run_processes, threads_per_process
from megatron.stopping.parent import end_with_parent
from megatron.stopping.signals import Stopped, cleaned_up
from megatron.training.preflight import Settled
from megatron.training.records import HEARTBEAT, METRICS
from megatron.training.wandb_login import check_login

LOG_FILE = "log.txt"


def train(settled: Settled, started: Started | None = None) -> int:
    """Train as a configuration says that was settled for this machine, with one process or several.

    Args:
        settled: what to train.
        started: this process's place, if it was started as one of several.

    Returns:
        0, or 128 + n if signal n ended the run early (it saved a checkpoint first).

    Raises:
        UserError: the data do not fit the configuration; nothing is left behind.
        RunError: something failed while running.
    """
    end_with_parent()
    config, world = settled.config, settled.world
    assert world is not None, "a dry run is not for training"
    check_data(config)
    check_save(config)
    check_login(config.logging)
    place = Place() if started is None else started.place
    with run_log(config, place.rank == 0) as log:
        if started is not None:
            threads = os.environ.get("OMP_NUM_THREADS") or str(started.cores or threads_per_process(place.here))
            with _environment({"OMP_NUM_THREADS": threads, **started.variables()}):
                return worker.run(config, log, place.rank)
        port = config.launch.master_port or free_port()
        if world > 1:
            places = [Place(rank, world, rank) for rank in range(world)]
            return run_processes(config, log, places, ADDRESS, port)
        with _environment(place.variables(ADDRESS, port)):
            return worker.run(config, log, 0)


def check_data(config: Config) -> None:
    """Missing files are told before torch is imported, or a job is submitted. Raises UserError."""
    for split in SPLITS:
        split_prefixes(config.data, split)


def check_save(config: Config) -> None:
    """Files of others in the run's folder are told before anything is written there. Raises UserError."""
    refuse_files_of_others(config.checkpoint.save, (METRICS, HEARTBEAT))


@contextmanager
def told_once(started: Started | None) -> Iterator[None]:
    """Errors of ranks that somebody else started, who shows what all of them write.

    What the user wrote is wrong for all of them: the first of each machine tells it. What went wrong while running is
    told with the rank.
    """
    try:
        yield
    except FarfieldError as error:
        if started is None or started.place.rank == 0:
            raise
        if not isinstance(error, UserError):
            raise type(error)(f"rank {started.place.rank}: {error}") from error
        if started.place.local_rank == 0:
            raise
        raise SystemExit(error.exit_code) from error


@contextmanager
def run_log(config: Config, first: bool) -> Iterator[Path]:
    """The run's log file. Without a run folder it is temporary and stays only if something unexpected happened.

    first: does this process write the first line of it?
    """
    if config.checkpoint.save is None:
        with temporary_log() as log:
            _open_log(log, first)
            yield log
        return
    folder = Path(config.checkpoint.save)
    made = make_folder("save", folder)
    log = folder / LOG_FILE
    new = not log.exists()

    def leave_nothing() -> None:
        """Leave no folder behind that holds no more than this."""
        if new and {path.name for path in folder.iterdir()} <= {LOG_FILE, LOCK}:
            for name in (LOG_FILE, LOCK):
                (folder / name).unlink(missing_ok=True)
            remove_empty(made)

    try:
        with cleaned_up(leave_nothing):
            _open_log(log, first)
            yield log
    except (UserError, KeyboardInterrupt, Stopped):  # what the user wrote cannot be done, or nothing was
        leave_nothing()
        raise


def _open_log(log: Path, first: bool) -> None:
    job = f" ({text})" if (text := job_line()) else ""
    try:
        with open(log, "a", encoding="utf-8") as file:
            if first:
                file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}{job}\n")
    except OSError as error:
        raise RunError(f"{log}: cannot be written: {error.strerror}") from error


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

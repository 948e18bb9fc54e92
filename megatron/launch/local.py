"""Train on this machine.

One rank runs in this process; several are started as processes (`num_gpus`, on a CPU too), which meet over NCCL on GPUs
and gloo on CPUs. What can be known to fail was refused before (`megatron.training.preflight`), and torch is imported
only by a process that trains.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatron.checkpoint.lock import LOCK
from megatron.config.schema import Config
from megatron.data.paths import SPLITS, split_prefixes
from megatron.errors import RunError, UserError
from megatron.files import make_folder, remove_empty
from megatron.launch import worker
from megatron.launch.console import temporary_log
from megatron.launch.parent import end_with_parent
from megatron.launch.processes import ADDRESS, free_port, run_processes
from megatron.parallel.place import Place
from megatron.training.preflight import Settled
from megatron.training.signals import heard

LOG_FILE = "log.txt"


def train(settled: Settled) -> int:
    """Train as a configuration says that was settled for this machine, with one process or several.

    Returns:
        0, or 128 + n if signal n ended the run early (it saved a checkpoint first).

    Raises:
        UserError: the data do not fit the configuration; nothing is left behind.
        RunError: something failed while running.
    """
    end_with_parent()
    config, world = settled.config, settled.world
    assert world is not None, "a dry run is not for training"
    for split in SPLITS:
        split_prefixes(config.data, split)  # missing files are told before torch is imported
    port = config.launch.master_port or free_port()
    with _log(config) as log:
        if world > 1:
            return run_processes(config, log, world, port)
        with terminable(), _environment(Place().variables(ADDRESS, port)):
            return worker.run(config, log, 0)


@contextmanager
def _log(config: Config) -> Iterator[Path]:
    """The run's log file. Without a run folder it is temporary and stays only if something unexpected happened."""
    if config.checkpoint.save is None:
        with temporary_log() as log:
            _open_log(log)
            yield log
        return
    folder = Path(config.checkpoint.save)
    made = make_folder("save", folder)
    log = folder / LOG_FILE
    new = not log.exists()
    try:
        _open_log(log)
        yield log
    except UserError:
        # What the user wrote cannot be done: leave no folder behind that holds nothing but the refusal.
        if new and {path.name for path in folder.iterdir()} <= {LOG_FILE, LOCK}:
            for name in (LOG_FILE, LOCK):
                (folder / name).unlink(missing_ok=True)
            remove_empty(made)
        raise


def _open_log(log: Path) -> None:
    try:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}\n")
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


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that children are ended and temporary files removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in heard() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

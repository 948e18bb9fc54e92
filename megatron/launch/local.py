"""Train on this machine.

One rank runs in this process; several are started as processes (`num_gpus`, on a CPU too), which meet over NCCL on GPUs
and gloo on CPUs. What can be known to fail is refused here, before torch is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron.checkpoint.lock import LOCK
from megatron.config.ranks import with_batch
from megatron.config.schema import Config
from megatron.data.paths import SPLITS, split_prefixes
from megatron.errors import RunError, UserError
from megatron.files import check_folder
from megatron.launch import devices, worker
from megatron.launch.console import temporary_log
from megatron.launch.parent import end_with_parent
from megatron.launch.processes import free_port, rendezvous, run_processes
from megatron.training.signals import heard

LOG_FILE = "log.txt"


@dataclass(frozen=True)
class Resolved:
    """A configuration settled for this machine."""

    config: Config
    ranks: int
    notes: tuple[str, ...]


def train(config: Config) -> int:
    """Train as the configuration says, with one process or several.

    Returns:
        0, or 128 + n if signal n ended the run early (it saved a checkpoint first).

    Raises:
        UserError: the machine or the data do not fit the configuration; nothing is left behind.
        RunError: something failed while running.
    """
    end_with_parent()
    resolved = resolve(config)
    config, ranks = resolved.config, resolved.ranks
    for split in SPLITS:
        split_prefixes(config.data, split)  # missing files are told before torch is imported
    port = config.launch.master_port or free_port()
    with _log(config) as log:
        if ranks > 1:
            return run_processes(config, log, ranks, port)
        with terminable(), _environment(rendezvous(0, 1, port)):
            return worker.run(config, log, 0)


def resolve(config: Config) -> Resolved:
    """Settle device, backend, processes and batch for this machine.

    Raises:
        UserError: a device that is not there, a precision it cannot do, a batch that does not divide, no data.
    """
    launch, data = config.launch, config.data
    gpus = devices.count_gpus() if launch.device != "cpu" else 0
    if launch.device == "cuda" and gpus == 0:
        raise UserError("device is cuda, but there is no CUDA device here (or torch was built without CUDA)")
    device = "cuda" if gpus else "cpu"
    ranks = launch.num_gpus or gpus or 1
    if gpus and ranks > gpus:
        have = "1 GPU is" if gpus == 1 else f"{gpus} GPUs are"
        raise UserError(f"num_gpus is {ranks}, but {have} here; use at most that many, or device: cpu")
    most = devices.most_processes_on_cpu()
    if device == "cpu" and ranks > most:
        cores = devices.count_cores()
        have = "1 CPU core is" if cores == 1 else f"{cores} CPU cores are"
        raise UserError(
            f"num_gpus is {ranks}, but {have} here and there is no GPU to use; use at most {most}, "
            f"{devices.PROCESSES_PER_CORE} per core"
        )
    if config.training.precision == "fp16" and device == "cpu":
        raise UserError("precision is fp16, which needs a GPU, and there is none here; use precision=bf16 or fp32")
    if data.data_path is None and not data.train_data_paths:
        raise UserError("no data to train on: give train_data_paths or data_path; `./deepy.py prepare` makes a corpus")
    notes = []
    backend = "gloo" if device == "cpu" or launch.distributed_backend == "gloo" else "nccl"
    if launch.distributed_backend not in ("auto", backend):  # GPT-NeoX's files say nccl everywhere
        notes.append(f"distributed_backend {launch.distributed_backend} needs GPUs; {backend} is used on this machine")
    if config.checkpoint.save is None:
        notes.append("save is not set: this run will leave no checkpoints, metrics or log behind")
    config = config.replace(device=device, num_gpus=ranks, distributed_backend=backend)
    return Resolved(with_batch(config, ranks), ranks, tuple(notes))


@contextmanager
def _log(config: Config) -> Iterator[Path]:
    """The run's log file. Without a run folder it is temporary and stays only if something unexpected happened."""
    if config.checkpoint.save is None:
        with temporary_log() as log:
            _open_log(log)
            yield log
        return
    folder = Path(config.checkpoint.save)
    made = _make_folder(folder)
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
            for path in made:
                path.rmdir()
        raise


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; returns those that are new, the innermost first."""
    check_folder("save", folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"save: {folder} cannot be made: {error.strerror}") from error
    return missing


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

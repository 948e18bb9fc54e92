"""Training on this machine.

A process started by srun, mpirun or torchrun is one rank of a run. Otherwise, a single rank runs in this process, and
several ranks are started as processes (`num_gpus`, also on a CPU). They communicate over NCCL on GPUs and gloo on CPUs.
The configuration was already resolved for all ranks of this machine, and predictable failures were rejected
(`megatron.training.resolve_run`). Only processes that train import torch.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint import run_folder
from megatron.config.execution import ResolvedRun
from megatron.config.schema import Config
from megatron.distributed.launcher_environment import ADDRESS, LaunchContext, RankInfo, describe_job, find_free_port
from megatron.launch import worker
from megatron.launch.rank_group import count_threads_per_process, run_ranks
from megatron.training.metrics_log import read_heartbeat
from megatron.utils.atomic_io import LOCK, is_lock_held, make_folder, remove_empty_folders
from megatron.utils.console import temporary_log
from megatron.utils.errors import FarfieldWarning, RunError, UserError
from megatron.utils.signals import StoppedBySignal, clean_up_on_signal, exit_with_parent

if TYPE_CHECKING:
    from megatron.training.trainer import TrainingHooks

LOG_FILE = "log.txt"


def train_on_this_machine(
    resolved: ResolvedRun, launch_context: LaunchContext | None = None, hooks: TrainingHooks | None = None
) -> int:
    """Train a run that was resolved for this machine, with one or more processes.

    Args:
        resolved: run to train, after `check_environment`.
        launch_context: environment of the launcher that started this process as one of several, if any.
        hooks: hooks of a Python caller, for this process only.

    Returns:
        0, or 128 + n if signal n ended the run early (after saving a checkpoint).

    Raises:
        UserError: the data do not match the configuration; no files are left behind.
        RunError: an error while running.
    """
    exit_with_parent()
    config, world_size = resolved.config, resolved.world_size
    assert world_size is not None, "a dry run is not for training"
    if launch_context is None and config.checkpoint.save is not None:
        _wait_for_folder(Path(config.checkpoint.save))
    rank_info = RankInfo() if launch_context is None else launch_context.rank_info
    # PyTorch, DeepSpeed and the data loader would otherwise create a context on each GPU of the machine.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if config.launch.device == "cpu" else {}
    with _set_environment(hidden), open_run_log(config, rank_info.rank == 0) as log:
        if launch_context is not None:
            threads = os.environ.get("OMP_NUM_THREADS") or str(
                launch_context.cores or count_threads_per_process(rank_info.ranks_on_node)
            )
            with _set_environment(
                {"OMP_NUM_THREADS": threads, **launch_context.to_environment(config.launch.master_port)}
            ):
                return worker.run_rank(config, log, rank_info, hooks=hooks)
        port = config.launch.master_port or find_free_port()
        if world_size > 1:
            assert hooks is None, "they would not reach the processes that are started here"
            rank_infos = [RankInfo(rank, world_size, rank) for rank in range(world_size)]
            return run_ranks(config, log, rank_infos, ADDRESS, port)
        with _set_environment(rank_info.to_environment(ADDRESS, port)):
            return worker.run_rank(config, log, rank_info, hooks=hooks)


def _wait_for_folder(folder: Path) -> None:
    """Wait briefly for another run that is ending in the folder, before torch is imported.

    The lock is acquired later, once all processes are connected; until then another run may acquire it.

    Raises:
        UserError: another run is using the folder.
    """
    deadline = time.monotonic() + run_folder.LOCK_TIMEOUT
    is_reported = False
    while is_lock_held(folder / LOCK):
        if time.monotonic() > deadline or _is_writer_alive(folder):
            raise UserError(f"save: {folder}: {run_folder.BUSY}")
        if not is_reported:
            line = f"save: {folder}: another run is starting or ending there; waiting {run_folder.LOCK_TIMEOUT:.0f} s"
            warnings.warn(line, FarfieldWarning, stacklevel=2)
            is_reported = True
        time.sleep(0.05)


def _is_writer_alive(folder: Path) -> bool:
    """Return True if the process training in a folder is alive on this machine.

    Remaining processes of a killed run may keep the folder's lock for a moment longer.
    """
    try:
        beat = read_heartbeat(folder)
        if beat["host"] != socket.gethostname():
            return False
        os.kill(int(beat["process"]), 0)
    except (OSError, ValueError, KeyError, TypeError):  # missing, or not written by a run
        return False
    return True


@contextmanager
def open_run_log(config: Config, is_main: bool) -> Iterator[Path]:
    """Open the run's log file.

    Without a run folder, it is temporary and kept only after an unexpected error.

    is_main: True if this process writes the header line.
    """
    if config.checkpoint.save is None:
        with temporary_log() as log:
            _begin_log(log, is_main)
            yield log
        return
    folder = Path(config.checkpoint.save)
    created = make_folder("save", folder)
    log = folder / LOG_FILE
    is_new = not log.exists()

    def remove_unused_folder() -> None:
        """Delete the folder if it contains nothing but these files."""
        if is_new and folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOG_FILE, LOCK}:
            for name in (LOG_FILE, LOCK):
                (folder / name).unlink(missing_ok=True)
            remove_empty_folders(created)

    try:
        with clean_up_on_signal(remove_unused_folder):
            _begin_log(log, is_main)
            yield log
    except (UserError, KeyboardInterrupt, StoppedBySignal):  # user errors, or stopped before any result
        if not is_lock_held(folder / LOCK):  # by another run, which started at the same time and needs these files
            remove_unused_folder()
        raise


def _begin_log(log: Path, is_main: bool) -> None:
    job = f" ({text})" if (text := describe_job()) else ""
    try:
        with open(log, "a", encoding="utf-8") as file:
            if is_main:
                file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}{job}\n")
    except OSError as error:
        raise RunError(f"{log}: cannot be written: {error.strerror}") from error


@contextmanager
def _set_environment(values: dict[str, str]) -> Iterator[None]:
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

"""What a process holds while a run lasts: the run's folder, its place among the other processes, its random states."""

import os
from dataclasses import dataclass

import torch

from megatron.checkpoint.lock import RunLock
from megatron.config.ranks import mesh_sizes
from megatron.config.schema import Config
from megatron.distributed import seeds
from megatron.distributed.place import Place
from megatron.distributed.processes import Processes, join
from megatron.errors import FarfieldError


@dataclass(frozen=True)
class Session:
    """One process's part in a run."""

    processes: Processes
    lock: RunLock | None
    """Keeps other runs out of the folder; the first process has it, if anything is saved."""

    def close(self) -> None:
        """Let others have the folder."""
        if self.lock is not None:
            self.lock.release()


def begin(config: Config, place: Place) -> Session:
    """Meet the other processes, take the folder, and settle how torch computes. All processes must call this.

    Raises:
        UserError: another run is writing in the folder.
        RunError: the folder cannot be written, the device cannot be used, or the others cannot be reached.
    """
    launch = config.launch
    processes = join(place, mesh_sizes(config, place.world), device=launch.device, backend=launch.distributed_backend)
    # Before anything in the folder is looked at, and after all have met: who waited for one that was refused here, and
    # left, would keep its machines for as long as it has patience.
    lock = _take(config.checkpoint.save, processes)
    try:
        _determinism(config.training.deterministic)
        seeds.seed_torch(seeds.seed_of(config.training.seed, "initialization", processes.mesh))
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return Session(processes, lock)


def _take(save: str | None, processes: Processes) -> RunLock | None:
    """Take the run's folder, in the first process. Raises its error in all."""
    lock, refused = None, None
    if save is not None and processes.first:
        try:
            lock = RunLock(save)
        except FarfieldError as error:
            refused = error
    found = processes.gather(refused)[0]
    if found is not None:
        raise found
    return lock


def _determinism(deterministic: bool) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = deterministic

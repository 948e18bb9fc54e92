"""What a process holds while a run lasts: the run's folder, its place among the other processes, its random states."""

import os
from dataclasses import dataclass

import torch

from megatron.checkpoint.lock import RunLock
from megatron.config.ranks import mesh_sizes
from megatron.config.schema import Config
from megatron.parallel import seeds
from megatron.parallel.place import Place
from megatron.parallel.processes import Processes, join


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
    """Take the folder, meet the other processes, and settle how torch computes. All processes must call this.

    Raises:
        UserError: another run is writing in the folder.
        RunError: the folder cannot be written, the device cannot be used, or the others cannot be reached.
    """
    # The folder first: what is there must not change any more once it was looked at.
    saves = config.checkpoint.save is not None and place.rank == 0
    lock = RunLock(config.checkpoint.save) if saves else None  # type: ignore[arg-type]
    try:
        launch = config.launch
        sizes = mesh_sizes(config, place.world)
        processes = join(place, sizes, device=launch.device, backend=launch.distributed_backend)
        _determinism(config.training.deterministic)
        seeds.seed_torch(seeds.seed_of(config.training.seed, "initialization", processes.mesh))
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return Session(processes, lock)


def _determinism(deterministic: bool) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = deterministic

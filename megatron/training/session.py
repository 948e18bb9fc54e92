"""What a process holds while a run lasts: the run's folder, its place among the other processes, its random states."""

import os
from dataclasses import dataclass

import torch

from megatron.checkpoint.run_folder import RunLock
from megatron.config.ranks import resolve_mesh_shape
from megatron.config.schema import Config
from megatron.distributed import rng
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.process_groups import ProcessGroups, init_distributed
from megatron.utils.errors import FarfieldError


@dataclass(frozen=True)
class TrainingSession:
    """One process's part in a run."""

    groups: ProcessGroups
    lock: RunLock | None
    """Keeps other runs out of the folder; the first process has it, if anything is saved."""

    def close(self) -> None:
        """Let others have the folder."""
        if self.lock is not None:
            self.lock.release()


def begin_session(config: Config, rank_info: RankInfo) -> TrainingSession:
    """Meet the other processes, take the folder, and settle how torch computes. All processes must call this.

    Raises:
        UserError: another run is writing in the folder.
        RunError: the folder cannot be written, the device cannot be used, or the others cannot be reached.
    """
    launch = config.launch
    processes = init_distributed(
        rank_info,
        resolve_mesh_shape(config, rank_info.world_size),
        device=launch.device,
        backend=launch.distributed_backend,
    )
    # Before anything in the folder is looked at, and after all have met: who waited for one that was refused here, and
    # left, would keep its machines for as long as it has patience.
    lock = _take_lock(config.checkpoint.save, processes)
    try:
        _set_determinism(config.training.deterministic)
        rng.seed_torch(rng.derive_seed(config.training.seed, "initialization", processes.mesh))
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return TrainingSession(processes, lock)


def _take_lock(save: str | None, groups: ProcessGroups) -> RunLock | None:
    """Take the run's folder, in the first process. Raises its error in all."""
    lock, refused = None, None
    if save is not None and groups.is_main:
        try:
            lock = RunLock(save)
        except FarfieldError as error:
            refused = error
    found = groups.gather_objects(refused)[0]
    if found is not None:
        raise found
    return lock


def _set_determinism(deterministic: bool) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = deterministic

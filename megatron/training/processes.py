"""The processes of a run: which one this is, how they meet, and what they agree on between steps.

The launcher tells each process its place through the environment, as torchrun does (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT). With none of them set a run is one process and needs neither port nor file.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.schema import Config
from megatron.errors import RunError, UserError

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Processes:
    """This process among all of a run."""

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup | None
    """A gloo group for small numbers on the host, so that agreeing never waits for a GPU; None in a single process."""

    @property
    def first(self) -> bool:
        """Is this the process that writes and reports?"""
        return self.rank == 0

    def total(self, *values: int) -> list[int]:
        """The sum of each value over all processes. All must call it."""
        if self.control is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, group=self.control)
        return tensor.tolist()

    def mean(self, *values: float) -> list[float]:
        """The mean of each value over all processes. All must call it."""
        if self.control is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return (tensor / self.world).tolist()

    def largest(self, value: float) -> float:
        """The largest value of any process. All must call it."""
        if self.control is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        return float(tensor)

    def agree(self, error: str | None) -> str | None:
        """The first error that any process reports, so that all stop together instead of waiting for one that left."""
        return next((each for each in self.gather(error) if each is not None), None)

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in the order of ranks. All must call it."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values


def start(config: Config) -> Processes:
    """Join the other processes (once; later calls find the group that is there) and choose this one's device.

    Raises:
        UserError: the device asked for is not there, or only part of the environment is set.
        RunError: the other processes cannot be reached.
    """
    missing = [name for name in PLACE if name not in os.environ]
    rank, world, local = 0, 1, 0
    if not missing:
        try:
            rank, world, local = (int(os.environ[name]) for name in PLACE[:3])
        except ValueError:
            raise UserError(f"{', '.join(PLACE[:3])}: must be whole numbers in the environment") from None
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ and os.environ["WORLD_SIZE"] != "1":
        raise UserError(f"environment: RANK is set, but {', '.join(missing)} is not; start with ./deepy.py train")
    device = _device(config, local)
    # DeepSpeed reads these when it is imported and when the engine is made.
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        backend = config.launch.distributed_backend
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        place: dict[str, Any] = {"rank": rank, "world_size": world}
        if world == 1:
            place["store"] = dist.HashStore()  # in memory: no port is taken
        if backend == "nccl":
            place["device_id"] = device
        try:
            dist.init_process_group(backend, **place)
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"process {rank} of {world} cannot reach the others: {str(error).splitlines()[0]}"
            ) from error
    if dist.get_world_size() != world:
        raise RunError(
            f"environment: WORLD_SIZE is {world}, but this process is already one of {dist.get_world_size()}"
        )
    control = None if world == 1 else dist.new_group(backend="gloo")
    return Processes(rank, world, device, control)


def _device(config: Config, local_rank: int) -> torch.device:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.launch.device == "cuda" and not there:
        raise UserError("device: cuda, but no CUDA device is there; use device=cpu or device=auto")
    if config.launch.device == "cpu" or not there:
        return torch.device("cpu")
    if local_rank >= there:
        raise UserError(f"num_gpus: process {local_rank} of this machine has no GPU of its own; {there} are there")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)

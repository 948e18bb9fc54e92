"""Processes of a run: initialization, groups, host-side collectives, DeepSpeed's view of the mesh, and heartbeats."""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from threading import RLock
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.mesh import Dimension, Mesh, NumberT, ParallelSizes
from megatron.utils.errors import (
    RunError,
    check_file_limit,
    describe_file_limit,
    is_near_file_limit,
    is_out_of_files,
)
from megatron.utils.imports import trim_imports

with trim_imports():  # the only imports of megatron-core's groups and random states, without PyTorch's compiler
    from megatron.core import parallel_state as parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker as get_cuda_rng_tracker
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed

INIT_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives, the same as that of megatron-core's groups and gloo."""

EmbeddingGroup = Literal["ends"]
"""Name of the group of the first and last pipeline stages."""

_GROUPS: dict[frozenset[Dimension | EmbeddingGroup], Callable[[], dist.ProcessGroup]] = {
    frozenset({"tensor"}): parallel_state.get_tensor_model_parallel_group,
    frozenset({"context"}): parallel_state.get_context_parallel_group,
    frozenset({"data"}): parallel_state.get_data_parallel_group,
    frozenset({"pipeline"}): parallel_state.get_pipeline_model_parallel_group,
    frozenset({"context", "data"}): partial(parallel_state.get_data_parallel_group, with_context_parallel=True),
    frozenset({"ends"}): parallel_state.get_embedding_group,
    frozenset({"tensor", "pipeline"}): parallel_state.get_model_parallel_group,
}
"""megatron-core's groups by the dimensions in which their members differ."""


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of a run, from the view of the current process."""

    mesh: Mesh = field(default_factory=Mesh)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host: dist.ProcessGroup | None = None
    """Group of all processes over gloo, for small values on the host, so that agreement never waits for a GPU; None if
    alone."""

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Total number of processes of the run."""
        return self.mesh.world_size

    @property
    def is_main(self) -> bool:
        """True on the process that writes and reports."""
        return self.rank == 0

    def group(self, *along: Dimension | EmbeddingGroup) -> dist.ProcessGroup:
        """Return the group of processes that differ from this one only in these dimensions.

        `ends` is the group of the first and the last pipeline stage, for processes in one of them.
        """
        return _GROUPS[frozenset(along)]()

    def all_reduce_sum(self, *values: NumberT) -> list[NumberT]:
        """Sum each value over all processes: integers exactly, other values in float64. All processes must call it.

        For values that several ranks of a mesh share, see `Mesh.count_on_one_rank`.
        """
        if self.host is None:
            return list(values)
        are_integers = all(isinstance(value, int) for value in values)
        tensor = torch.tensor(values, dtype=torch.int64 if are_integers else torch.float64)
        dist.all_reduce(tensor, group=self.host)
        return tensor.tolist()

    def all_reduce_max(self, value: float) -> float:
        """Return the maximum of a value over all processes. All processes must call it."""
        if self.host is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.host)
        return float(tensor)

    def find_first_error(self, error: str | None) -> str | None:
        """Return the first error of any process, so that all stop together instead of waiting for one that has left."""
        return next((text for text in self.gather_objects(error) if text is not None), None)

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather the value of every process, in rank order. All processes must call it."""
        if self.host is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host)
        return values


class ModelParallelUnit:
    """DeepSpeed's view of the mesh: `mpu` of `deepspeed.initialize`, an object with these nine methods.

    In DeepSpeed, ranks that divide the tokens of a batch (data and context) are data-parallel, and ranks that divide
    one model (tensor and pipeline) are model-parallel. The object must not have a method of sequence parallelism,
    because its presence changes the behavior of DeepSpeed.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._mesh = groups.mesh
        self._data = groups.group("context", "data")
        self._model = groups.group("tensor", "pipeline")
        self._tensor = groups.group("tensor")

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.dp_cp.size

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dp_cp.index

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return self._model.size()

    def get_model_parallel_rank(self) -> int:
        return self._model.rank()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._mesh.tensor.size

    def get_tensor_model_parallel_rank(self) -> int:
        return self._mesh.tensor.index


class HeartbeatStore:
    """Store of short strings through which the processes of a run report their state, without waiting for each other.

    It is the store used for initialization (torch's TCPStore, served by the first process), so nothing here is a
    collective. Any thread may read and write, also while others wait in a collective that never ends. A thread that may
    have to wait for the store uses its own connection (`copy`).
    """

    def __init__(self, groups: ProcessGroups, store: Any = None) -> None:
        self.rank, self.world_size = groups.rank, groups.world_size
        self._groups = groups
        if store is None and self.world_size == 1:
            store = dist.HashStore()
        elif store is None:
            default: Any = dist.distributed_c10d._get_default_store()
            store = default.clone()
        self._store = store

    def copy(self) -> "HeartbeatStore":
        """Return the same store over a separate connection."""
        return HeartbeatStore(self._groups, self._store if self.world_size == 1 else self._store.clone())

    def set(self, key: str, value: str, rank: int | None = None) -> None:
        """Set a value of this process, or of another `rank`.

        It takes microseconds, because it does not wait for a response. Nothing happens if the first process has ended:
        either the run is over, or the others notice by missing responses.
        """
        with suppress(dist.DistError):
            self._store.set(f"beats/{key}/{self.rank if rank is None else rank}", value)

    def get(self, key: str, rank: int = 0) -> str | None:
        """Return a value of a process, or None if it is not set."""
        full_key = f"beats/{key}/{rank}"
        return self._store.get(full_key).decode() if self._store.check([full_key]) else None


def get_group_ranks(name: str) -> list[int]:
    """Return the ranks of a torch group by its name in the flight recorder; an empty list if there is no such group."""
    world = dist.distributed_c10d._world
    group = next((group for group, own in world.pg_names.items() if own == name), None)
    return [] if group is None else dist.get_process_group_ranks(group)


GLOO_FILES, GLOO_FILES_PER_RANK = 100, 12
"""Number of files opened by a rank with gloo groups, and per rank of the run: 123 with 2 ranks, 146 with 4."""


def init_distributed(rank_info: RankInfo, sizes: ParallelSizes, *, device: str, backend: str) -> ProcessGroups:
    """Initialize the process groups (once; later calls find existing groups) and select the device of this process.

    Args:
        rank_info: rank of this process.
        sizes: sizes of the mesh of all processes.
        device: cpu, or cuda for the GPU of this process.
        backend: backend of communication between GPUs, nccl or gloo.

    Raises:
        RunError: the GPU cannot be used, other processes cannot be reached, or they were initialized as another mesh.
    """
    if sizes.tensor > 1:
        # Read when CUDA starts: megatron-core reduces the gradient of a layer's input while it computes that of its
        # weights, so the first kernel must reach the card first.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if backend == "gloo" and rank_info.world_size > 1:
        # Without enough files, gloo aborts the process or waits forever.
        check_file_limit(GLOO_FILES + GLOO_FILES_PER_RANK * rank_info.world_size)
    own_device = _select_device(device, rank_info.local_rank)
    # DeepSpeed reads these at import and when the engine is built.
    os.environ["DS_ACCELERATOR"] = own_device.type
    os.environ["LOCAL_RANK"] = str(own_device.index or 0)
    if sizes.pipeline > 1:
        # Stages communicate in the order of the schedule, and their group is used for nothing else.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    try:
        _init_process_group(rank_info, backend, own_device)
        if dist.get_world_size() != rank_info.world_size:
            raise RunError(
                f"environment: WORLD_SIZE is {rank_info.world_size}, but this process is already in a group of "
                f"{dist.get_world_size()}"
            )
        _make_groups(sizes)
        host = None if rank_info.world_size == 1 else dist.new_group(backend="gloo")
    except RuntimeError as error:
        # Without a free file descriptor, gloo may also report that it cannot resolve an address.
        if is_out_of_files(error) or is_near_file_limit():
            raise RunError(describe_file_limit()) from error
        raise
    return ProcessGroups(Mesh(rank_info.rank, sizes), own_device, host)


def build_single_process_groups() -> ProcessGroups:
    """Return the groups of a single process with a whole model, for evaluation, export or a test.

    megatron-core's layers need process groups even then. Unless groups exist, groups of this process alone are created.
    They need no port, file or thread, and torch's default group stays as it is, because it belongs to the caller.

    Raises:
        RunError: this process shares layers with others.
    """
    with _DEFAULT_GROUP_LOCK:
        if not parallel_state.model_parallel_is_initialized():
            with _replace_default_group(_get_single_process_group()):
                _make_groups(ParallelSizes())
    if (existing := _get_existing_sizes()) != (alone := ParallelSizes(data=existing.data)):
        raise RunError(f"this process already belongs to another mesh: {existing}, not {alone}")
    return ProcessGroups()


def provide_default_group() -> AbstractContextManager[None]:
    """Return a context with the default group that megatron-core looks for while it builds layers.

    It is the group of `build_single_process_groups` if the process has those groups, and else the existing one.
    """
    return _replace_default_group(_get_single_process_group()) if _has_single_process_groups() else nullcontext()


@cache
def _get_single_process_group() -> dist.ProcessGroup:
    """Return a group of this process alone. It has no backend, because layers on one rank do not communicate."""
    return dist.ProcessGroup(dist.HashStore(), 0, 1)


def _has_single_process_groups() -> bool:
    """Return True if megatron-core's groups are those of `build_single_process_groups`."""
    if not parallel_state.model_parallel_is_initialized():
        return False
    return parallel_state.get_tensor_model_parallel_group() is _get_single_process_group()


_DEFAULT_GROUP_LOCK = RLock()
"""Lock of the thread that replaces torch's default group. Other threads wait until it has built its model."""


@contextmanager
def _replace_default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Make a group torch's default group inside the context, in one thread at a time.

    `init_process_group` would also replace `sys.excepthook`, and could not be called again.
    """
    with _DEFAULT_GROUP_LOCK:
        world: Any = dist.distributed_c10d._world
        previous = world.default_pg
        world.default_pg = group
        world.pg_group_ranks[group] = {0: 0}
        try:
            yield
        finally:
            world.default_pg = previous
            world.pg_group_ranks.pop(group)


def _select_device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    # A scheduler may make only its own GPU visible to each process.
    device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)
    configure_cuda()
    try:
        torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise RunError(f"device cuda:{device.index} cannot be used: {str(error).splitlines()[0]}") from error
    return device


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with which users configure PyTorch's allocator."""
ALLOCATOR_SETTINGS = ("expandable_segments:True,pinned_max_round_threshold_mb:16", "expandable_segments:True")
"""Settings of the allocator, and those for versions of PyTorch that know only the first."""


def configure_cuda() -> None:
    """Set the CUDA options of every process that uses a GPU, before its first allocation.

    float32 is exact. PyTorch would let cuDNN's convolutions round to TF32, with 10 bits. In NVIDIA's containers, which
    set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, matrix products would round as well. Memory is mapped into expandable
    segments. Chunks of attention grow from one to the next, and with segments of fixed size each would need a new one
    (131,072 tokens of CDAPE: 11.5 GiB allocated, 77.7 GiB reserved without, 11.6 with). Large pinned buffers, such as
    the copy of a checkpoint's states, have their own size instead of the next power of two. Kernels that PyTorch
    compiles with Triton fuse multiplications with additions, as the project's own do: Triton 3.9 warns that 3.10 will
    no longer do so by default.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if torch.cuda.is_available() and not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        try:
            torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTINGS[0])
        except ValueError:
            torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTINGS[1])


def _init_process_group(rank_info: RankInfo, backend: str, device: torch.device) -> None:
    if dist.is_initialized():
        return
    options: dict[str, Any] = {"rank": rank_info.rank, "world_size": rank_info.world_size}
    if rank_info.world_size == 1:
        options["store"] = dist.HashStore()  # in memory, without a port
    if backend == "nccl":
        options["device_id"] = device
        options["timeout"] = (
            INIT_TIMEOUT  # NCCL's own is shorter than the watchdog that names a hanging rank (training/watchdog.py)
        )
    atexit.register(_destroy_groups_at_exit, os.getpid())
    try:
        dist.init_process_group(backend, **options)
    except (RuntimeError, ValueError) as error:
        if is_out_of_files(error) or is_near_file_limit():
            raise RunError(describe_file_limit()) from error
        raise RunError(
            f"process {rank_info.rank} of {rank_info.world_size} cannot reach the others: {str(error).splitlines()[0]}"
        ) from error


def abort_groups() -> None:
    """End the groups of this process without waiting for others after a failure.

    The others may have left, or may be inside a collective that never ends.
    """
    global _waits_before_destroy
    _waits_before_destroy = False


_waits_before_destroy = True
"""True if the groups finish pending work before they end."""


def _destroy_groups_at_exit(process: int) -> None:
    """End all groups at interpreter exit, because NCCL warns about groups that are left open.

    Groups are kept after a run, because objects that outlive it, such as a model, still use them.

    Args:
        process: process that initialized the groups; a fork of it is not a member.
    """
    if os.getpid() != process or not dist.is_initialized():
        return
    # The exit code reports the result; errors here must not change or hide it.
    with suppress(Exception):
        # Destroying NCCL's groups waits for their last kernels. Gloo's groups have none.
        if _waits_before_destroy or dist.get_backend() != "nccl":
            dist.destroy_process_group()
        else:
            dist.distributed_c10d._abort_process_group()


@contextmanager
def _reuse_world_group() -> Iterator[None]:
    """Make every new group the world group inside the context, if there is a single process.

    Each gloo group would wake a thread a hundred times a second, which took a twelfth of the CPU time of a small
    model's training.
    """
    if dist.get_world_size() > 1:
        yield
        return
    new_group = dist.new_group
    dist.new_group = lambda *args, **options: dist.group.WORLD
    try:
        yield
    finally:
        dist.new_group = new_group


def _make_groups(sizes: ParallelSizes) -> None:
    """Create megatron-core's groups, which are global: once, and never for another mesh."""
    if _has_single_process_groups():  # a model of this process alone was built before; it keeps its groups
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        with _reuse_world_group():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes.tensor,
                pipeline_model_parallel_size=sizes.pipeline,
                context_parallel_size=sizes.context,
                create_gloo_process_groups=False,  # only for megatron-core's own optimizer and checkpoints
            )
    if (existing := _get_existing_sizes()) != sizes:
        raise RunError(f"this process already belongs to another mesh: {existing}, not {sizes}")


def _get_existing_sizes() -> ParallelSizes:
    """Return the sizes of megatron-core's groups."""
    return ParallelSizes(
        *(_GROUPS[frozenset({dimension})]().size() for dimension in ("tensor", "context", "data", "pipeline"))
    )

"""Before a run: what can be refused, and resolved, from its configuration and the facts of the machine.

Nothing is made, no process is met, and torch is not imported. What needs torch (can this encoding be built?), the
data's content, or a checkpoint's is looked at when the run is assembled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.parallelism import ranks_per_replica, resolve_batch_size, resolve_mesh_shape, resolve_zero
from megatron.config.schema import Config
from megatron.config.stages import ENDS, count_unreached_stages, resolve_stages
from megatron.config.validation import validate_config
from megatron.distributed.hardware import PROCESSES_PER_CORE, LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.training.check_resources import check_memory
from megatron.training.schedule import describe_late_warmup
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class ResolvedRun:
    """A configuration with all that a run decides before it starts: device, backend, processes, batch."""

    config: Config
    world_size: int | None
    """Processes of the run, on all machines; None where a dry run cannot know them."""
    notes: tuple[str, ...]
    """Lines worth telling."""


def resolve_run(
    config: Config, hardware: LocalHardware, *, rank_info: RankInfo | None = None, dry_run: bool = False
) -> ResolvedRun:
    """Resolve a configuration for a machine. Resolving it again changes nothing.

    Args:
        config: the run's.
        hardware: where it shall run.
        rank_info: this process's among all of the run, if they were started already.
        dry_run: the run itself may take place on another machine. If it needs GPUs and none is here, what cannot be
            known stays open, and a note says so.

    Raises:
        UserError: keys that contradict each other, a device that is not there, a precision that it cannot do, a batch
            that does not divide, no data, too little memory.
    """
    _check_complete(config)
    _check_launched(config, rank_info, dry_run)
    topology = _resolve_topology(config, hardware, rank_info, dry_run)
    backend, notes = _resolve_backend(config, topology.device)
    _check_graphs(config, topology.device)
    _check_instruments(config, topology.device, topology.ranks)
    notes = [*topology.notes, *notes, *_describe_saves(config), *_describe_late_instruments(config)]
    config = config.replace(
        device=topology.device,
        num_gpus=None if topology.nodes is None else topology.ranks_on_node,
        nodes=topology.nodes,
        distributed_backend=backend,
    )
    config, more = resolve_zero(config)
    notes += [*more, *_describe_unused_keys(config)]
    if topology.ranks is None:
        return ResolvedRun(config, None, tuple(notes))
    sizes = resolve_mesh_shape(config, topology.ranks)
    config = resolve_stages(resolve_batch_size(config, sizes.data))
    late = list(_describe_late_keys(config))
    if topology.ranks_on_node is not None and topology.is_here:  # last, for it needs all that was resolved
        notes += check_memory(config, hardware, sizes, device=topology.device, ranks_on_node=topology.ranks_on_node)
    return ResolvedRun(config, topology.ranks, (*notes, *late))


def resolve_remote_run(
    config: Config, rank_info: RankInfo | None = None, *, gpu_memory: int | None = None
) -> ResolvedRun:
    """Resolve a configuration for machines as it wants them, with a GPU for each process.

    Args:
        config: the run's.
        rank_info: the first process's; of `num_gpus` on each of `nodes` if absent.
        gpu_memory: bytes of each GPU, if they are known.

    Raises:
        UserError: as `resolve_run`, except for what those machines really have.
    """
    if rank_info is None:
        ranks_on_node, nodes = config.launch.num_gpus or 1, config.launch.nodes or 1
        rank_info = RankInfo(0, ranks_on_node * nodes, 0, ranks_on_node)
    machine = LocalHardware(
        num_gpus=0 if config.launch.device == "cpu" else rank_info.ranks_on_node,
        num_cores=rank_info.ranks_on_node,
        gpu_memory=gpu_memory,
    )
    return resolve_run(config, machine, rank_info=rank_info)


def _check_complete(config: Config) -> None:
    """Is there all that a run needs, and nothing that contradicts it?"""
    for _, problem in validate_config(config):  # a configuration that was read from files has passed these
        raise UserError(problem)
    data = config.data
    if data.data_path is None and not data.train_data_paths and data.task is None:
        raise UserError(
            "no data to train on: give train_data_paths or data_path, or a task; `./deepy.py prepare` makes a corpus"
        )
    training = config.training
    if (
        not training.train_iters
        and training.train_epochs is None
        and not any(key in stage for stage in training.stages[-1:] for key in ENDS)
    ):
        raise UserError(
            "train_iters is missing or 0 (optimizer steps); give it in a file or as train_iters=…, or give "
            "train_epochs",
            "train_iters",
        )
    if training.stages and config.checkpoint.save is None:
        raise UserError("stages need save: each begins from the checkpoint at the end of the one before", "save")


def _check_launched(config: Config, rank_info: RankInfo | None, dry_run: bool) -> None:
    """Was this process started as the keys want it, and with as many others?"""
    if rank_info is not None:
        _check_rank(config, rank_info)
    elif config.launch.nodes not in (None, 1) and not dry_run:
        raise UserError(
            f"nodes is {config.launch.nodes}, but this process was not started as one of several; start it with srun, "
            "mpirun or torchrun on every machine"
        )


@dataclass(frozen=True)
class _Topology:
    """The processes of a run, and what they compute on."""

    device: str
    ranks_on_node: int | None
    """On this machine; None where a dry run cannot know."""
    ranks: int | None
    """In all."""
    notes: tuple[str, ...] = ()
    is_here: bool = True
    """Is the device one of this machine?"""

    @property
    def nodes(self) -> int | None:
        """Machines; None where that is open, and where they have different numbers of processes."""
        return (
            None
            if self.ranks is None or self.ranks_on_node is None or self.ranks % self.ranks_on_node
            else self.ranks // self.ranks_on_node
        )


def _resolve_topology(config: Config, hardware: LocalHardware, rank_info: RankInfo | None, dry_run: bool) -> _Topology:
    """How many processes there are, and on what, as far as that can be known. Refuses what is not there."""
    launch, precision = config.launch, config.training.compute_dtype
    ranks_on_node = launch.num_gpus if rank_info is None else rank_info.ranks_on_node
    ranks = rank_info.world_size if rank_info is not None else ranks_on_node and ranks_on_node * (launch.nodes or 1)
    gpus = hardware.num_gpus if launch.device != "cpu" else 0
    wants_gpu = launch.device == "cuda" or (launch.device == "auto" and precision == "fp16")
    if wants_gpu and not gpus and dry_run:
        open_question = (
            "whether there are so many" if ranks else "how many there will be (num_gpus), the batch that follows"
        )
        note = f"no GPU is here, and this run needs one; not checked: {open_question}, and their memory"
        return _Topology("cuda", ranks_on_node, ranks, (note,), is_here=False)
    device = "cuda" if gpus else "cpu"
    ranks_on_node = ranks_on_node or gpus or ranks_per_replica(config)
    # A scheduler may show each process that it starts its own GPU alone.
    _check_device(
        launch.device, device, precision, 1 if rank_info is not None and gpus == 1 else ranks_on_node, hardware
    )
    return _Topology(device, ranks_on_node, ranks or ranks_on_node * (launch.nodes or 1))


def _resolve_backend(config: Config, device: str) -> tuple[str, list[str]]:
    """What the processes speak through, and a line if that is not what was asked for."""
    requested = config.launch.distributed_backend
    backend = "gloo" if device == "cpu" or requested == "gloo" else "nccl"
    if requested in ("auto", backend):
        return backend, []
    # GPT-NeoX's files say nccl everywhere.
    return backend, [f"distributed_backend {requested} needs GPUs; {backend} is used on this machine"]


def _describe_saves(config: Config) -> Iterator[str]:
    """What will not be saved."""
    if late := [step for step in config.checkpoint.extra_save_iters if step > config.training.train_iters]:
        steps = ", ".join(map(str, late))
        yield f"extra_save_iters {steps}: beyond train_iters {config.training.train_iters}, so nothing is saved"
    if config.checkpoint.save is None:
        logging = config.logging
        kept = [f"TensorBoard's events in {logging.tensorboard_dir}"] * (
            logging.use_tensorboard and logging.tensorboard_dir is not None
        )
        kept += ["Weights & Biases' records in wandb"] * logging.use_wandb
        but = f", but {' and '.join(kept)}" if kept else ""
        yield f"save is not set: this run will leave no checkpoints, metrics or log behind{but}"


def _check_graphs(config: Config, device: str) -> None:
    """Refuse CUDA graphs on a CPU."""
    if config.training.cuda_graph == "on" and device == "cpu":
        raise UserError(
            "cuda_graph on: this run computes on the CPU, which has no CUDA graphs; use auto or off", "cuda_graph"
        )


def _check_instruments(config: Config, device: str, ranks: int | None) -> None:
    """Can profiles and snapshots be taken, and is there a place for them?"""
    profile, snapshot = config.logging.profile, config.logging.memory_snapshot
    if config.checkpoint.save is None and (profile.steps or snapshot is not None):
        key = "profile" if profile.steps else "memory_snapshot"
        raise UserError(f"{key} needs save: what is recorded is written to the run's folder", key)
    if snapshot is not None and device == "cpu":
        raise UserError(
            f"memory_snapshot is {snapshot}, but this run computes on the CPU, whose memory torch does not record; "
            "leave it out, or use a profiler of the process such as memray",
            "memory_snapshot",
        )
    if ranks is not None and max(profile.ranks) >= ranks and (profile.steps or snapshot is not None):
        raise UserError(
            f"profile.ranks are {profile.ranks}, but the run has {ranks} rank{'s' * (ranks > 1)}, counted from 0",
            "profile",
        )


def _describe_late_instruments(config: Config) -> Iterator[str]:
    """Profiles and snapshots that the run ends before; of train_epochs nobody knows yet."""
    train_iters, steps = config.training.train_iters, config.logging.profile.steps
    if train_iters and steps and steps.start > train_iters:
        yield f"profile.from {steps.start}: beyond train_iters {train_iters}, so nothing is profiled"
    snapshot = config.logging.memory_snapshot
    if train_iters and snapshot is not None and snapshot > train_iters:
        yield (f"memory_snapshot {snapshot}: beyond train_iters {train_iters}, so there is one only if memory runs out")


def _describe_late_keys(config: Config) -> Iterator[str]:
    """Yield notes about stages and a warmup that the run ends before."""
    train_iters = config.training.train_iters
    if num_late := count_unreached_stages(config):
        yield f"stages: the last {num_late} would begin at train_iters {train_iters} or later, and do not"
    if train_iters:
        yield from describe_late_warmup(config)


def _describe_unused_keys(config: Config) -> Iterator[str]:
    """What other projects' files say everywhere and ZeRO does not read here."""
    zero = config.training.zero_optimization
    if unread := zero.list_unused_keys():
        have = "has" if len(unread) == 1 else "have"
        yield f"zero_optimization: {', '.join(unread)} {have} no effect at stage {zero.stage}"
    if not zero.contiguous_gradients and zero.stage in (1, 2) and zero.offload_optimizer.device != "none":
        yield "zero_optimization.contiguous_gradients has no effect with offload_optimizer: they always are"


def _check_rank(config: Config, rank_info: RankInfo) -> None:
    """Are the processes that were started those that the keys ask for?"""
    launch = config.launch
    nodes = "" if launch.nodes is None else f" and nodes is {launch.nodes}"
    if launch.num_gpus is not None and launch.num_gpus * (launch.nodes or 1) != rank_info.world_size:
        started = "1 process was" if rank_info.world_size == 1 else f"{rank_info.world_size} processes were"
        raise UserError(f"num_gpus is {launch.num_gpus}{nodes}, but {started} started (WORLD_SIZE)")
    if (
        launch.num_gpus is None
        and launch.nodes is not None
        and launch.nodes * rank_info.ranks_on_node != rank_info.world_size
    ):
        raise UserError(
            f"nodes is {launch.nodes}, but {rank_info.world_size} processes were started (WORLD_SIZE), "
            f"{rank_info.ranks_on_node} of them here"
        )


def _check_device(requested: str, device: str, precision: str, ranks: int, hardware: LocalHardware) -> None:
    if requested == "cuda" and device == "cpu":
        raise UserError("device is cuda, but there is no CUDA device here (or torch was built without CUDA)")
    if precision == "fp16" and device == "cpu":
        reason = "device is cpu" if requested == "cpu" else "there is none here"
        raise UserError(f"precision is fp16, which needs a GPU, and {reason}; use precision=bf16 or fp32")
    if device == "cuda" and ranks > hardware.num_gpus:
        have = "1 GPU is" if hardware.num_gpus == 1 else f"{hardware.num_gpus} GPUs are"
        raise UserError(f"num_gpus is {ranks}, but {have} here; use at most that many, or device: cpu")
    limit = PROCESSES_PER_CORE * hardware.num_cores
    if device == "cpu" and ranks > limit:
        have = "1 CPU core is" if hardware.num_cores == 1 else f"{hardware.num_cores} CPU cores are"
        raise UserError(
            f"num_gpus is {ranks}, but {have} here and there is no GPU to use; use at most {limit}, "
            f"{PROCESSES_PER_CORE} per core"
        )

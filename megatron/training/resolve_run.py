"""Checks and resolution of a configuration before a run, from the configuration and the hardware only.

Nothing is created, no other process is contacted, and torch is not imported. Checks that need torch (whether an
encoding can be built) or the contents of data or checkpoints run when the run is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.config.execution import ResolvedRun, resolve_config
from megatron.config.schema import Config
from megatron.config.stages import ENDS
from megatron.data.load_tokenizer import find_vocab_size
from megatron.distributed.hardware import PROCESSES_PER_CORE, LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.model.device_dtype import NO_CUDA_DEVICE
from megatron.training.check_resources import check_memory
from megatron.training.schedule import describe_late_warmup
from megatron.utils.errors import UserError

MAX_ROUNDED_SUMS = {"bf16": 32, "fp16": 256}
"""Number of micro-batches per step above which a note reports that their gradients are summed in this precision.

In bfloat16 a sum of 64 terms of 1.3 is 1% off, and a sum of 512 terms 23%, because small terms no longer change a large
sum. float16 has three more bits, so its sums may have eight times as many terms: one of 512 terms is 1% off.
"""


def resolve_run(
    config: Config, hardware: LocalHardware, *, rank_info: RankInfo | None = None, dry_run: bool = False
) -> ResolvedRun:
    """Resolve a configuration for a machine. Resolving it again changes nothing.

    Args:
        config: validated configuration of the run, as loaded from files or checked by `check_config`.
        hardware: hardware of the machine.
        rank_info: rank of this process, if the processes were already started.
        dry_run: True if the run may take place on another machine. If it needs GPUs and none is here, unknown values
            stay open, and a note reports this.

    Raises:
        UserError: if the device does not exist or lacks the precision, the batch is not divisible, data are not
            configured, or memory is too small.
    """
    _check_complete(config)
    _check_launched(config, rank_info, dry_run)
    topology = _resolve_topology(config, hardware, rank_info, dry_run)
    _check_device_keys(config, topology)
    resolved = resolve_config(config, topology.ranks, **topology.get_keys())
    if config.launch.check_resources:
        resolved = replace(resolved, vocab_size=find_vocab_size(config.data))
    notes = [*topology.notes, *_describe_unsaved(resolved.config), *resolved.notes]
    notes += _describe_unused_zero_keys(resolved.config)
    notes += _describe_rounded_sums(resolved)
    if topology.ranks_on_node is not None and topology.is_local:
        notes += check_memory(resolved, hardware, ranks_on_node=topology.ranks_on_node)
    if resolved.open_config is None:
        notes += _describe_late_stages(resolved)
    return replace(resolved, notes=tuple(notes))


def resolve_remote_run(
    config: Config, rank_info: RankInfo | None = None, *, gpu_memory: int | None = None
) -> ResolvedRun:
    """Resolve a configuration for the machines that it requests, with a GPU per process.

    Args:
        config: configuration of the run.
        rank_info: rank of the first process; by default derived from `num_gpus` and `nodes`.
        gpu_memory: bytes of each GPU, if known.

    Raises:
        UserError: as in `resolve_run`, except for the actual hardware of these machines.
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
    """Check that a configuration has data, a length and a folder if it needs one. Raises UserError."""
    data = config.data
    if data.data_path is None and not data.train_data_paths and data.task is None:
        raise UserError(
            "no data to train on: set train_data_paths, data_path or task; `./deepy.py prepare` creates a corpus"
        )
    training = config.training
    if (
        not training.train_iters
        and training.train_epochs is None
        and not any(key in stage for stage in training.stages[-1:] for key in ENDS)
    ):
        given = "0" if "train_iters" in training.model_fields_set else "missing"
        raise UserError(
            f"train_iters, the number of optimizer steps, is {given}; it must be at least 1, or set train_epochs",
            "train_iters",
        )
    if training.stages and config.checkpoint.save is None:
        raise UserError("stages need save: each stage starts from the last checkpoint of the previous one", "save")


def _check_launched(config: Config, rank_info: RankInfo | None, dry_run: bool) -> None:
    """Check that this process was started as the keys require, together with the right number of others."""
    if rank_info is not None:
        _check_rank(config, rank_info)
    elif config.launch.nodes not in (None, 1) and not dry_run:
        raise UserError(
            f"nodes is {config.launch.nodes}, but this process was started alone; start it with srun, "
            "mpirun or torchrun on every machine",
            "nodes",
        )


def _check_rank(config: Config, rank_info: RankInfo) -> None:
    """Check that the number of started processes matches the keys. Raises UserError."""
    launch = config.launch
    nodes = "" if launch.nodes is None else f" and nodes is {launch.nodes}"
    if launch.num_gpus is not None and launch.num_gpus * (launch.nodes or 1) != rank_info.world_size:
        started = "1 process was" if rank_info.world_size == 1 else f"{rank_info.world_size} processes were"
        raise UserError(f"num_gpus is {launch.num_gpus}{nodes}, but {started} started (WORLD_SIZE)", "num_gpus")
    if (
        launch.num_gpus is None
        and launch.nodes is not None
        and launch.nodes * rank_info.ranks_on_node != rank_info.world_size
    ):
        raise UserError(
            f"nodes is {launch.nodes}, but {rank_info.world_size} processes were started (WORLD_SIZE), "
            f"{rank_info.ranks_on_node} of them on this machine",
            "nodes",
        )


@dataclass(frozen=True)
class _Topology:
    """Processes of a run, their device and their communication backend."""

    device: str
    backend: str
    ranks_on_node: int | None
    """Number of processes on this machine, or None if a dry run cannot determine it."""
    ranks: int | None
    """Number of all processes."""
    is_local: bool
    """True if the device is on this machine."""
    notes: tuple[str, ...] = ()

    def get_keys(self) -> dict[str, str | int | None]:
        """Return the configuration keys that it determines."""
        # The number of machines is unknown if they have different numbers of processes.
        nodes = None
        if self.ranks is not None and self.ranks_on_node is not None and self.ranks % self.ranks_on_node == 0:
            nodes = self.ranks // self.ranks_on_node
        return {
            "device": self.device,
            "num_gpus": None if nodes is None else self.ranks_on_node,
            "nodes": nodes,
            "distributed_backend": self.backend,
        }


def _resolve_topology(config: Config, hardware: LocalHardware, rank_info: RankInfo | None, dry_run: bool) -> _Topology:
    """Determine the number of processes and their device as far as possible. Raises UserError for missing devices."""
    launch, precision = config.launch, config.training.compute_dtype
    ranks_on_node = launch.num_gpus if rank_info is None else rank_info.ranks_on_node
    ranks = rank_info.world_size if rank_info is not None else ranks_on_node and ranks_on_node * (launch.nodes or 1)
    gpus = hardware.num_gpus if launch.device != "cpu" else 0
    wants_gpu = launch.device == "cuda" or (launch.device == "auto" and precision == "fp16")
    is_local = bool(gpus) or not (wants_gpu and dry_run)
    device = "cuda" if gpus or not is_local else "cpu"
    notes: list[str] = []
    if is_local:
        ranks_on_node = ranks_on_node or gpus or launch.ranks_per_replica
        ranks = ranks or ranks_on_node * (launch.nodes or 1)
        # A scheduler may show each process only its own GPU.
        num_devices = 1 if rank_info is not None and gpus == 1 else ranks_on_node
        _check_device(launch.device, device, precision, num_devices, hardware)
    else:
        open_question = (
            "the number of GPUs" if ranks else "the number of GPUs (num_gpus), the batch size derived from it"
        )
        notes.append(f"this run needs a GPU, and this machine has none; not checked: {open_question}, and GPU memory")
    requested = launch.distributed_backend
    backend = "gloo" if device == "cpu" or requested == "gloo" else "nccl"
    if requested not in ("auto", backend):  # GPT-NeoX's files always set nccl
        notes.append(f"distributed_backend {requested} needs GPUs; {backend} is used on this machine")
    return _Topology(device, backend, ranks_on_node, ranks, is_local, tuple(notes))


def _check_device(requested: str, device: str, precision: str, ranks: int, hardware: LocalHardware) -> None:
    if requested == "cuda" and device == "cpu":
        raise UserError(f"device is cuda, but {NO_CUDA_DEVICE}", "device")
    if precision == "fp16" and device == "cpu":
        reason = "device is cpu" if requested == "cpu" else "this machine has none"
        raise UserError(f"precision is fp16, which needs a GPU, and {reason}; use precision=bf16 or fp32", "precision")
    if device == "cuda" and ranks > hardware.num_gpus:
        have = "1 GPU" if hardware.num_gpus == 1 else f"{hardware.num_gpus} GPUs"
        raise UserError(
            f"num_gpus is {ranks}, but this machine has {have}; use at most that many, or device: cpu", "num_gpus"
        )
    limit = PROCESSES_PER_CORE * hardware.num_cores
    if device == "cpu" and ranks > limit:
        have = "1 CPU core" if hardware.num_cores == 1 else f"{hardware.num_cores} CPU cores"
        raise UserError(
            f"num_gpus is {ranks}, but this machine has {have} and no usable GPU; use at most {limit}, "
            f"{PROCESSES_PER_CORE} per core",
            "num_gpus",
        )


def _check_device_keys(config: Config, topology: _Topology) -> None:
    """Check that the device supports CUDA graphs, profiles and snapshots if requested. Raises UserError."""
    device, ranks = topology.device, topology.ranks
    if config.training.cuda_graph == "on" and device == "cpu":
        raise UserError("cuda_graph on: this run uses the CPU, which has no CUDA graphs; use auto or off", "cuda_graph")
    profile, snapshot = config.logging.profile, config.logging.memory_snapshot
    if config.checkpoint.save is None and (profile.steps or snapshot is not None):
        key = "profile" if profile.steps else "memory_snapshot"
        raise UserError(f"{key} needs save: it is written to the run's folder", key)
    if snapshot is not None and device == "cpu":
        raise UserError(
            f"memory_snapshot is {snapshot}, but this run uses the CPU, whose memory torch does not record; "
            "remove it, or use a process profiler such as memray",
            "memory_snapshot",
        )
    if ranks is not None and max(profile.ranks) >= ranks and (profile.steps or snapshot is not None):
        raise UserError(
            f"profile.ranks are {profile.ranks}, but the run has {ranks} rank{'s' * (ranks > 1)}, counted from 0",
            "profile",
        )


def _describe_unsaved(config: Config) -> Iterator[str]:
    """Yield notes about checkpoints, records and profiles that will not be written."""
    train_iters = config.training.train_iters
    if train_iters and (late := [step for step in config.checkpoint.extra_save_iters if step > train_iters]):
        yield f"extra_save_iters {', '.join(map(str, late))}: after train_iters {train_iters}, so nothing is saved"
    if config.checkpoint.save is None:
        logging = config.logging
        kept = [f"TensorBoard events in {logging.tensorboard_dir}"] * (
            logging.use_tensorboard and logging.tensorboard_dir is not None
        )
        kept += ["Weights & Biases records in wandb"] * logging.use_wandb + ["Trackio's records"] * logging.use_trackio
        but = f" except {' and '.join(kept)}" if kept else ""
        yield f"save is not set: this run saves no checkpoints, metrics or log{but}"
    steps = config.logging.profile.steps
    if train_iters and steps and steps.start > train_iters:
        yield f"profile.from {steps.start}: after train_iters {train_iters}, so nothing is profiled"
    snapshot = config.logging.memory_snapshot
    if train_iters and snapshot is not None and snapshot > train_iters:
        yield (f"memory_snapshot {snapshot}: after train_iters {train_iters}, so written only if memory runs out")


def _describe_unused_zero_keys(config: Config) -> Iterator[str]:
    """Yield notes about keys that ZeRO does not use here; other projects' files set them everywhere."""
    zero = config.training.zero_optimization
    if unread := zero.list_unused_keys():
        have = "has" if len(unread) == 1 else "have"
        yield f"zero_optimization: {', '.join(unread)} {have} no effect at stage {zero.stage}"
    if not zero.contiguous_gradients and zero.stage in (1, 2) and zero.offload_optimizer.device != "none":
        yield "zero_optimization.contiguous_gradients has no effect with offload_optimizer: gradients are contiguous"


def _describe_rounded_sums(resolved: ResolvedRun) -> Iterator[str]:
    """Yield a note if many gradients are summed in half precision: bfloat16 without ZeRO, float16 at every stage."""
    training = resolved.config.training
    sums = max(stage.config.training.gradient_accumulation_steps for stage in resolved.stages)
    if sums <= MAX_ROUNDED_SUMS.get(training.compute_dtype, sums):
        return
    summed = f"the gradients of {sums} micro-batches are summed in"
    if training.compute_dtype == "fp16":
        yield (
            f"precision fp16: {summed} float16, whose rounding errors add up; precision bf16 with "
            "zero_optimization.stage 1 or 2 sums in float32"
        )
    elif not training.zero_optimization.stage:
        yield (
            f"zero_optimization.stage 0: {summed} bfloat16, whose rounding errors add up; stages 1 and 2 sum in float32"
        )


def _describe_late_stages(resolved: ResolvedRun) -> Iterator[str]:
    """Yield notes about stages and a warm-up that begin or end after the last step of the run, if it is known."""
    stages, training = resolved.stages, resolved.config.training
    train_iters = training.train_iters
    if not stages or not train_iters:
        return
    if num_late := max(0, len(training.stages) - len(stages)):
        stages_that_start = "stage starts" if num_late == 1 else f"{num_late} stages start"
        yield f"stages: the last {stages_that_start} at step {train_iters} (train_iters) or later, and will not run"
    yield from describe_late_warmup(stages)

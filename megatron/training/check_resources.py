"""Check before a run starts that it fits the memory of its GPUs, the memory of this machine, and the disk.

The check is arithmetic on the configuration. It needs no torch and runs before anything is created, so a mistyped
num_layers costs a second instead of an hour in a queue. An estimate must not block a run that would have fitted, so
Farfield rejects only configurations that exceed a lower bound:

    GPU memory          planned memory of a rank (planning/memory_estimate.py) × `CERTAIN_FRACTION`, for the cheapest
                        backend that attention_backend allows. Weights and optimizer states are always resident and
                        counted exactly, so they are not scaled down. The limit is the largest GPU of the machine.
    host memory         on a CPU: the same for the ranks of this machine, without score matrices, because CPU backends
                        differ. With GPUs: the model while it is built, once over all ranks, or the offloaded states.
    disk                float32 weights and states of as many checkpoints as exist at one time, against the free bytes
                        of the file system of `save`. Existing checkpoints count as used; the space of those that will
                        be deleted counts as free.

A plan that fills more than nine tenths of a GPU but stays within the bound gets a note instead of an error. In a run of
several stages, every remaining stage is checked. `check_resources: false` turns all checks off.
"""

import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.layout import list_checkpoints, parse_step, resolve_checkpoint_path
from megatron.config.execution import ResolvedRun, build_stages
from megatron.config.schema import Config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.mesh import ParallelSizes
from megatron.options.output import CheckpointOptions
from megatron.planning.activations import DEFAULT_GPU_BYTES
from megatron.planning.attention_memory import list_common_backends
from megatron.planning.memory_estimate import MemoryEstimate, estimate_memory
from megatron.planning.model_costs import PlannedModel, count_parameters, list_layer_matrices, plan_model
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_bytes

CERTAIN_FRACTION = 0.9
"""Lower bound on a rank's memory, as a fraction of its planned memory. The allocator's peak of every run in
docs/results/planner_memory.md is within a tenth of its plan, and the GPU itself uses additional memory.
"""
BYTES_PER_BUILT_PARAMETER = 4
"""Bytes per parameter while a model is built, in float32, before it moves to GPUs."""
BYTES_PER_STORED_VALUE = 4
"""Bytes in a checkpoint per weight and per value of each optimizer moment: float32."""
MIN_VOCAB_SIZE = 1
"""Vocabulary size of a lower bound if the tokenizer is not on this machine."""
START_ANYWAY_HINT = "set check_resources=false to start anyway"


def check_memory(resolved: ResolvedRun, hardware: LocalHardware, *, ranks_on_node: int) -> Iterator[str]:
    """Reject a configuration that cannot fit in memory. Yield a note if it is planned to nearly fill a GPU.

    Args:
        resolved: run whose number of processes is known.
        hardware: hardware of this machine; unknown values are not checked.
        ranks_on_node: number of processes on this machine.

    Raises:
        UserError: if memory is too small; the message gives the bytes needed and available.
    """
    config, stages, sizes = resolved.config, resolved.stages, resolved.sizes
    if not config.launch.check_resources or (hardware.memory is None and hardware.gpu_memory is None):
        return
    start, vocab_size = find_start_step(config.checkpoint), resolved.vocab_size or MIN_VOCAB_SIZE
    for stage in stages:
        if stage.end_step <= start and stage is not stages[-1]:
            continue
        name = f"stage {stage.index + 1} of {len(stages)}: " if len(stages) > 1 else ""
        try:
            planned = plan_model(stage.config)
        except UserError:  # the memory use of a method is unknown
            return
        if config.launch.device == "cuda" and hardware.gpu_memory is not None:
            yield from _check_gpu_memory(planned, hardware.gpu_memory, sizes, vocab_size, name)
        if hardware.memory is not None:
            _check_host_memory(planned, hardware.memory, sizes, vocab_size, name, ranks_on_node)


def _check_gpu_memory(
    planned: PlannedModel, gpu_memory: int, sizes: ParallelSizes, vocab_size: int, name: str
) -> Iterator[str]:
    ends = {0, sizes.pipeline - 1}  # no other stage needs less
    least = [_estimate_least(planned, sizes, vocab_size, end, gpu_memory) for end in ends]
    estimate = max(least, key=count_certain_bytes)
    if (needed := count_certain_bytes(estimate)) > gpu_memory:
        raise UserError(
            f"{name}{_describe_size(planned.config)}: a rank needs at least {format_bytes(needed)} of GPU memory "
            f"({format_bytes(estimate.weights)} of weights, {format_bytes(estimate.optimizer)} of optimizer states), "
            f"but a GPU has {format_bytes(gpu_memory)}; find layouts that fit with `./deepy.py plan`, or "
            f"{START_ANYWAY_HINT}",
            "num_layers" if estimate.weights + estimate.optimizer > gpu_memory else "seq_length",
        )
    plan = estimate_memory(planned, sizes, vocab_size, gpu_bytes=gpu_memory)
    if not plan.fits(gpu_memory / 2**30):
        yield (
            f"{name}memory may run out: the plan for a rank is {format_bytes(plan.total)}, more than 90% "
            f"of a GPU's {format_bytes(gpu_memory)}"
        )


def _check_host_memory(
    planned: PlannedModel,
    memory: int,
    sizes: ParallelSizes,
    vocab_size: int,
    name: str,
    ranks_on_node: int,
) -> None:
    if planned.config.launch.device == "cpu":
        by_stage = [
            count_certain_bytes(_estimate_least(planned, sizes, vocab_size, stage, None))
            for stage in range(sizes.pipeline)
        ]
        # The pipeline stages of this machine are known only if it runs all of them.
        is_whole = ranks_on_node == sizes.world_size
        needed = sum(by_stage) * ranks_on_node // sizes.pipeline if is_whole else min(by_stage) * ranks_on_node
        key, work = "num_layers", "training takes"
    else:
        built = BYTES_PER_BUILT_PARAMETER * count_parameters(planned, vocab_size) * ranks_on_node // sizes.world_size
        offloaded = ranks_on_node * count_offloaded_bytes(planned.config, sizes, vocab_size)
        needed, key, work = max(
            (built, "num_layers", "building the model takes"),
            (offloaded, "zero_optimization", "offload_optimizer takes"),
        )
    if needed > memory:
        processes = "1 process" if ranks_on_node == 1 else f"{ranks_on_node} processes"
        raise UserError(
            f"{name}{_describe_size(planned.config)}: {work} at least {format_bytes(needed)} of this machine's memory "
            f"for its {processes}, but it has {format_bytes(memory)}; {START_ANYWAY_HINT}",
            key,
        )


def _describe_size(config: Config) -> str:
    model = config.model
    return (
        f"num_layers {model.num_layers} × hidden_size {model.hidden_size}, train_micro_batch_size_per_gpu "
        f"{config.training.train_micro_batch_size_per_gpu} × seq_length {model.seq_length}"
    )


def _estimate_least(
    planned: PlannedModel, sizes: ParallelSizes, vocab_size: int, pipeline_stage: int, gpu_memory: int | None
) -> MemoryEstimate:
    """Estimate the memory of the cheapest backend. `gpu_memory` is None on a CPU."""
    backends: list[str] = [planned.config.model.attention_backend]
    if backends == ["auto"] or gpu_memory is None:
        backends = list_common_backends(planned)
    estimates = [
        estimate_memory(
            planned,
            sizes,
            vocab_size,
            backend=backend,
            pipeline_stage=pipeline_stage,
            gpu_bytes=gpu_memory or DEFAULT_GPU_BYTES,
        )
        for backend in backends
    ]
    if gpu_memory is None:
        estimates = [estimate.drop_score_matrices() for estimate in estimates]
    return min(estimates, key=count_certain_bytes)


def count_certain_bytes(estimate: MemoryEstimate) -> int:
    """Return a lower bound on the bytes that a rank needs."""
    return max(estimate.weights + estimate.optimizer, int(CERTAIN_FRACTION * estimate.total))


def count_offloaded_bytes(config: Config, sizes: ParallelSizes, vocab_size: int) -> int:
    """Return the bytes of a rank's optimizer states in host memory. Raises UserError as `plan_model`."""
    zero = config.training.zero_optimization
    if zero.offload_optimizer.device == "none":
        return 0
    values = zero.replace(offload_optimizer={"device": "none"}, offload_param={"device": "none"})
    config = config.replace(zero_optimization=values.model_dump(exclude_unset=True))
    return estimate_memory(plan_model(config), sizes, vocab_size, pipeline_stage=0).optimizer


def find_start_step(options: CheckpointOptions) -> int:
    """Return the step at which a run starts, from the names of its checkpoints.

    Damaged checkpoints are reported by the code that reads them.
    """
    if options.load is None or options.finetune:
        return 0
    try:
        return parse_step(resolve_checkpoint_path(options.load)) or 0
    except (UserError, OSError):
        return 0


@dataclass(frozen=True)
class CheckpointSize:
    """Size of one checkpoint, in bytes."""

    weights: int
    states: int
    """Size of the optimizer's moments."""
    parts: int
    """Size of the temporary shards that exist until the weights of all ranks are in one file
    (checkpoint/sharded_state.py).
    """

    @property
    def total(self) -> int:
        """Size of the finished checkpoint, in bytes."""
        return self.weights + self.states

    def count_bytes(self, num_checkpoints: int) -> int:
        """Return the bytes of several checkpoints, the last of which is being written."""
        return num_checkpoints * self.total + (self.parts if num_checkpoints > 0 else 0)


def estimate_checkpoint_size(config: Config, vocab_size: int) -> CheckpointSize:
    """Estimate the size of a configuration's checkpoints, without the few bytes that do not grow with the model.

    Raises:
        UserError: if the memory use of the position encoding or the score processor is unknown.
    """
    parameters = count_parameters(plan_model(config), vocab_size)
    matrices = config.model.num_layers * sum(list_layer_matrices(config.model))
    one_moment = {"AdamW": 0, "Lion": parameters, "Muon": matrices}[config.optimizer.optimizer.algorithm]
    weights = BYTES_PER_STORED_VALUE * parameters
    return CheckpointSize(weights, BYTES_PER_STORED_VALUE * (2 * parameters - one_moment), weights)


@dataclass(frozen=True)
class CheckpointCounts:
    """Number of checkpoints that a run adds to the existing ones."""

    at_once: int
    """Maximum at any time, counting the checkpoint being written; 0 if the run writes none."""
    at_end: int
    """Number at the end of the run; negative if it deletes more than it writes."""


def count_checkpoints(config: Config, start: int = 0, existing: Collection[int] = ()) -> CheckpointCounts:
    """Count the checkpoints of a run as it writes and deletes them (`Saver`, `prune_checkpoints`).

    Args:
        config: resolved configuration. With train_epochs the number of steps is unknown: one checkpoint at the end.
        start: step at which the run starts.
        existing: steps of the checkpoints in its folder.
    """
    options, train_iters = config.checkpoint, config.training.train_iters or start + 1
    factor, keep, spared = options.checkpoint_factor, options.keep_last_n_checkpoints, set(options.extra_save_iters)
    # Stages and the run end with a checkpoint.
    ends = {train_iters, *(stage.end_step for stage in build_stages(config) if config.training.train_iters)}
    first = 0 if start == 0 and not existing else start + 1
    extra = {step for step in spared if first <= step <= train_iters}
    regular = {step for step in ends - extra if step > start}
    num_regular = len(regular)
    if factor is not None:
        num_regular += train_iters // factor - start // factor
        num_regular -= sum(step % factor == 0 for step in {*regular, *(extra - {0})})
    if not extra and not num_regular:
        return CheckpointCounts(0, 0)
    old_regular = len(set(existing) - spared)

    def count_kept(written: int) -> int:
        return old_regular + written if keep is None else min(keep, old_regular + written)

    is_last_extra = train_iters in extra
    before_last = len(extra) - is_last_extra + count_kept(num_regular - (not is_last_extra)) - old_regular
    at_end = len(extra) + count_kept(num_regular) - old_regular
    return CheckpointCounts(max(1, before_last + 1), at_end)


def measure_free_bytes(folder: str | Path) -> int | None:
    """Return the free bytes of the file system of a folder, which need not exist yet.

    Return None if the file system does not report them, or reports a size of 0 (/proc).
    """
    path = Path(folder).absolute()
    try:
        usage = shutil.disk_usage(next(part for part in (path, *path.parents) if part.exists()))
    except OSError:
        return None
    return usage.free if usage.total else None


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that the checkpoints of a run add to those in its folder at the start."""

    at_once: int
    """Maximum at any time, in bytes."""
    at_end: int
    """Bytes at the end of the run; negative if it deletes more than it writes."""
    description: str
    """Explanation of `at_once`, for messages."""


def estimate_disk_need(config: Config, vocab_size: int | None, start: int | None = None) -> DiskNeed:
    """Estimate the disk space that a run needs.

    Return zeros if its folder cannot be read, which is an error when the folder is created, or if the memory use of its
    method is unknown.

    Args:
        config: resolved configuration, with `save`.
        vocab_size: vocabulary size of the data, or None if unknown.
        start: step at which the run starts; by default derived from `load`.
    """
    assert config.checkpoint.save is not None
    start = find_start_step(config.checkpoint) if start is None else start
    try:
        existing = [step for step in map(parse_step, list_checkpoints(config.checkpoint.save)) if step is not None]
        size = estimate_checkpoint_size(config, vocab_size or MIN_VOCAB_SIZE)
    except (OSError, UserError):
        return DiskNeed(0, 0, "")
    # Checkpoints of later steps are moved aside (`rollback`) and never deleted.
    counts = count_checkpoints(config, start, [step for step in existing if step <= start] if start else existing)
    description = f"{counts.at_once} × {format_bytes(size.total)}, and {format_bytes(size.parts)} while one is written"
    return DiskNeed(size.count_bytes(counts.at_once), counts.at_end * size.total, description)


def check_disk(resolved: ResolvedRun) -> None:
    """Reject a run whose checkpoints do not fit on the disk.

    Raises:
        UserError: if the disk is too small; the message gives the bytes needed and free.
    """
    config = resolved.config
    if config.checkpoint.save is not None and config.launch.check_resources:
        need = estimate_disk_need(config, resolved.vocab_size)
        check_free_space("save", config.checkpoint.save, need.at_once, f"this run need {{}} more ({need.description})")


def check_free_space(key: str, folder: str | Path, needed: int, text: str) -> None:
    """Reject checkpoints that do not fit on a disk.

    Args:
        key: configuration key that names the folder.
        folder: folder of the checkpoints.
        needed: lower bound on their bytes.
        text: description of the checkpoints, with `{}` for the bytes that they need.

    Raises:
        UserError: if the disk is too small; the message gives the bytes needed and free.
    """
    free = measure_free_bytes(folder)
    if free is not None and needed > free:
        raise UserError(
            f"{key}: {folder}: the checkpoints of {text.format(f'at least {format_bytes(needed)}')}, but the disk has "
            f"{format_bytes(free)} free; keep fewer (keep_last_n_checkpoints), save less often (checkpoint_factor) or "
            f"elsewhere, or {START_ANYWAY_HINT}",
            key,
        )

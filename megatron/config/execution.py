"""Execution of a configuration: the mesh of its processes, batch sizes, ZeRO stage, training stages, and CUDA graphs.

    train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × data-parallel ranks

The number of processes is final only when a run starts. `megatron.training.resolve_run` determines it, and
`resolve_config` resolves all that follows from it in one pass: the mesh, then the batch sizes, then the stages. If the
configuration alone determines the number, `load` rejects sizes that do not fit, with file and line.

A CUDA graph repeats the launches of one micro-batch: the same kernels, shapes and addresses, without the host.
Conditions that do not depend on keys are checked on the device (`megatron/training/graph_trial.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.attention.backends.backend import BACKEND_CAPABILITIES
from megatron.config.schema import Config
from megatron.config.stages import (
    UNTIL,
    UNTIL_TOKENS,
    Stage,
    apply_changes,
    describe_steps_after_stages,
    flatten_changes,
)
from megatron.distributed.mesh import ParallelSizes
from megatron.options.model import DROPOUT_KEYS
from megatron.options.position import find_indivisible_sizes
from megatron.options.training import (
    ACCUMULATION_KEY,
    BATCH_SIZES,
    GLOBAL_BATCH_KEY,
    MAX_BATCH_SIZE,
    MAX_STEPS,
    MICRO_BATCH_KEY,
    TrainingOptions,
)
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_quantity


@dataclass(frozen=True)
class ResolvedRun:
    """Configuration with all decisions made before the start, and how its processes share the work."""

    config: Config
    """Configuration with device, backend, processes, ZeRO stage, batch sizes, and the end of every stage as a step."""
    sizes: ParallelSizes
    """Mesh of all processes."""
    stages: tuple[Stage, ...]
    """Stages of the run. While the number of steps of `train_epochs` is unknown, all that the configuration names."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    vocab_size: int | None = None
    """Vocabulary size of the data, or None if resources are not checked, or the tokenizer is not on this machine."""
    open_config: Config | None = None
    """Configuration with batch sizes as given, if a dry run cannot determine the number of processes. The other fields
    then assume one that fits the batch sizes.
    """

    @property
    def world_size(self) -> int | None:
        """Number of processes on all machines, or None if a dry run cannot determine it."""
        return self.sizes.world_size if self.open_config is None else None


def resolve_config(config: Config, world_size: int | None, **machine_keys: Any) -> ResolvedRun:
    """Resolve the values that depend on the number of processes. Resolving them again changes nothing.

    Args:
        config: validated configuration.
        world_size: number of processes on all machines, or None if a dry run cannot determine it.
        machine_keys: keys that the machine determines, such as `device`.

    Raises:
        UserError: sizes do not divide the processes or the batch, or stages do not follow each other.
    """
    notes: tuple[str, ...] = ()
    if needs_zero(config):
        zero = config.training.zero_optimization.replace(stage=1)
        machine_keys["zero_optimization"] = zero.model_dump(exclude_unset=True)
        precision = config.training.compute_dtype
        notes = (f"zero_optimization.stage 1 instead of 0: {precision} with a sharded model needs ZeRO",)
    open_config = config.replace(**machine_keys) if world_size is None else None
    sizes = resolve_mesh_shape(config, world_size or _assume_world_size(config))
    config = config.replace(**machine_keys, **resolve_batch_sizes(config, sizes.data))
    if config.training.stages:
        config = config.replace(**_resolve_stage_ends(config))
    training, known = config.training, config
    if training.stages and not training.train_iters:
        last = max(int(entry.get(UNTIL, 0)) for entry in training.stages)
        known = config.replace(train_iters=last + 1, train_epochs=None)
    return ResolvedRun(config, sizes, build_stages(known), notes, open_config=open_config)


def _assume_world_size(config: Config) -> int:
    """Return the number of processes implied by the batch sizes, or that of one replica if they leave it open."""
    training, replicas = config.training, 1
    if set(BATCH_SIZES) <= training.model_fields_set:
        product = training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
        replicas = max(1, (training.train_batch_size or 0) // product)
    return config.launch.ranks_per_replica * replicas


def resolve_mesh_shape(config: Config, world_size: int) -> ParallelSizes:
    """Return the mesh for a number of processes.

    Raises:
        UserError: the parallel sizes of the configuration do not divide the number.
    """
    launch, replica_size = config.launch, config.launch.ranks_per_replica
    tensor, context, pipeline = (
        launch.model_parallel_size,
        launch.context_parallel_size,
        max(1, launch.pipe_parallel_size),
    )
    try:
        return ParallelSizes.from_world_size(world_size, tensor=tensor, context=context, pipeline=pipeline)
    except ValueError:
        num_replicas = world_size // replica_size
        nearest = " or ".join(str(n) for n in (num_replicas * replica_size, (num_replicas + 1) * replica_size) if n)
        raise UserError(
            f"model_parallel_size {tensor} × context_parallel_size {context} × pipe_parallel_size {pipeline} = "
            f"{replica_size} "
            f"does not divide the {world_size} processes (num_gpus); use {nearest}"
        ) from None


def needs_zero(config: Config) -> bool:
    """Return True if a run without ZeRO needs its stage 1.

    Without ZeRO, DeepSpeed's half-precision optimizer counts parameters on the ranks of a sharded model twice in the
    gradient norm.
    """
    training, launch = config.training, config.launch
    is_sharded = launch.model_parallel_size > 1 or launch.pipe_parallel_size > 1
    return is_sharded and training.compute_dtype != "fp32" and not training.zero_optimization.stage


def resolve_batch_sizes(config: Config, data_ranks: int) -> dict[str, int]:
    """Return the keys of all three batch sizes; any two determine the third.

    data_ranks: number of ranks that read different sequences (`resolve_mesh_shape(…).data`).

    Raises:
        UserError: the batch sizes are inconsistent or the batch is too large; the message lists all numbers.
    """
    training, set_keys = config.training, config.training.model_fields_set
    stages = max(1, config.launch.pipe_parallel_size)
    micro, steps, batch = training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps, None
    if training.train_batch_size is not None:
        batch = training.train_batch_size
        if MICRO_BATCH_KEY in set_keys and ACCUMULATION_KEY not in set_keys:
            steps = max(1, batch // (micro * data_ranks))
        elif ACCUMULATION_KEY in set_keys and MICRO_BATCH_KEY not in set_keys:
            micro = max(1, batch // (steps * data_ranks))
        elif not {MICRO_BATCH_KEY, ACCUMULATION_KEY} & set_keys:
            micro = max(1, batch // (data_ranks * stages))
            steps = max(1, batch // (micro * data_ranks))
    product = micro * steps * data_ranks
    ranks = format_quantity(data_ranks, "rank")
    factors = f"{MICRO_BATCH_KEY} {micro} × {ACCUMULATION_KEY} {steps} × {ranks} = {product}"
    if batch is not None and batch != product:
        raise UserError(f"{GLOBAL_BATCH_KEY} {batch} is not {factors}; change one of them, or the number of ranks")
    if steps < stages:
        raise UserError(
            f"{ACCUMULATION_KEY} {steps} is less than pipe_parallel_size {stages}: each stage works on a different "
            f"micro-batch; use at least {stages}, or 4 × {stages} for a small pipeline bubble"
        )
    if product > MAX_BATCH_SIZE:
        raise UserError(f"{factors}; {GLOBAL_BATCH_KEY} must be at most {MAX_BATCH_SIZE}")
    return {MICRO_BATCH_KEY: micro, ACCUMULATION_KEY: steps, GLOBAL_BATCH_KEY: product}


def _resolve_stage_ends(config: Config) -> dict[str, Any]:
    """Return the keys `stages`, with the end of every stage as a step, and `train_iters`, which the last may define.

    Args:
        config: configuration with stages and resolved batch sizes.

    Raises:
        UserError: stages do not follow each other, or a batch is not divisible.
    """
    training = config.training
    entries, current, first, tokens = [], config, 0, 0
    for index, entry in enumerate(training.stages):
        changes = flatten_changes(entry)
        current = _enter_stage(current, changes, is_first=index == 0, name=f"stage {index + 1}")
        per_step = (current.training.train_batch_size or 0) * current.model.seq_length
        end: int | None = int(entry[UNTIL]) if UNTIL in entry else None
        if UNTIL_TOKENS in entry:
            end = first + -(-(int(entry[UNTIL_TOKENS]) - tokens) // per_step)
        if end is not None and end <= first:
            raise UserError(
                f"stages: stage {index + 1} would end at step {end}, but the previous one ends at step {first}",
                "stages",
            )
        ends = {} if end is None else {UNTIL: end}
        if not index:  # stated explicitly, so that every stage's configuration contains all lengths
            changes = {"seq_length": current.model.seq_length} | changes
        entries.append(ends | changes)
        if end is not None:
            tokens, first = tokens + (end - first) * per_step, end
    last = entries[-1].get(UNTIL)
    if problem := describe_steps_after_stages(config, last):
        raise UserError(problem, "stages")
    return {"stages": entries, "train_iters": training.train_iters or last or 0}


def build_stages(config: Config) -> tuple[Stage, ...]:
    """Build the stages of a run with resolved batch sizes and `stages` (`resolve_config`); one stage without a list.

    Raises UserError if a batch is not divisible.
    """
    training = config.training
    if not training.stages:
        return (Stage(0, 0, training.train_iters, config, 0, training.train_iters, config),)
    stages: list[Stage] = []
    current, first = config, 0
    begins = [0]  # first steps of schedules
    for index, entry in enumerate(training.stages):
        changes = flatten_changes(entry)
        before, current = current, _enter_stage(current, changes, is_first=index == 0, name=f"stage {index + 1}")
        end = min(int(entry.get(UNTIL, training.train_iters)), training.train_iters)
        if index == len(training.stages) - 1:
            end = training.train_iters
        if index and "lr_decay_style" in changes:
            begins.append(first)
        stages.append(Stage(index, first, end, current, begins[-1], 0, before))
        if end >= training.train_iters:
            break
        first = end
    return tuple(
        replace(stage, schedule_end=min([b for b in begins if b > stage.schedule_first], default=training.train_iters))
        for stage in stages
    )


def count_steps(config: Config, num_tokens: int) -> int:
    """Return the number of whole steps, over all stages, for which a number of tokens is enough.

    config: configuration with resolved batch sizes and `stages`.
    """
    steps = 0
    for stage in build_stages(config.replace(train_iters=MAX_STEPS)):
        possible = num_tokens // stage.tokens_per_step
        taken = min(possible, stage.end_step - stage.first_step)
        steps, num_tokens = steps + taken, num_tokens - taken * stage.tokens_per_step
        if taken < stage.end_step - stage.first_step:
            break
    return steps


def _enter_stage(config: Config, changes: dict[str, Any], *, is_first: bool, name: str) -> Config:
    """Return the configuration of a stage from that of the previous one."""
    if "lr_decay_style" in changes and not is_first:
        fresh: dict[str, Any] = {"lr_decay_iters": None, "lr_warmup_iters": None if "warmup" in changes else 0}
        changes = fresh | changes
    after = apply_changes(config, changes)
    batch = config.training.train_batch_size
    if batch is None or not ({"seq_length", *BATCH_SIZES} & changes.keys()):
        return after
    try:
        return _resolve_stage_batch(config, after, changes)
    except UserError as error:
        raise UserError(f"stages: {name}: {error}", "stages") from None


def _resolve_stage_batch(before: Config, after: Config, changes: Mapping[str, Any]) -> Config:
    """Resolve the batch sizes of a stage. It keeps the previous number of tokens unless it sets other sizes."""
    training, old_length, length = before.training, before.model.seq_length, after.model.seq_length
    old_batch, micro = training.train_batch_size or 0, training.train_micro_batch_size_per_gpu
    ranks = old_batch // (micro * training.gradient_accumulation_steps)
    resolved = {key: changes[key] for key in BATCH_SIZES if key in changes}
    if GLOBAL_BATCH_KEY not in resolved and not {MICRO_BATCH_KEY, ACCUMULATION_KEY} <= resolved.keys():
        tokens = old_batch * old_length
        if tokens % length or tokens // length % ranks:
            raise UserError(
                f"seq_length {length}: a batch of {old_batch} × {old_length} = {tokens:,} tokens is not a whole "
                f"number of such sequences on each of {ranks} ranks; set {GLOBAL_BATCH_KEY} to a multiple of {ranks}"
            )
        resolved[GLOBAL_BATCH_KEY] = tokens // length
    if not {MICRO_BATCH_KEY, ACCUMULATION_KEY} & resolved.keys():
        share = resolved[GLOBAL_BATCH_KEY] // ranks
        most = max(1, micro * old_length // length)
        resolved[MICRO_BATCH_KEY] = max(size for size in range(1, min(most, max(share, 1)) + 1) if share % size == 0)
    sections = after.training.model_dump(exclude_unset=True)
    kept = {key: value for key, value in sections.items() if key not in BATCH_SIZES}
    unsettled = after.model_copy(update={"training": type(after.training).model_validate(kept | resolved)})
    return unsettled.replace(**resolve_batch_sizes(unsettled, ranks))


def check_divisible(config: Config) -> Iterator[tuple[str, str]]:
    """Yield sizes that no mesh of the run can divide: the key to blame, and a sentence."""
    launch = config.launch
    pipeline = max(1, launch.pipe_parallel_size)
    yield from find_indivisible_sizes(
        config.model, tensor=launch.model_parallel_size, context=launch.context_parallel_size, pipeline=pipeline
    )
    if pipeline > 1:
        yield from _find_pipeline_conflicts(config.training, pipeline)


def _find_pipeline_conflicts(training: TrainingOptions, pipeline: int) -> Iterator[tuple[str, str]]:
    """Yield options that do not work with pipeline stages."""
    zero, prefix = training.zero_optimization, f"with pipe_parallel_size {pipeline}"
    if training.compute_dtype == "fp16":
        yield "precision", f"precision fp16: {prefix} losses are not scaled; use bf16 or fp32"
    if zero.overlap_comm:
        name = "zero_optimization.overlap_comm"
        why = "gradients are reduced once, after the last micro-batch"
        yield name, f"{name} true: {prefix} {why}; set it to false"
    if zero.offload_optimizer.device != "none":
        name = "zero_optimization.offload_optimizer.device"
        why = "gradients would leave the device before the stages sum shared ones"
        yield name, f"{name} {zero.offload_optimizer.device}: {prefix} {why}; use model_parallel_size, or more stages"
    if zero.stage > 1:
        name = "zero_optimization.stage"
        why = "gradients would be sharded before the stages sum shared ones"
        yield name, f"{name} {zero.stage}: {prefix} {why}; use 0 or 1"


TRIAL_PHASE = "graph trial"
"""Phase of a step in which graphs are tried. A run can do without the additional memory of this phase."""


def find_graph_obstacle(config: Config) -> str | None:
    """Return why a configuration cannot compute its micro-batches as CUDA graphs, or None if no key prevents it."""
    return next(_list_obstacles(config), None)


def find_backend_obstacle(names: str) -> str | None:
    """Return why a CUDA graph cannot contain the calls of attention backends, or None if it can.

    Args:
        names: values of `attention_backend`, separated by commas.
    """
    found = (BACKEND_CAPABILITIES.get(name.strip()) for name in names.split(","))
    return next((backend.graph_obstacle for backend in found if backend and backend.graph_obstacle), None)


def _list_obstacles(config: Config) -> Iterator[str]:
    launch, model, position = config.launch, config.model, config.position
    for key, what in (
        ("pipe_parallel_size", "stages exchange hidden states while they compute"),
        ("model_parallel_size", "ranks exchange activations in every layer"),
        ("context_parallel_size", "ranks exchange keys and values in every layer"),
    ):
        if (size := getattr(launch, key)) > 1:
            yield f"{key} {size}: {what}"
    yield from _list_zero_obstacles(config)
    if position.attention_mask == "document":
        yield "attention_mask document: the documents of a batch decide which kernels run"
    if config.data.task is not None:
        yield f"task {config.data.task}: its batches may have position ids, which the host lays out"
    if position.randomized_positions is not None:
        yield "randomized_positions: the host draws positions in every step"
    for key in DROPOUT_KEYS:
        if (rate := getattr(model, key)) > 0:
            yield f"{key} {rate:g}: random numbers inside a graph are not supported"
    if (reason := find_backend_obstacle(model.attention_backend)) is not None:
        yield f"attention_backend {model.attention_backend}: {reason}"


def _list_zero_obstacles(config: Config) -> Iterator[str]:
    """Yield ZeRO options that use gradients while the next micro-batch overwrites them."""
    zero = config.training.zero_optimization
    if zero.stage == 3:
        yield "zero_optimization.stage 3: ranks gather parameters while they compute"
    elif zero.stage in (1, 2):
        if zero.overlap_comm:
            yield "zero_optimization.overlap_comm: gradients are reduced while others are computed"
        if zero.offload_optimizer.device != "none":
            yield "zero_optimization.offload_optimizer: gradients are copied to the host while others are computed"
        if not zero.contiguous_gradients:
            yield "zero_optimization.contiguous_gradients false: gradients stay where the next ones are written"

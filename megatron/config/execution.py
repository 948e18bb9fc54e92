"""Execution of a configuration: the mesh of its processes, its batch sizes and ZeRO stage, and CUDA graphs.

    train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × data-parallel ranks

The number of processes is final only when a run starts. `megatron.training.resolve_run` then resolves the batch sizes
once. If the configuration alone determines the number, `load` rejects sizes that do not fit, with file and line.

A CUDA graph repeats the launches of one micro-batch: the same kernels, shapes and addresses, without the host.
Conditions that do not depend on keys are checked on the device (`megatron/training/graph_trial.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.attention.backends.backend import BACKEND_CAPABILITIES
from megatron.config.schema import Config
from megatron.distributed.mesh import ParallelSizes
from megatron.options.model import DROPOUT_KEYS
from megatron.options.position import find_indivisible_sizes
from megatron.options.training import (
    ACCUMULATION_KEY,
    GLOBAL_BATCH_KEY,
    MAX_BATCH_SIZE,
    MICRO_BATCH_KEY,
    TrainingOptions,
)
from megatron.utils.errors import UserError


def get_known_world_size(config: Config) -> int | None:
    """Return the number of processes if the configuration alone determines it, or None."""
    launch = config.launch
    if launch.num_gpus is not None:
        return launch.num_gpus * (launch.nodes or 1)
    return count_ranks_per_replica(config) if launch.device == "cpu" and launch.nodes in (None, 1) else None


def count_ranks_per_replica(config: Config) -> int:
    """Return the number of processes per model replica and sequence; a run uses a multiple of it."""
    launch = config.launch
    return launch.model_parallel_size * launch.context_parallel_size * max(1, launch.pipe_parallel_size)


def resolve_mesh_shape(config: Config, world_size: int) -> ParallelSizes:
    """Return the mesh for a number of processes.

    Raises:
        UserError: the parallel sizes of the configuration do not divide the number.
    """
    launch, replica_size = config.launch, count_ranks_per_replica(config)
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


def resolve_zero(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with the ZeRO stage that it needs, and a note if that differs from the given one."""
    zero, precision, launch = config.training.zero_optimization, config.training.compute_dtype, config.launch
    is_divided = launch.model_parallel_size > 1 or launch.pipe_parallel_size > 1
    if zero.stage or precision == "fp32" or not is_divided:
        return config, []
    # Without ZeRO, DeepSpeed's half-precision optimizer counts parameters on these ranks twice in the gradient norm.
    note = f"zero_optimization.stage 1 instead of 0: {precision} with a sharded model needs ZeRO"
    return config.replace(zero_optimization=zero.replace(stage=1).model_dump(exclude_unset=True)), [note]


def resolve_batch_size(config: Config, data_ranks: int) -> Config:
    """Return the configuration with all three batch sizes resolved; any two determine the third.

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
    factors = f"{MICRO_BATCH_KEY} {micro} × {ACCUMULATION_KEY} {steps} × {data_ranks} ranks = {product}"
    if batch is not None and batch != product:
        raise UserError(f"{GLOBAL_BATCH_KEY} {batch} is not {factors}; change one of them")
    if steps < stages:
        raise UserError(
            f"{ACCUMULATION_KEY} {steps} is less than pipe_parallel_size {stages}: each stage works on a different "
            f"micro-batch; use at least {stages}, or 4 × {stages} for a small pipeline bubble"
        )
    if product > MAX_BATCH_SIZE:
        raise UserError(f"{factors}; {GLOBAL_BATCH_KEY} must be at most {MAX_BATCH_SIZE}")
    if batch is not None and {MICRO_BATCH_KEY, ACCUMULATION_KEY} <= set_keys:
        return config  # all three were given and agree
    return config.replace(**{MICRO_BATCH_KEY: micro, ACCUMULATION_KEY: steps, GLOBAL_BATCH_KEY: product})


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

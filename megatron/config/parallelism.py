"""What follows from the number of processes: the mesh, what it can divide, and the three batch sizes.

    train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × data-parallel ranks

The number of processes is known for certain only when they are about to start: `megatron.training.resolve_run` settles
the batch then, once. Where the configuration alone decides it, `load` refuses sizes that do not fit, with their line.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.schema import Config
from megatron.distributed.mesh import ParallelSizes
from megatron.options.model_conflicts import find_indivisible_sizes
from megatron.options.training import (
    ACCUMULATION_KEY,
    GLOBAL_BATCH_KEY,
    MAX_BATCH_SIZE,
    MICRO_BATCH_KEY,
    TrainingOptions,
)
from megatron.utils.errors import UserError


def get_known_world_size(config: Config) -> int | None:
    """The number of processes, if the configuration alone decides it."""
    launch = config.launch
    if launch.num_gpus is not None:
        return launch.num_gpus * (launch.nodes or 1)
    return ranks_per_replica(config) if launch.device == "cpu" and launch.nodes in (None, 1) else None


def ranks_per_replica(config: Config) -> int:
    """Processes that hold one model and one sequence together: a run has a multiple of them."""
    launch = config.launch
    return launch.model_parallel_size * launch.context_parallel_size * max(1, launch.pipe_parallel_size)


def resolve_mesh_shape(config: Config, world_size: int) -> ParallelSizes:
    """How so many processes divide the work.

    Raises:
        UserError: the sizes of the configuration do not divide them.
    """
    launch, replica_size = config.launch, ranks_per_replica(config)
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
            f"does not divide the {world_size} processes (num_gpus); {nearest} would do"
        ) from None


def check_divisible(config: Config) -> Iterator[tuple[str, str]]:
    """What the mesh of a run cannot divide, whatever its number of processes: the key to blame, and a sentence."""
    launch = config.launch
    pipeline = max(1, launch.pipe_parallel_size)
    yield from find_indivisible_sizes(
        config.model, tensor=launch.model_parallel_size, context=launch.context_parallel_size, pipeline=pipeline
    )
    if pipeline > 1:
        yield from _find_pipeline_conflicts(config.training, pipeline)


def _find_pipeline_conflicts(training: TrainingOptions, pipeline: int) -> Iterator[tuple[str, str]]:
    """Options that cannot serve where the layers are divided into pipeline stages."""
    zero, prefix = training.zero_optimization, f"with pipe_parallel_size {pipeline}"
    if training.compute_dtype == "fp16":
        yield "precision", f"precision fp16: {prefix} losses are not scaled; use bf16 or fp32"
    if zero.overlap_comm:
        name = "zero_optimization.overlap_comm"
        why = "gradients are reduced once, after the last micro-batch"
        yield name, f"{name} true: {prefix} {why}; set it to false"
    if zero.offload_optimizer.device != "none":
        name = "zero_optimization.offload_optimizer.device"
        why = "gradients would leave the device before those that stages share are summed"
        yield name, f"{name} {zero.offload_optimizer.device}: {prefix} {why}; use model_parallel_size, or more stages"
    if zero.stage > 1:
        name = "zero_optimization.stage"
        why = "gradients would be divided before those that stages share are summed"
        yield name, f"{name} {zero.stage}: {prefix} {why}; 0 or 1 would do"


def resolve_zero(config: Config) -> tuple[Config, list[str]]:
    """The configuration with the stage of ZeRO that it can have, and a line if that is another than it says."""
    zero, precision, launch = config.training.zero_optimization, config.training.compute_dtype, config.launch
    is_divided = launch.model_parallel_size > 1 or launch.pipe_parallel_size > 1
    if zero.stage or precision == "fp32" or not is_divided:
        return config, []
    # DeepSpeed's half-precision optimizer without ZeRO counts what these ranks hold twice in the gradient's norm.
    note = f"zero_optimization.stage 1 instead of 0: without ZeRO, {precision} cannot divide a model"
    return config.replace(zero_optimization=zero.replace(stage=1).model_dump(exclude_unset=True)), [note]


def resolve_batch_size(config: Config, data_ranks: int) -> Config:
    """The configuration with all three batch sizes consistent; of two that are given the third follows.

    data_ranks: how many ranks read different sequences (`resolve_mesh_shape(…).data`).

    Raises:
        UserError: if no third fits, or the batch is too large, naming all numbers.
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
            f"{ACCUMULATION_KEY} {steps} is less than pipe_parallel_size {stages}: each stage works on a micro-batch "
            f"of its own; {stages} would do, and 4 × {stages} or more leave few of them waiting"
        )
    if product > MAX_BATCH_SIZE:
        raise UserError(f"{factors}; {GLOBAL_BATCH_KEY} must be at most {MAX_BATCH_SIZE}")
    if batch is not None and {MICRO_BATCH_KEY, ACCUMULATION_KEY} <= set_keys:
        return config  # all three were given, and agree
    return config.replace(**{MICRO_BATCH_KEY: micro, ACCUMULATION_KEY: steps, GLOBAL_BATCH_KEY: product})

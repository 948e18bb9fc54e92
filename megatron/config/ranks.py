"""What follows from the number of processes: the mesh, and the three batch sizes.

    train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × data-parallel ranks

The number of processes is known for certain only when they are about to start: `megatron.training.preflight` settles
the batch then, once. Where the configuration alone decides it, `load` refuses sizes that do not fit, with their line.
"""

from __future__ import annotations

from megatron.config.schema import Config
from megatron.errors import UserError
from megatron.parallel.mesh import Sizes
from megatron.training.options import BATCH, LARGEST_BATCH, MICRO, STEPS


def known_world(config: Config) -> int | None:
    """The number of processes, if the configuration alone decides it."""
    if config.launch.num_gpus is not None:
        return config.launch.num_gpus
    return 1 if config.launch.device == "cpu" else None


def mesh_sizes(config: Config, world: int) -> Sizes:
    """How so many processes divide the work.

    Raises:
        UserError: the sizes of the configuration do not divide them.
    """
    tensor, pipeline = config.launch.model_parallel_size, max(1, config.launch.pipe_parallel_size)
    try:
        return Sizes.of(world, tensor=tensor, pipeline=pipeline)
    except ValueError:
        raise UserError(
            f"model_parallel_size {tensor} × pipe_parallel_size {pipeline} does not divide the {world} processes "
            "(num_gpus); change one of them"
        ) from None


def with_batch(config: Config, ranks: int) -> Config:
    """The configuration with all three batch sizes consistent; of two that are given the third follows.

    ranks: those that read different sequences (`mesh_sizes(…).data`).

    Raises:
        UserError: if no third fits, or the batch is too large, naming all numbers.
    """
    training, given = config.training, config.training.model_fields_set
    micro, steps, batch = training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps, None
    if training.train_batch_size is not None:
        batch = training.train_batch_size
        if MICRO in given and STEPS not in given:
            steps = max(1, batch // (micro * ranks))
        elif STEPS in given and MICRO not in given:
            micro = max(1, batch // (steps * ranks))
        elif not {MICRO, STEPS} & given:
            micro = max(1, batch // ranks)
            steps = 1
    product = micro * steps * ranks
    if batch is not None and batch != product:
        raise UserError(
            f"{BATCH} {batch} is not {MICRO} {micro} × {STEPS} {steps} × {ranks} ranks = {product}; change one of them"
        )
    if product > LARGEST_BATCH:
        raise UserError(
            f"{MICRO} {micro} × {STEPS} {steps} × {ranks} ranks = {product}; {BATCH} must be at most {LARGEST_BATCH}"
        )
    return config.replace(**{MICRO: micro, STEPS: steps, BATCH: product})

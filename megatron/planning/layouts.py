"""Which layouts a configuration could be trained in on so many GPUs, and which of them is best.

Every layout trains the same thing: the same batch, length, steps and precision. What is searched is how ranks divide
it (tensor inside a node, context, pipeline, data), ZeRO's stage, the size of a micro-batch (powers of two), and whether
activations are recomputed. What `train` would refuse is left out by the same rules.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.checks import check
from megatron.config.ranks import mesh_sizes, undivided, with_batch, with_zero
from megatron.config.schema import Config
from megatron.distributed.mesh import Sizes
from megatron.errors import UserError
from megatron.options.training import BATCH, MICRO, STEPS
from megatron.planning.memory import Memory, memory
from megatron.planning.step_time import Cluster, StepTime, step_time

LARGEST_MICRO_BATCH = 128
"""Sequences: beyond it nothing gets faster."""


@dataclass(frozen=True)
class Layout:
    """A configuration in one layout, with what it needs."""

    config: Config
    sizes: Sizes
    memory: Memory
    time: StepTime

    @property
    def keys(self) -> dict[str, Any]:
        """The keys that say it, as they are written in a file or on the command line."""
        launch, training = self.config.launch, self.config.training
        return {
            "nodes": launch.nodes,
            "num_gpus": launch.num_gpus,
            "model_parallel_size": launch.model_parallel_size,
            "context_parallel_size": launch.context_parallel_size,
            "pipe_parallel_size": launch.pipe_parallel_size,
            "zero_optimization.stage": training.zero_optimization.stage,
            MICRO: training.train_micro_batch_size_per_gpu,
            STEPS: training.gradient_accumulation_steps,
            BATCH: training.train_batch_size,
            "checkpoint_activations": self.config.model.checkpoint_activations,
        }


def as_configured(config: Config, vocabulary: int, cluster: Cluster) -> Layout:
    """The layout that a configuration says.

    Raises:
        UserError: so many GPUs cannot have it; says why, as `train` would.
    """
    return _layout(on(cluster, config), vocabulary, cluster)


def layouts(config: Config, vocabulary: int, cluster: Cluster) -> list[Layout]:
    """For each mesh that fits the GPUs' memory the fastest way to use it, the fastest mesh first.

    Raises:
        UserError: the configuration does not say how large a batch is; or nothing is known of its position encoding.
    """
    best: dict[Sizes, Layout] = {}
    for layout in candidates(config, vocabulary, cluster):
        if layout.memory.fits(cluster.gpu.gib):
            best[layout.sizes] = min(layout, best.get(layout.sizes, layout), key=_rank)
    return sorted(best.values(), key=_rank)


def _rank(layout: Layout) -> tuple[float, ...]:
    """Seconds to four digits; of equal ones the larger micro-batch, which GPUs like better, then less memory."""
    micro = layout.config.training.train_micro_batch_size_per_gpu
    return float(f"{layout.time.total:.4g}"), -micro, layout.memory.total


def smallest(config: Config, vocabulary: int, cluster: Cluster) -> Layout | None:
    """The layout that needs least memory, whether it fits or not; None if so many GPUs divide nothing of it.

    Raises:
        UserError: as `layouts`.
    """
    return min(candidates(config, vocabulary, cluster), key=lambda layout: layout.memory.total, default=None)


def candidates(config: Config, vocabulary: int, cluster: Cluster) -> Iterator[Layout]:
    """All layouts that `train` accepts, in no order. Raises UserError as `layouts`."""
    config = on(cluster, config)
    batch = _batch(config, cluster.gpus)
    zero = config.training.zero_optimization
    for sizes in _meshes(cluster):
        if batch % sizes.data:
            continue
        mesh = config.replace(
            model_parallel_size=sizes.tensor, context_parallel_size=sizes.context, pipe_parallel_size=sizes.pipeline
        )
        own = batch // sizes.data
        for stage in range(4):
            staged = mesh.replace(zero_optimization=zero.replace(stage=stage).model_dump(exclude_unset=True))
            if any(undivided(staged)) or with_zero(staged)[1]:
                continue
            for micro in _powers(min(own, LARGEST_MICRO_BATCH)):
                if own % micro or own // micro < sizes.pipeline:
                    continue
                given = {BATCH: batch, MICRO: micro, STEPS: own // micro}
                for again in (False, True):
                    try:
                        yield _layout(staged.replace(checkpoint_activations=again, **given), vocabulary, cluster)
                    except UserError:
                        continue


def _layout(config: Config, vocabulary: int, cluster: Cluster) -> Layout:
    for _, problem in check(config):
        raise UserError(problem)
    sizes = mesh_sizes(config, cluster.gpus)
    config = with_batch(with_zero(config)[0], sizes.data)
    return Layout(config, sizes, memory(config, sizes, vocabulary), step_time(config, sizes, vocabulary, cluster))


def on(cluster: Cluster, config: Config) -> Config:
    """The configuration for so many GPUs. Raises UserError if they are no whole nodes."""
    gpus, per_node = cluster.gpus, min(cluster.gpus, cluster.per_node)
    if gpus % per_node:
        raise UserError(f"{gpus} GPUs are not whole nodes of {per_node}; give another --gpus, or --gpus-per-node")
    return config.replace(num_gpus=per_node, nodes=gpus // per_node, device="cuda")


def _batch(config: Config, gpus: int) -> int:
    """Sequences per step: the same for every layout."""
    if config.training.train_batch_size is not None:
        return config.training.train_batch_size
    try:
        return with_batch(config, mesh_sizes(config, gpus).data).training.train_batch_size or 0
    except UserError as error:
        raise UserError(f"{error}; or give train_batch_size, which every layout keeps") from None


def _meshes(cluster: Cluster) -> Iterator[Sizes]:
    """Tensor ranks share a node."""
    gpus = cluster.gpus
    for tensor in _divisors(gpus):
        if cluster.per_node % tensor:
            continue
        for context in _divisors(gpus // tensor):
            for pipeline in _divisors(gpus // tensor // context):
                yield Sizes.of(gpus, tensor=tensor, context=context, pipeline=pipeline)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]

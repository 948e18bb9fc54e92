"""Search for parallel layouts of a configuration on a given number of GPUs.

Every layout keeps the batch, length, steps and precision. The search varies the mesh (tensor inside a node, context,
pipeline, data), the ZeRO stage, the micro-batch size (powers of two) and activation checkpointing. It applies the same
rules as `train` and skips layouts that `train` would reject.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.config.execution import check_divisible, needs_zero, resolve_config
from megatron.config.schema import Config
from megatron.config.validation import check_config
from megatron.distributed.mesh import ParallelSizes
from megatron.options.training import ACCUMULATION_KEY, GLOBAL_BATCH_KEY, MICRO_BATCH_KEY
from megatron.planning.memory_estimate import MemoryEstimate, estimate_memory
from megatron.planning.model_costs import PlannedModel, plan_model
from megatron.planning.step_time import Cluster, StepTime, estimate_step_time
from megatron.utils.errors import UserError

MAX_MICRO_BATCH = 128
"""Largest micro-batch of the search, in sequences; larger ones are not faster."""


@dataclass(frozen=True)
class ParallelLayout:
    """Configuration in one layout, with its estimated memory."""

    planned: PlannedModel
    sizes: ParallelSizes
    memory: MemoryEstimate
    vocab_size: int
    cluster: Cluster

    @property
    def config(self) -> Config:
        """Configuration with the layout's keys."""
        return self.planned.config

    @cached_property
    def step_time(self) -> StepTime:
        """Estimated time of a step; computed on first access, since layouts that do not fit never need it."""
        return estimate_step_time(self.planned, self.sizes, self.vocab_size, self.cluster)

    @property
    def config_keys(self) -> dict[str, Any]:
        """Configuration keys that define the layout, as written in a file or on the command line."""
        launch, training = self.config.launch, self.config.training
        return {
            "nodes": launch.nodes,
            "num_gpus": launch.num_gpus,
            "model_parallel_size": launch.model_parallel_size,
            "context_parallel_size": launch.context_parallel_size,
            "pipe_parallel_size": launch.pipe_parallel_size,
            "zero_optimization.stage": training.zero_optimization.stage,
            MICRO_BATCH_KEY: training.train_micro_batch_size_per_gpu,
            ACCUMULATION_KEY: training.gradient_accumulation_steps,
            GLOBAL_BATCH_KEY: training.train_batch_size,
            "checkpoint_activations": self.config.model.checkpoint_activations,
        }

    @property
    def overrides(self) -> str:
        """The configuration keys of the layout as words of a shell command."""
        return " ".join(f"{name}={str(value).lower()}" for name, value in self.config_keys.items())


def build_configured_layout(config: Config, vocab_size: int, cluster: Cluster) -> ParallelLayout:
    """Build the layout that a configuration defines.

    Raises:
        UserError: the configuration is invalid on the cluster's GPUs; the message is that of `train`.
    """
    return _build_layout(fit_config_to_cluster(cluster, config), vocab_size, cluster)


def find_fastest_layouts(config: Config, vocab_size: int, cluster: Cluster) -> list[ParallelLayout]:
    """Find the fastest layout for each mesh that fits the GPUs' memory, sorted by step time.

    Raises:
        UserError: the configuration sets no batch size, or its position encoding declares no costs.
    """
    best: dict[ParallelSizes, ParallelLayout] = {}
    for layout in iter_layouts(config, vocab_size, cluster):
        if layout.memory.fits(cluster.gpu.gib):
            best[layout.sizes] = min(layout, best.get(layout.sizes, layout), key=_get_sort_key)
    return sorted(best.values(), key=_get_sort_key)


def _get_sort_key(layout: ParallelLayout) -> tuple[float, ...]:
    """Return a sort key: step time to four digits, larger micro-batches (faster in practice), less memory."""
    micro_batch_size = layout.config.training.train_micro_batch_size_per_gpu
    return float(f"{layout.step_time.total:.4g}"), -micro_batch_size, layout.memory.total


def find_smallest_layout(config: Config, vocab_size: int, cluster: Cluster) -> ParallelLayout | None:
    """Find the layout with the lowest memory, even if it does not fit; None if no layout is valid.

    Raises:
        UserError: the same errors as `iter_layouts`.
    """
    return min(iter_layouts(config, vocab_size, cluster), key=lambda layout: layout.memory.total, default=None)


def iter_layouts(config: Config, vocab_size: int, cluster: Cluster) -> Iterator[ParallelLayout]:
    """Yield all layouts that `train` accepts, in no particular order. Raises UserError as `find_fastest_layouts`."""
    config = fit_config_to_cluster(cluster, config)
    global_batch_size = _get_global_batch_size(config, cluster.num_gpus)
    zero = config.training.zero_optimization
    for sizes in _iter_mesh_sizes(cluster):
        if global_batch_size % sizes.data:
            continue
        mesh_config = config.replace(
            model_parallel_size=sizes.tensor, context_parallel_size=sizes.context, pipe_parallel_size=sizes.pipeline
        )
        replica_batch_size = global_batch_size // sizes.data
        for stage in range(4):
            zero_config = mesh_config.replace(
                zero_optimization=zero.replace(stage=stage).model_dump(exclude_unset=True)
            )
            if any(check_divisible(zero_config)) or needs_zero(zero_config):
                continue
            for micro_batch_size in _list_powers_of_two(min(replica_batch_size, MAX_MICRO_BATCH)):
                if replica_batch_size % micro_batch_size or replica_batch_size // micro_batch_size < sizes.pipeline:
                    continue
                batch_options = {
                    GLOBAL_BATCH_KEY: global_batch_size,
                    MICRO_BATCH_KEY: micro_batch_size,
                    ACCUMULATION_KEY: replica_batch_size // micro_batch_size,
                }
                for recompute in (False, "selective", True):
                    try:
                        yield _build_layout(
                            zero_config.replace(checkpoint_activations=recompute, **batch_options), vocab_size, cluster
                        )
                    except UserError:
                        continue


def _build_layout(config: Config, vocab_size: int, cluster: Cluster) -> ParallelLayout:
    check_config(config)
    resolved = resolve_config(config, cluster.num_gpus)
    planned, sizes = plan_model(resolved.config), resolved.sizes
    memory = estimate_memory(planned, sizes, vocab_size, gpu_bytes=cluster.gpu_bytes)
    return ParallelLayout(planned, sizes, memory, vocab_size, cluster)


def fit_config_to_cluster(cluster: Cluster, config: Config) -> Config:
    """Return the configuration for the cluster's GPUs. Raises UserError if they do not fill whole nodes."""
    num_gpus, gpus_per_node = cluster.num_gpus, min(cluster.num_gpus, cluster.gpus_per_node)
    if num_gpus % gpus_per_node:
        raise UserError(f"{num_gpus} GPUs do not fill whole nodes of {gpus_per_node}; change --gpus or --gpus-per-node")
    return config.replace(num_gpus=gpus_per_node, nodes=num_gpus // gpus_per_node, device="cuda")


def _get_global_batch_size(config: Config, num_gpus: int) -> int:
    """Return the sequences per step, which every layout keeps."""
    if config.training.train_batch_size is not None:
        return config.training.train_batch_size
    try:
        return resolve_config(config, num_gpus).config.training.train_batch_size or 0
    except UserError as error:
        raise UserError(f"{error}; or set train_batch_size, which every layout keeps") from None


def _iter_mesh_sizes(cluster: Cluster) -> Iterator[ParallelSizes]:
    """Yield all meshes whose tensor ranks share a node."""
    num_gpus = cluster.num_gpus
    for tensor in _list_divisors(num_gpus):
        if cluster.gpus_per_node % tensor:
            continue
        for context in _list_divisors(num_gpus // tensor):
            for pipeline in _list_divisors(num_gpus // tensor // context):
                yield ParallelSizes.from_world_size(num_gpus, tensor=tensor, context=context, pipeline=pipeline)


def _list_divisors(value: int) -> list[int]:
    return [d for d in range(1, value + 1) if value % d == 0]


def _list_powers_of_two(max_value: int) -> list[int]:
    return [2**i for i in range(max_value.bit_length())]

"""Checks whether the keys of a configuration allow CUDA graphs.

A graph repeats the launches of one micro-batch: the same kernels, shapes and addresses, without the host. Conditions
that do not depend on keys are checked on the device (`megatron/training/graph_trial.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.attention.backends.capabilities import BACKEND_CAPABILITIES
from megatron.config.schema import Config
from megatron.options.model import DROPOUT_KEYS

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

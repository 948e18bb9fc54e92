"""Norms of the parameters and of their updates, by the optimizer's group and the module.

    param_norm     ‖θ‖₂ of the float32 masters after the step
    update_norm    ‖θ − θ′‖₂ with θ′ the masters before the step; 0 if the step was skipped

Every element is counted once, on the rank that updates it, in any layout. Ranks sum squares in float64. Only measured
steps pay the cost: one exchange on the host, and a copy of the masters that this rank updates during the step, 4 bytes
per parameter divided by ZeRO.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.checkpoint.engine_state import OptimizerShard, is_replicated, list_optimizer_shards
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import is_counted_on_this_rank
from megatron.training.engine import Engine

TOTAL = "all"
"""Label of all parameters together."""


class ParameterNorms:
    """Norms of one step at a time. All ranks must call the methods together.

    Args:
        engine: engine of the run.
        groups: process groups of the run.
    """

    def __init__(self, engine: Engine, groups: ProcessGroups) -> None:
        self._engine, self._groups = engine, groups
        self._before: dict[str, Tensor] = {}
        self.param_norm: dict[str, float] | None = None
        """Norms of the last measured step, by label."""
        self.update_norm: dict[str, float] | None = None

    @torch.no_grad()
    def begin_step(self) -> None:
        """Copy the parameters before a step."""
        self._before = {shard.name: shard.master.clone() for shard in self._list_shards()}

    @torch.no_grad()
    def end_step(self) -> None:
        """Measure the step taken since `begin_step`. Waits for the device."""
        shards, labels = self._list_shards(), self._engine.parameter_labels
        masters = [shard.master for shard in shards]
        updates = torch._foreach_sub(masters, [self._before[shard.name] for shard in shards]) if shards else []
        self._before = {}
        own: dict[str, tuple[float, float]] = {}
        for shard, squares in zip(shards, _sum_squares(masters, updates), strict=True):
            sums = own.get(labels[shard.name], (0.0, 0.0))
            own[labels[shard.name]] = (sums[0] + squares[0], sums[1] + squares[1])
        self.param_norm, self.update_norm = _merge_norms(self._groups.gather_objects(own))

    def _list_shards(self) -> list[OptimizerShard]:
        """Return the shards of the masters that this rank counts."""
        deepspeed, mesh = self._engine.deepspeed, self._groups.mesh
        shards = [shard for shard in list_optimizer_shards(deepspeed) if is_counted_on_this_rank(shard.parameter, mesh)]
        if is_replicated(deepspeed):
            shards = [shard.split_over_axis(mesh.dp_cp) for shard in shards]
        return [shard for shard in shards if shard.master.numel()]


def _sum_squares(masters: Sequence[Tensor], updates: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Return Σ θ² and Σ (θ − θ′)² of each shard, in float64, with a single host synchronization."""
    if not masters:
        return []
    norms = torch._foreach_norm([*masters, *updates], 2, dtype=torch.float64)
    squares = torch.stack(norms).square().view(2, -1).tolist()
    return list(zip(*squares, strict=True))


def _merge_norms(parts: Sequence[Mapping[str, tuple[float, float]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the norms of the parameters and of their updates by label, from the sums of all ranks."""
    labels = [TOTAL, *sorted({label for part in parts for label in part})]
    norms: list[dict[str, float]] = []
    for kind in (0, 1):
        sums = {label: sum(part[label][kind] for part in parts if label in part) for label in labels[1:]}
        norms.append({label: (sum(sums.values()) if label == TOTAL else sums[label]) ** 0.5 for label in labels})
    return norms[0], norms[1]

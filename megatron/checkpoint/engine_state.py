"""State of a DeepSpeed engine: float32 masters, the optimizer's moments of each parameter, and counters.

With any optimizer, a rank steps some consecutive elements of a parameter, called a *shard*:

    ZeRO 0, float32      the whole parameter, which is its own master
    ZeRO 0, half         the whole parameter, with a separate master
    ZeRO 1 and 2         an equal share of each group's concatenated parameters: all, some or none of a parameter
    (also in bfloat16
    with float32 sums)
    ZeRO 3               an equal share of every parameter, the last one padded

Checkpoints are written from shards and restored into shards, so they do not depend on the optimizer class.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.distributed.mesh import Axis
from megatron.model.parameter_groups import Algorithm, get_algorithm
from megatron.utils.errors import RunError

MOMENTS: dict[Algorithm, tuple[str, ...]] = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Muon": ("momentum_buffer",),
    "Lion": ("exp_avg",),
}
"""Optimizer state per parameter, by torch's names: running means of the gradient and of its square."""
COUNTS_STEPS: tuple[Algorithm, ...] = ("AdamW",)
"""Algorithms whose update depends on the step count."""
_LOSS_SCALE_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Mutable fields of DeepSpeed's dynamic loss scaler."""


@dataclass(frozen=True)
class OptimizerShard:
    """Consecutive elements of a parameter's tensor-parallel shard, with their master and optimizer state on this rank.

    All tensors are flat views of the optimizer's own tensors, so writing to them restores the optimizer.
    """

    name: str
    """Name as in `model.named_parameters()`."""
    parameter: nn.Parameter
    start: int
    """Index of the first element in the flattened parameter."""
    master: Tensor
    moments: dict[str, Tensor]
    """Optimizer state by the names in `MOMENTS`."""
    step: Tensor | None
    """Adam's step count, shared by all shards of one flat tensor; None for algorithms without a step count."""

    @property
    def stop(self) -> int:
        return self.start + self.master.numel()

    def split_over_axis(self, axis: Axis) -> "OptimizerShard":
        """Return this rank's share of a shard that several ranks have, so that each writes a different share."""
        size = -(-self.master.numel() // axis.size)
        low = min(axis.index * size, self.master.numel())
        size = min(size, self.master.numel() - low)
        moments = {kind: tensor.narrow(0, low, size) for kind, tensor in self.moments.items()}
        return OptimizerShard(
            self.name, self.parameter, self.start + low, self.master.narrow(0, low, size), moments, self.step
        )


@dataclass(frozen=True)
class _ShardLocation:
    """Location of a parameter's elements, from `start` on, in one of the optimizer's tensors, from `offset` on."""

    start: int
    tensor: Tensor
    offset: int
    size: int


class _UnshardedMasters:
    """Parameters that are their own masters: float32 without ZeRO, with torch's own optimizer."""

    replicated = True
    """True if all data- and context-parallel ranks step the same shards."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def locate(self, parameter: nn.Parameter) -> _ShardLocation | None:
        """Return the location of this rank's elements of a parameter, or None if it has none."""
        return _ShardLocation(0, parameter, 0, parameter.numel())

    def sync_model_weights(self) -> None:
        """Copy the masters to the model's weights. All ranks must call this."""


class _HalfPrecisionMasters(_UnshardedMasters):
    """Separate master for each parameter: half precision without ZeRO (`FP16_UnfusedOptimizer`)."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        self._pairs = [pair for group in groups for pair in zip(*group, strict=True)]
        self._masters = {id(copy): master for copy, master in self._pairs}

    def locate(self, parameter: nn.Parameter) -> _ShardLocation | None:
        master = self._masters[id(parameter)]
        return _ShardLocation(0, master, 0, master.numel())

    def sync_model_weights(self) -> None:
        for copy, master in self._pairs:
            copy.copy_(master)


class _Zero12Masters(_UnshardedMasters):
    """Equal shares of each concatenated parameter group: ZeRO 1 and 2 (`DeepSpeedZeroOptimizer`, `BF16_Optimizer`)."""

    replicated = False

    def locate(self, parameter: nn.Parameter) -> _ShardLocation | None:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        (flat,) = self.optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
        in_parameter, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        return _ShardLocation(in_parameter.start, flat, in_flat.start, in_flat.numel)

    def sync_model_weights(self) -> None:
        self.optimizer.update_lp_params()


class _Zero3Masters(_UnshardedMasters):
    """Equal shares of every parameter, the last one padded: ZeRO 3 (`DeepSpeedZeroOptimizer_Stage3`)."""

    replicated = False

    def locate(self, parameter: nn.Parameter) -> _ShardLocation | None:
        group, offset, size = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        start = parameter.ds_tensor.ds_numel * parameter.ds_zero_partition_rank  # type: ignore[attr-defined]
        size = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
        return (
            _ShardLocation(start, self.optimizer.fp32_partitioned_groups_flat[group], offset, size)
            if size > 0
            else None
        )

    def sync_model_weights(self) -> None:
        optimizer = self.optimizer
        for group, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            flat, parts = optimizer.fp16_partitioned_groups_flat[group], optimizer.fp16_partitioned_groups[group]
            flat.copy_(master)
            for part, new in zip(parts, optimizer.unflatten(flat, parts), strict=True):
                part.data = new.data
        if persistent := optimizer.persistent_parameters:  # small parameters that every rank keeps whole
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


_MASTERS_BY_OPTIMIZER: dict[str, type[_UnshardedMasters]] = {
    **dict.fromkeys(("ProjectedAdamW", "ProjectedLion", "MuonWithAdamW"), _UnshardedMasters),
    "FP16_UnfusedOptimizer": _HalfPrecisionMasters,
    "DeepSpeedZeroOptimizer": _Zero12Masters,
    "FlatZeroOptimizer": _Zero12Masters,  # training/zero_optimizer.py
    "BF16_Optimizer": _Zero12Masters,
    "DeepSpeedZeroOptimizer_Stage3": _Zero3Masters,
}
"""Masters by the class name of an engine's optimizer."""


def _wrap_optimizer(engine: Any) -> _UnshardedMasters:
    name = type(engine.optimizer).__name__
    if name not in _MASTERS_BY_OPTIMIZER:
        raise RunError(f"DeepSpeed's {name}: unsupported optimizer class, its state cannot be saved")
    return _MASTERS_BY_OPTIMIZER[name](engine.optimizer)


def list_optimizer_shards(engine: Any) -> list[OptimizerShard]:
    """Return all shards that this rank steps, in the order of the model's parameters.

    Args:
        engine: DeepSpeed engine. Missing moments are created, as the optimizer does before its first step.

    Raises:
        RunError: the optimizer class is not supported.
    """
    shards, masters = [], _wrap_optimizer(engine)
    for name, parameter in engine.module.named_parameters():
        if (location := masters.locate(parameter)) is None:
            continue
        algorithm = get_algorithm(parameter)
        state, kinds = _get_moments(engine.basic_optimizer, location.tensor, algorithm), MOMENTS[algorithm]
        master, *moments = (
            tensor.detach().view(-1).narrow(0, location.offset, location.size)
            for tensor in (location.tensor, *(state[moment] for moment in kinds))
        )
        moments_by_name = dict(zip(kinds, moments, strict=True))
        shards.append(OptimizerShard(name, parameter, location.start, master, moments_by_name, state.get("step")))
    return shards


def is_replicated(engine: Any) -> bool:
    """Return True if all data- and context-parallel ranks step the same shards."""
    return _wrap_optimizer(engine).replicated


@torch.no_grad()
def sync_model_weights(engine: Any) -> None:
    """Copy the masters to the model's weights. All ranks must call this."""
    _wrap_optimizer(engine).sync_model_weights()


def _get_moments(optimizer: torch.optim.Optimizer, master: Tensor, algorithm: Algorithm) -> dict[str, Tensor]:
    """Return the optimizer state of one tensor, and initialize it as the optimizer would if it is missing."""
    state: dict[str, Tensor] = optimizer.state[master]
    if not state:
        if algorithm in COUNTS_STEPS:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)  # as the fused kernel requires
        state.update({kind: torch.zeros_like(master.detach()) for kind in MOMENTS[algorithm]})
    return state


class EngineCounters:
    """Counters of a DeepSpeed engine: steps, and the loss scale of float16.

    Plain numbers only (`Stateful`).

    Args:
        engine: DeepSpeed engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return `counts` in a form that JSON can store."""
        scaler = _find_loss_scaler(self._engine)
        loss_scale = None
        if scaler is not None:
            loss_scale = {name: vars(scaler)[name] for name in _LOSS_SCALE_FIELDS if name in vars(scaler)}
        return {"counts": {"skipped_steps": self._engine.skipped_steps, "loss_scale": loss_scale}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore `counts` and `step`. A loss scale is ignored if either side has none."""
        engine, step, counts = self._engine, state_dict["step"], state_dict["counts"] or {}
        engine.global_steps, engine.skipped_steps = step, int(counts.get("skipped_steps", 0))
        engine.global_samples = step * engine.train_batch_size()
        engine.micro_steps = step * engine.gradient_accumulation_steps()
        scaler, loss_scale = _find_loss_scaler(engine), counts.get("loss_scale")
        if scaler is not None and loss_scale is not None:
            vars(scaler).update({name: value for name, value in loss_scale.items() if name in vars(scaler)})


def _find_loss_scaler(engine: Any) -> Any:
    """Return the dynamic loss scaler, or None if the loss scale is fixed."""
    optimizer = engine.optimizer
    for owner, scaler in (
        (optimizer, getattr(optimizer, "loss_scaler", None)),  # ZeRO
        (getattr(optimizer, "loss_scale_config", None), getattr(optimizer, "loss_scale_config", None)),
    ):
        if scaler is not None and getattr(owner, "dynamic_loss_scale", False):
            return scaler
    return None

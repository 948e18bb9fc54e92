"""What DeepSpeed's engine holds: the float32 masters and the optimizer's moments of each parameter, and its counters.

Whatever the optimizer, a rank steps some consecutive elements of a parameter, a *shard* of it:

    ZeRO 0, float32      the whole parameter is its own master
    ZeRO 0, half         a master beside each parameter, whole
    ZeRO 1 and 2         a rank's equal part of each group's parameters laid end to end: of one parameter all, some or
    (also in bfloat16    none
    with float32 sums)
    ZeRO 3               a rank's equal part of every parameter, the last one padded

A checkpoint is written from these shards and restored into them, so it says nothing of which optimizer they are of.
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
"""What an algorithm keeps of each parameter, by torch's names: running means of the gradient, and of its square."""
COUNTS_STEPS: tuple[Algorithm, ...] = ("AdamW",)
"""Algorithms whose step depends on how many there were."""
_LOSS_SCALE_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What moves in DeepSpeed's object for a dynamic loss scale."""


@dataclass(frozen=True)
class OptimizerShard:
    """Consecutive elements of a parameter (of what a tensor-parallel rank holds of it), and what this rank has of them.

    All tensors are views of the optimizer's own, flat, so that writing into them restores it.
    """

    name: str
    """As in `model.named_parameters()`."""
    parameter: nn.Parameter
    start: int
    """The first of its elements, of the flattened parameter."""
    master: Tensor
    moments: dict[str, Tensor]
    """By the names in `MOMENTS`."""
    step: Tensor | None
    """Adam's count of steps; shards of one flat tensor share it. None of an algorithm that counts none."""

    @property
    def stop(self) -> int:
        return self.start + self.master.numel()

    def split_over_axis(self, axis: Axis) -> "OptimizerShard":
        """The part that falls to one of several ranks that hold the same, for each to write."""
        size = -(-self.master.numel() // axis.size)
        low = min(axis.index * size, self.master.numel())
        size = min(size, self.master.numel() - low)
        moments = {kind: tensor.narrow(0, low, size) for kind, tensor in self.moments.items()}
        return OptimizerShard(
            self.name, self.parameter, self.start + low, self.master.narrow(0, low, size), moments, self.step
        )


@dataclass(frozen=True)
class _ShardLocation:
    """A parameter's elements from `start` on are those of one of the optimizer's own tensors from `offset` on."""

    start: int
    tensor: Tensor
    offset: int
    size: int


class _UnshardedMasters:
    """Parameters that are their own masters: float32 without ZeRO, where the engine's optimizer is torch's own."""

    replicated = True
    """Do all ranks that divide a batch step the same shards?"""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def locate(self, parameter: nn.Parameter) -> _ShardLocation | None:
        """Where this rank has elements of a parameter; None if it has none."""
        return _ShardLocation(0, parameter, 0, parameter.numel())

    def sync_model_weights(self) -> None:
        """Make the weights that the model computes with those of the masters. All ranks must call this."""


class _HalfPrecisionMasters(_UnshardedMasters):
    """A master beside each parameter: half precision without ZeRO (`FP16_UnfusedOptimizer`)."""

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
    """Equal parts of each group laid end to end: ZeRO 1 and 2 (`DeepSpeedZeroOptimizer`, `BF16_Optimizer`)."""

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
    """Equal parts of every parameter, the last one padded: ZeRO 3 (`DeepSpeedZeroOptimizer_Stage3`)."""

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
        if persistent := optimizer.persistent_parameters:  # small ones, which every rank has whole
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
"""By the names of the classes of an engine's optimizer."""


def _wrap_optimizer(engine: Any) -> _UnshardedMasters:
    name = type(engine.optimizer).__name__
    if name not in _MASTERS_BY_OPTIMIZER:
        raise RunError(f"DeepSpeed's {name}: where it keeps masters and moments is not known, so it cannot be saved")
    return _MASTERS_BY_OPTIMIZER[name](engine.optimizer)


def list_optimizer_shards(engine: Any) -> list[OptimizerShard]:
    """All shards that this rank steps, in the order of the model's parameters.

    Args:
        engine: DeepSpeed's. Moments that it has not made yet are made, as the optimizer does before its first step.

    Raises:
        RunError: its optimizer is none of those that are known here.
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
    """Do all ranks that divide a batch step the same shards?"""
    return _wrap_optimizer(engine).replicated


@torch.no_grad()
def sync_model_weights(engine: Any) -> None:
    """Make the weights that the model computes with those of the masters. All ranks must call this."""
    _wrap_optimizer(engine).sync_model_weights()


def _get_moments(optimizer: torch.optim.Optimizer, master: Tensor, algorithm: Algorithm) -> dict[str, Tensor]:
    """The optimizer's state of one of its tensors, made as it makes it where there is none."""
    state: dict[str, Tensor] = optimizer.state[master]
    if not state:
        if algorithm in COUNTS_STEPS:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)  # as the fused kernel wants it
        state.update({kind: torch.zeros_like(master.detach()) for kind in MOMENTS[algorithm]})
    return state


class EngineCounters:
    """What DeepSpeed's engine counts: steps, and the loss scale of float16. Numbers only (`Stateful`).

    Args:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """`counts`, as JSON can hold them."""
        scaler = _find_loss_scaler(self._engine)
        loss_scale = None
        if scaler is not None:
            loss_scale = {name: vars(scaler)[name] for name in _LOSS_SCALE_FIELDS if name in vars(scaler)}
        return {"counts": {"skipped_steps": self._engine.skipped_steps, "loss_scale": loss_scale}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put `counts` back, and `step`. A loss scale is left out where there is none, and the other way round."""
        engine, step, counts = self._engine, state_dict["step"], state_dict["counts"] or {}
        engine.global_steps, engine.skipped_steps = step, int(counts.get("skipped_steps", 0))
        engine.global_samples = step * engine.train_batch_size()
        engine.micro_steps = step * engine.gradient_accumulation_steps()
        scaler, loss_scale = _find_loss_scaler(engine), counts.get("loss_scale")
        if scaler is not None and loss_scale is not None:
            vars(scaler).update({name: value for name, value in loss_scale.items() if name in vars(scaler)})


def _find_loss_scaler(engine: Any) -> Any:
    """The object that holds a loss scale that moves; None if it is fixed."""
    optimizer = engine.optimizer
    for owner, scaler in (
        (optimizer, getattr(optimizer, "loss_scaler", None)),  # ZeRO
        (getattr(optimizer, "loss_scale_config", None), getattr(optimizer, "loss_scale_config", None)),
    ):
        if scaler is not None and getattr(owner, "dynamic_loss_scale", False):
            return scaler
    return None

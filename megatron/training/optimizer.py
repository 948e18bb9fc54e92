"""Optimizer of a configuration, the parameters that each of its algorithms updates, and the norms of these groups.

    param_norm     ‖θ‖₂ of the float32 masters after the step
    update_norm    ‖θ − θ′‖₂ with θ′ the masters before the step; 0 if the step was skipped

Every element is counted once, on the rank that updates it, in any layout. Ranks sum squares in float64. Only measured
steps pay the cost: one exchange on the host, and a copy of the masters that this rank updates during the step, 4 bytes
per parameter divided by ZeRO.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.engine_state import OptimizerShard, is_replicated, list_optimizer_shards
from megatron.config.schema import Config
from megatron.distributed.mesh import Mesh
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import count_all_elements, is_owned_by_rank, is_replica
from megatron.model.parameter_groups import build_parameter_groups, find_model_parts
from megatron.options.optimizer import OptimizerOptions
from megatron.training.projected_optimizers import MuonWithAdamW, ProjectedAdamW, ProjectedLion, ProjectedOptimizer


def build_optimizer(
    groups: list[dict[str, Any]],
    options: OptimizerOptions,
    ranks: ProcessGroups | None = None,
    dtype: torch.dtype = torch.float32,
) -> ProjectedOptimizer:
    """Build the optimizer for parameter groups (`megatron.model.parameter_groups.build_parameter_groups`).

    Its learning rate is 0 until the training loop sets the scheduled one, so that no step can use a wrong rate.

    Args:
        groups: parameter groups with `algorithm` and `weight_decay`, and with `low` and `high` if there are bounds.
        options: choice of the optimizer, and its constants.
        ranks: process groups that share the model and divide its batch; None for this process alone.
        dtype: compute type of the model.
    """
    choice, params = options.optimizer, options.optimizer.params
    betas = params.betas[0], params.betas[1]
    if choice.algorithm == "Lion":
        return ProjectedLion(groups, lr=0.0, betas=betas)
    # The fused kernel (CPU and CUDA) makes one pass over each tensor instead of ten.
    for group in groups:
        group["eps"] = params.eps * group.get("eps_scale", 1.0)
    adam: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": params.eps, "fused": True}
    if choice.algorithm == "Muon":
        return MuonWithAdamW(
            groups, ranks or ProcessGroups(), momentum=params.momentum, ns_steps=params.ns_steps, dtype=dtype, **adam
        )
    return ProjectedAdamW(groups, **adam)


@dataclass(frozen=True)
class GroupedWeights:
    """Weights of one name, in all layers, in one parameter group of the optimizer."""

    group: str
    algorithm: str
    lr_scale: float
    eps_scale: float
    weight_decay: float
    name: str
    """Name of the weights, with `*` for layer numbers."""
    count: int
    elements: int
    """Number of elements of all these weights, over all ranks."""

    @property
    def settings(self) -> tuple[object, ...]:
        """Settings shared by all weights of the group."""
        return (self.group, self.algorithm, self.lr_scale, self.eps_scale, self.weight_decay)


def list_grouped_weights(groups: Iterable[dict[str, Any]], model: nn.Module, mesh: Mesh) -> list[GroupedWeights]:
    """List the group of each parameter whose first copy is on this rank. Call it before ZeRO divides the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return merge_grouped_weights(
        GroupedWeights(
            group["name"], group["algorithm"], group["lr_scale"], group["eps_scale"], group["weight_decay"],
            re.sub(r"\.\d+\.", ".*.", names[id(parameter)]), 1, count_all_elements(parameter, mesh),
        )
        for group in groups
        for parameter in group["params"]
        if not is_replica(parameter)
    )  # fmt: skip


def label_parameters(groups: Iterable[dict[str, Any]], model: nn.Module) -> dict[str, str]:
    """Map each parameter's name to its group and module, for example `decayed/attention`.

    Call it before ZeRO divides the parameters.
    """
    names, parts = {id(parameter): name for name, parameter in model.named_parameters()}, find_model_parts(model)
    by_parameter = {names[id(parameter)]: group["name"] for group in groups for parameter in group["params"]}
    return {name: f"{group}/{parts[name]}" for name, group in by_parameter.items()}


def merge_grouped_weights(entries: Iterable[GroupedWeights]) -> list[GroupedWeights]:
    """Merge entries of the same name and group, and sort them by group."""
    merged: dict[tuple[object, ...], GroupedWeights] = {}
    for entry in entries:
        key = (*entry.settings, entry.name)
        old = merged.get(key)
        if old is not None:
            entry = replace(entry, count=old.count + entry.count, elements=old.elements + entry.elements)
        merged[key] = entry
    order = list(dict.fromkeys(entry.settings for entry in merged.values()))
    return sorted(merged.values(), key=lambda entry: order.index(entry.settings))


_INDENTED: dict[str, Any] = {
    "initial_indent": "    ", "subsequent_indent": "      ", "break_long_words": False, "break_on_hyphens": False,
}  # fmt: skip


def format_parameter_groups(weights: Sequence[GroupedWeights]) -> list[str]:
    """Format the groups as a table: one line per group, followed by its weights."""
    scaled = any((entry.lr_scale, entry.eps_scale) != (1.0, 1.0) for entry in weights)
    head = ["group", "optimizer", *(["lr ×", "eps ×"] if scaled else []), "weight decay", "parameters"]
    rows: list[list[str]] = []
    lines: list[list[str]] = []
    for settings in dict.fromkeys(entry.settings for entry in weights):
        members = [entry for entry in weights if entry.settings == settings]
        first, total = members[0], sum(entry.elements for entry in members)
        scales = [f"{first.lr_scale:.4g}", f"{first.eps_scale:.4g}"] if scaled else []
        rows.append([first.group, first.algorithm, *scales, f"{first.weight_decay:.4g}", f"{total:,}"])
        by_prefix: dict[str, list[str]] = {}
        for entry in members:
            prefix, found, rest = entry.name.partition(".*.")
            by_prefix.setdefault(f"{entry.count} × {prefix}.*: " if found else "", []).append(rest if found else prefix)
        texts = [prefix + ", ".join(names) for prefix, names in by_prefix.items()]
        lines.append([line for text in texts for line in textwrap.wrap(text, 108, **_INDENTED)])
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows])
    first_line, *formatted = ["  ".join(cells).rstrip() for cells in padded]
    return [first_line, *(line for row, names in zip(formatted, lines, strict=True) for line in (row, *names))]


def describe_parameter_groups(config: Config, model: nn.Module) -> list[str]:
    """Return the table of a model's parameters under the optimizer of a configuration."""
    groups = build_parameter_groups(
        model,
        config.optimizer.weight_decay,
        config.optimizer.optimizer.algorithm,
        decay_positions=config.optimizer.decay_positions,
    )
    return format_parameter_groups(list_grouped_weights(groups, model, Mesh()))


TOTAL = "all"
"""Label of all parameters together."""


class ParameterNorms:
    """Norms of one step at a time. All ranks must call the methods together.

    Args:
        deepspeed: DeepSpeed's engine of the run.
        labels: labels of each parameter, by name (`label_parameters`).
        groups: process groups of the run.
    """

    def __init__(self, deepspeed: Any, labels: Mapping[str, str], groups: ProcessGroups) -> None:
        self._deepspeed, self._labels, self._groups = deepspeed, labels, groups
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
        shards, labels = self._list_shards(), self._labels
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
        deepspeed, mesh = self._deepspeed, self._groups.mesh
        shards = [shard for shard in list_optimizer_shards(deepspeed) if is_owned_by_rank(shard.parameter, mesh)]
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

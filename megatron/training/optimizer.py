"""Optimizer of a configuration, and the assignment of the model's parameters to its algorithms."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron.config.schema import Config
from megatron.distributed.mesh import Mesh
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import full_numel, is_replica
from megatron.model.parameter_groups import find_model_parts, parameter_groups
from megatron.options.training import OptimizerOptions
from megatron.training.muon import MuonWithAdamW
from megatron.training.projected_optimizers import ProjectedAdamW, ProjectedLion, ProjectedOptimizer


def build_optimizer(
    groups: list[dict[str, Any]],
    options: OptimizerOptions,
    ranks: ProcessGroups | None = None,
    dtype: torch.dtype = torch.float32,
) -> ProjectedOptimizer:
    """Build the optimizer for parameter groups (`megatron.model.parameter_groups.parameter_groups`).

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
    """List the group of each parameter that this rank holds first. Call it before ZeRO divides the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return merge_grouped_weights(
        GroupedWeights(
            group["name"], group["algorithm"], group["lr_scale"], group["eps_scale"], group["weight_decay"],
            re.sub(r"\.\d+\.", ".*.", names[id(parameter)]), 1, full_numel(parameter, mesh),
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
    groups = parameter_groups(
        model,
        config.optimizer.weight_decay,
        config.optimizer.optimizer.algorithm,
        decay_positions=config.optimizer.decay_positions,
    )
    return format_parameter_groups(list_grouped_weights(groups, model, Mesh()))

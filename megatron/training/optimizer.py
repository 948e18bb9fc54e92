"""The optimizer that a configuration asks for, and which algorithm steps each of the model's parameters."""

from typing import Any

import torch

from megatron.distributed.process_groups import ProcessGroups
from megatron.options.training import OptimizerOptions
from megatron.training.muon import MuonWithAdamW
from megatron.training.projected_optimizers import ProjectedAdamW, ProjectedLion, ProjectedOptimizer


def build_optimizer(
    groups: list[dict[str, Any]],
    options: OptimizerOptions,
    ranks: ProcessGroups | None = None,
    dtype: torch.dtype = torch.float32,
) -> ProjectedOptimizer:
    """The optimizer over parameter groups (`megatron.model.parameter_groups.parameter_groups`).

    Its learning rate is 0 until the loop sets the schedule's, so that no step can happen at a wrong one.

    Args:
        groups: with `algorithm` and `weight_decay`, and `low` and `high` where there are bounds.
        options: which, and its constants.
        ranks: those that share the model and divide its batch; this process alone if None.
        dtype: in which the model computes.
    """
    choice, params = options.optimizer, options.optimizer.params
    betas = params.betas[0], params.betas[1]
    if choice.algorithm == "Lion":
        return ProjectedLion(groups, lr=0.0, betas=betas)
    # The fused kernel (CPU and CUDA) makes one pass over each tensor instead of ten.
    adam: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": params.eps, "fused": True}
    if choice.algorithm == "Muon":
        return MuonWithAdamW(
            groups, ranks or ProcessGroups(), momentum=params.momentum, ns_steps=params.ns_steps, dtype=dtype, **adam
        )
    return ProjectedAdamW(groups, **adam)

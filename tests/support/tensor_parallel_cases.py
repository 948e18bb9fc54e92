"""Computation of one and two ranks in the tensor-parallel test."""

from typing import Any

import torch
from models import disturb

from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import get_shard_spec
from megatron.model.build import build_model
from megatron.options.model import MAX_LOGITS, ModelOptions
from megatron.options.position import PositionOptions
from megatron.position.processor import Processor

VOCABULARY = 30  # padded to 32: 16 for each rank
LENGTH = 16


def gradients(
    groups: ProcessGroups,
    model: dict[str, Any],
    position: dict[str, Any],
    max_logits: int = MAX_LOGITS,
    length: int = LENGTH,
    z_loss: float = 0.0,
) -> dict[str, Any]:
    """Return losses, logits and gradients of a new model on fixed tokens."""
    options = ModelOptions(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "seq_length": length,
            "attention_chunk_rows": 5,
            "init_method_std": 0.2,
            "make_vocab_size_divisible_by": 16,
            **model,
        }
    )
    gpt = build_model(options, PositionOptions(**position), VOCABULARY, groups=groups, seed=11)
    gpt.max_logits = max_logits
    for module in gpt.modules():
        if isinstance(module, Processor):
            disturb(module)
    generator = torch.Generator().manual_seed(3)
    x, labels = torch.randint(VOCABULARY, (2, 2, length), generator=generator)
    with torch.no_grad():
        logits = gpt(x)
    if z_loss:
        losses = gpt(x, labels, with_log_z=True)
        (losses[0].mean() + z_loss * losses[1].square().mean()).backward()
    else:
        losses = gpt(x, labels)
        losses.mean().backward()
    return {
        "parameters": gpt.num_parameters(),
        "flops": gpt.count_flops_per_token(length),
        "logits": logits,
        "losses": losses.detach(),
        "gradients": {name: (p.grad, *_division(p)) for name, p in gpt.named_parameters()},
    }


def _division(parameter: torch.nn.Parameter) -> tuple[int | None, int]:
    found = get_shard_spec(parameter)
    return (None, 1) if found is None else (found.dim, found.num_strips)

"""Tensor parallelism where megatron-core's layers do not do it: attention heads, position parameters, scores.

megatron-core divides the linear layers, so a rank computes some of the heads, in order. What is ours follows from that:

* every rank holds all parameters of encodings and processors and uses what concerns its heads, so each rank's gradient
  is one part of the whole: they are summed (otherwise the copies drift apart);
* a processor mixes the scores of all heads: queries and keys are gathered, which is linear in T, never the maps.

B batch, H heads, h heads of a rank, T sequence, d head dimension.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.model.megatron_core import parallel_state
from megatron.position.shape import ALL_HEADS


def ranks() -> int:
    """How many ranks share each layer."""
    return parallel_state.get_tensor_model_parallel_world_size()


def heads_of_this_rank(num_heads: int) -> slice:
    """The heads that this rank computes; ranks() divides num_heads."""
    if ranks() == 1:
        return ALL_HEADS
    count = num_heads // ranks()
    first = count * parallel_state.get_tensor_model_parallel_rank()
    return slice(first, first + count)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, same_use: bool) -> Tensor:
        ctx.dim, ctx.same_use, ctx.size = dim, same_use, x.shape[dim]
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.same_use:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        mine = parallel_state.get_tensor_model_parallel_rank() * ctx.size
        return grad.narrow(ctx.dim, mine, ctx.size), None, None


def gather_heads(x: Tensor) -> Tensor:
    """Queries or keys of all heads, [B, h, T, d] → [B, H, T, d]; each rank goes on with its own share of the work, so
    the gradient is the sum over ranks."""
    return x if ranks() == 1 else _Gather.apply(x, 1, False)


def gather_vocabulary(logits: Tensor) -> Tensor:
    """Logits over the whole vocabulary from each rank's part, along the last dimension; all ranks go on alike."""
    return logits if ranks() == 1 else _Gather.apply(logits, logits.dim() - 1, True)


def sum_gradients(module: nn.Module) -> None:
    """From now on, gradients of these parameters are sums over the ranks that share each layer."""
    if ranks() == 1:
        return

    def summed(grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        return grad

    for parameter in module.parameters():
        parameter.register_hook(summed)


def whole_size(parameter: nn.Parameter) -> int:
    """Elements of a parameter over all ranks: those that share a layer, and those of ZeRO-3."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size * ranks() if getattr(parameter, "tensor_model_parallel", False) else size

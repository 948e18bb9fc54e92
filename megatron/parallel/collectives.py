"""Tensors between the processes that share each layer, with the gradients that follow."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.processes import Processes


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, processes: Processes, summed: bool) -> Tensor:
        ctx.dim, ctx.processes, ctx.summed, ctx.size = dim, processes, summed, x.shape[dim]
        size = processes.mesh.tensor.size
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=processes.tensor_group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.summed:
            grad = _summed(grad, ctx.processes)
        mine = ctx.processes.mesh.tensor.index * ctx.size
        return grad.narrow(ctx.dim, mine, ctx.size), None, None, None


def gather(x: Tensor, dim: int, processes: Processes, *, summed: bool) -> Tensor:
    """The parts of all tensor-parallel ranks, joined along a dimension.

    summed: each rank goes on with the whole in its own way, so that the gradient is the sum over ranks; otherwise all
    go on alike, and each has the whole gradient already.
    """
    return x if processes.mesh.tensor.size == 1 else _Gather.apply(x, dim, processes, summed)


def sum_gradients(module: nn.Module, processes: Processes) -> None:
    """From now on, gradients of these parameters are sums over the tensor-parallel ranks."""
    if processes.mesh.tensor.size == 1:
        return
    for parameter in module.parameters():
        parameter.register_hook(lambda grad: _summed(grad, processes))


def _summed(grad: Tensor, processes: Processes) -> Tensor:
    grad = grad.contiguous().clone()
    dist.all_reduce(grad, group=processes.tensor_group)
    return grad

"""Tensors between processes that share a layer or a sequence, with the gradients that follow."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.distributed.mesh import Dimension
from megatron.distributed.places import holders
from megatron.distributed.processes import Ends, Processes


class _Gather(torch.autograd.Function):
    """The pieces of all ranks, joined. `order` names each by its rank and its number among that rank's pieces."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, order: tuple[tuple[int, int], ...], summed: bool
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.order, ctx.summed = dim, group, order, summed
        ranks = group.size()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous(), group=group)
        pieces = [part.chunk(len(order) // ranks, dim) for part in parts]
        return torch.cat([pieces[rank][number] for rank, number in order], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        pieces = grad.chunk(len(ctx.order), ctx.dim)

        def part(rank: int) -> Tensor:
            mine = {number: piece for (owner, number), piece in zip(ctx.order, pieces, strict=True) if owner == rank}
            return torch.cat([mine[number] for number in range(len(mine))], ctx.dim)

        rank = ctx.group.rank()
        if not ctx.summed:
            return part(rank), None, None, None, None
        parts = [part(other) for other in range(ctx.group.size())]
        total = torch.empty_like(parts[rank])
        dist.reduce_scatter(total, parts, group=ctx.group)
        return total, None, None, None, None


def gather(x: Tensor, dim: int, processes: Processes, along: Dimension, *, summed: bool) -> Tensor:
    """The parts of all ranks along a dimension of the mesh, joined along a dimension of the tensor.

    Along `context` they are joined in the order of places, else in the order of ranks.

    Args:
        summed: each rank goes on with the whole in its own way, so that the gradient is the sum over ranks; otherwise
            all go on alike, and each has the whole gradient already.
    """
    size = processes.mesh.axis(along).size
    if size == 1:
        return x
    order = holders(size) if along == "context" else tuple((rank, 0) for rank in range(size))
    return _Gather.apply(x, dim, processes.group(along), order, summed)


def add_up(x: Tensor, processes: Processes, *along: Dimension | Ends) -> None:
    """Make x, in place, the sum over the processes that differ in these dimensions alone."""
    group = processes.group(*along)
    if group.size() > 1:
        dist.all_reduce(x, group=group)


def sum_gradients(module: nn.Module, processes: Processes) -> None:
    """From now on, gradients of these parameters are sums over the tensor-parallel ranks."""
    if processes.mesh.tensor.size == 1:
        return
    for parameter in module.parameters():
        parameter.register_hook(lambda grad: _summed(grad, processes))


def _summed(grad: Tensor, processes: Processes) -> Tensor:
    grad = grad.contiguous().clone()
    add_up(grad, processes, "tensor")
    return grad

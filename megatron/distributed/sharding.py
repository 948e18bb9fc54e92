"""Shards over ranks: which parameters are sharded, and collectives between processes that share a layer or a sequence.

Every parameter is replicated on ranks that differ only in data or context (ZeRO-3 shards it further, inside the
engine). Along the tensor dimension, megatron-core marks what it shards: the embedding, the output layer, and linear
layers except for the bias added after their sum. All other parameters (norms, that bias, and those of encodings and
processors) are replicated. Along the pipeline dimension a layer belongs to one stage. Every stage that uses a shared
parameter (a tied embedding, an encoding shared by all layers) stores it, all but the first as a copy. Code that counts
elements or sums squares over the ranks of a model must count each parameter once.

Collectives have gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.distributed.mesh import Axis, Dimension, Mesh, list_chunk_owners
from megatron.distributed.process_groups import EmbeddingGroup, ProcessGroups


@dataclass(frozen=True)
class ShardSpec:
    """Sharding of a parameter over tensor-parallel ranks."""

    dim: int
    """Sharded dimension."""
    num_strips: int
    """Number of matrices concatenated along it and sharded separately (two in a gated feed-forward layer)."""


def get_shard_spec(parameter: nn.Parameter) -> ShardSpec | None:
    """Return the sharding of a parameter over tensor-parallel ranks; None if it is replicated."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return ShardSpec(parameter.partition_dim, parameter.partition_stride)  # type: ignore[attr-defined]


def shard_tensor(tensor: Tensor, spec: ShardSpec, axis: Axis) -> Tensor:
    """Return the shard of a parameter on a tensor-parallel rank."""
    strips = tensor.chunk(spec.num_strips, spec.dim)
    return torch.cat([strip.chunk(axis.size, spec.dim)[axis.index] for strip in strips], spec.dim)


def unshard_tensors(shards: Sequence[Tensor], spec: ShardSpec) -> Tensor:
    """Return the whole parameter from the shards of all tensor-parallel ranks, in their order."""
    strips = [shard.chunk(spec.num_strips, spec.dim) for shard in shards]
    return torch.cat([strip[index] for index in range(spec.num_strips) for strip in strips], spec.dim)


def mark_replica(parameter: nn.Parameter) -> None:
    """Mark a parameter that an earlier pipeline stage also stores. DeepSpeed's norms read the same mark."""
    parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def is_replica(parameter: nn.Parameter) -> bool:
    """Return True if an earlier pipeline stage also stores this parameter."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def is_owned_by_rank(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Return True if this rank owns its shard of a parameter, so that sums over a model's ranks count it once."""
    return not is_replica(parameter) and (get_shard_spec(parameter) is not None or mesh.tensor.index == 0)


def count_all_elements(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Return the number of elements of a parameter over tensor-parallel and ZeRO-3 ranks, copies counted once."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size * mesh.tensor.size if get_shard_spec(parameter) is not None else size


class _AllGather(torch.autograd.Function):
    """Concatenate the chunks of all ranks. `order` lists the rank and the index on that rank of each chunk."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, order: tuple[tuple[int, int], ...], reduce_grad: bool
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.order, ctx.summed = dim, group, order, reduce_grad
        ranks = group.size()
        gathered = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        chunks = [part.chunk(len(order) // ranks, dim) for part in gathered.chunk(ranks)]
        return torch.cat([chunks[rank][index] for rank, index in order], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        ranks = ctx.group.size()
        pieces = range(len(ctx.order) // ranks)
        chunks = dict(zip(ctx.order, grad.chunk(len(ctx.order), ctx.dim), strict=True))
        if not ctx.summed:
            rank = ctx.group.rank()
            return torch.cat([chunks[rank, index] for index in pieces], ctx.dim), None, None, None, None
        parts = torch.stack([chunks[rank, index] for rank in range(ranks) for index in pieces])
        total = parts.new_empty((len(pieces), *parts.shape[1:]))
        dist.reduce_scatter_tensor(total, parts, group=ctx.group)
        return total.movedim(0, ctx.dim).flatten(ctx.dim, ctx.dim + 1), None, None, None, None


def all_gather(x: Tensor, dim: int, groups: ProcessGroups, dimension: Dimension, *, reduce_grad: bool) -> Tensor:
    """Gather the shards of all ranks along a dimension of the mesh, concatenated along a dimension of the tensor.

    Along `context` they are concatenated in the order of tokens, otherwise in the order of ranks.

    Args:
        reduce_grad: True if each rank uses the whole tensor differently, so that the gradient is the sum over ranks.
            False if all ranks use it alike, and each already has the whole gradient.
    """
    size: int = getattr(groups.mesh.sizes, dimension)
    if size == 1:
        return x
    order = list_chunk_owners(size) if dimension == "context" else tuple((rank, 0) for rank in range(size))
    return _AllGather.apply(x, dim, groups.group(dimension), order, reduce_grad)


def gather_heads(x: Tensor, groups: ProcessGroups) -> Tensor:
    """Gather queries or keys of all heads, [B, h, t, d] → [B, H, t, d].

    Each rank continues with a different share of the work, so the gradient is the sum over ranks.
    """
    return all_gather(x, 1, groups, "tensor", reduce_grad=True)


def gather_sequence(k: Tensor, v: Tensor, groups: ProcessGroups) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all tokens in order, [B, H or h, t, d] → [B, H or h, T, d].

    The gradient is summed over ranks.
    """
    if groups.mesh.context.size == 1:
        return k, v
    if k.shape != v.shape:  # keys of all heads with this rank's values (a processor), or rotated keys that are longer
        return tuple(all_gather(x, 2, groups, "context", reduce_grad=True) for x in (k, v))  # type: ignore[return-value]
    k, v = all_gather(torch.stack((k, v)), 3, groups, "context", reduce_grad=True).unbind()
    return k, v


def _send_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send rows: [B, h, T, d] → [B, H, T / ranks, d], see `exchange_heads_for_rows`."""
    ranks = group.size()
    owners = list_chunk_owners(ranks)
    pieces = dict(zip(owners, x.chunk(2 * ranks, dim=2), strict=True))
    sent = torch.stack([pieces[rank, index] for rank in range(ranks) for index in range(2)])  # [ranks · 2, B, h, c, d]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.unflatten(0, (ranks, 2)).permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)


def _return_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return rows: [B, H, T / ranks, d] → [B, h, T, d], the inverse of `_send_rows`."""
    ranks = group.size()
    sent = x.unflatten(1, (ranks, -1)).unflatten(3, (2, -1)).permute(1, 3, 0, 2, 4, 5).flatten(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat([received[2 * rank + index] for rank, index in list_chunk_owners(ranks)], dim=2)


class _Exchange(torch.autograd.Function):
    """Send or return rows; the gradient goes in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sends: bool) -> Tensor:
        ctx.group, ctx.sends = group, sends
        return _send_rows(x, group) if sends else _return_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_return_rows if ctx.sends else _send_rows)(grad, ctx.group), None, None


def exchange_heads_for_rows(x: Tensor, groups: ProcessGroups) -> Tensor:
    """Exchange some heads of all rows for all heads of some rows: [B, h, T, d] → [B, H, T / ranks, d] along `tensor`.

    Rows are divided into two chunks per rank, as tokens are in context parallelism (`mesh.list_chunk_owners`). A rank
    has one chunk from either end, in order, which balances the work of causal rows. T must be divisible into these
    chunks.
    """
    return _Exchange.apply(x, groups.group("tensor"), True)


def exchange_rows_for_heads(x: Tensor, groups: ProcessGroups) -> Tensor:
    """Exchange all heads of some rows for some heads of all rows: [B, H, T / ranks, d] → [B, h, T, d]."""
    return _Exchange.apply(x, groups.group("tensor"), False)


def all_reduce_sum_(x: Tensor, groups: ProcessGroups, *along: Dimension | EmbeddingGroup) -> None:
    """Replace x in place by its sum over the processes that differ only in these dimensions."""
    group = groups.group(*along)
    if group.size() > 1:
        dist.all_reduce(x, group=group)


def sum_grad(x: Tensor, groups: ProcessGroups) -> Tensor:
    """Return x with a gradient that is the sum over tensor-parallel ranks, each of which uses x for its own heads."""
    if groups.mesh.tensor.size == 1 or not x.requires_grad:
        return x
    own = x.view_as(x)
    own.register_hook(lambda grad: _all_reduce_grad(grad, groups))
    return own


def register_grad_all_reduce(module: nn.Module, groups: ProcessGroups) -> None:
    """Register hooks that sum the gradients of these parameters over the tensor-parallel ranks."""
    if groups.mesh.tensor.size == 1:
        return
    for parameter in module.parameters():
        parameter.register_hook(lambda grad: _all_reduce_grad(grad, groups))


def _all_reduce_grad(grad: Tensor, groups: ProcessGroups) -> Tensor:
    grad = grad.contiguous().clone()
    all_reduce_sum_(grad, groups, "tensor")
    return grad

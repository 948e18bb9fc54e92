"""Tables that several calls read: one buffer of partial gradients, and one copy of a rank's heads."""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.runtime import get_backward_number, get_uncompiled_apply


def share_table(table: Tensor) -> Tensor:
    """Return the same table for use in several calls that share one buffer of partial gradients.

    Each call but the first then saves an allocation, a sum over the partial gradients and an addition, all launched by
    the host.
    """
    if not (torch.is_grad_enabled() and table.requires_grad):
        return table
    shared: Tensor = get_uncompiled_apply(_SharedTable)(table)
    return shared


def get_version(table: Tensor) -> int | None:
    """Return the number of changes in place, or None for a tensor of inference mode, which does not count them."""
    return None if table.is_inference() else table._version


def select_table_heads(table: Tensor, heads: slice) -> Tensor:
    """Return the rows of some heads. Calls with the same table get the same tensor.

    The operator finds the arranged table and the buffer of partial gradients at the tensor that it receives. If each
    layer of a tensor-parallel rank sliced the table itself, each would arrange it and allocate a buffer.
    """
    if heads == slice(None):
        return table
    if table.is_leaf and table.requires_grad:  # a replayed CUDA graph changes it without a new version
        return table[heads]
    key = heads.start, heads.stop, heads.step, get_version(table), torch.is_grad_enabled()
    stored = getattr(table, "selected", None)
    if stored is not None and stored[0] == key:
        own: Tensor = stored[1]
        return own
    own = table[heads].clone()  # a view would keep the table alive, which keeps the view
    if find_shared_node(table) is not None:
        own = share_table(own)
    table.selected = key, own  # type: ignore[attr-defined]
    return own


class _SharedTable(torch.autograd.Function):
    """Autograd node of a shared table. All calls that use the table accumulate their partial gradients here."""

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        ctx.partial, ctx.backward_number = None, None
        ctx.set_materialize_grads(False)
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        """Add the partial gradients to `grad`, which comes from calls that did not accumulate here."""
        partial, ctx.partial = ctx.partial, None
        if partial is None or ctx.backward_number != get_backward_number():
            return grad
        total: Tensor = partial.sum((0, 2))
        return total if grad is None else total + grad


def find_shared_node(table: Tensor | None) -> Any:
    """Return the autograd node that `share_table` created for a table, or None."""
    node = None if table is None else table.grad_fn
    return node if isinstance(node, _SharedTable._backward_cls) else None


def get_partial_sums(q: Tensor, groups: int, size: int, needs_grad: bool, shared: Any) -> tuple[Tensor | None, bool]:
    """Return the buffer [B, H, groups, N] for a table's partial gradients, and True if no other call uses it.

    The buffer is float32, or None if the table needs no gradient.
    """
    if not needs_grad:
        return None, True
    shape = (q.shape[0], q.shape[1], groups, size)
    if shared is not None and shared.backward_number != (number := get_backward_number()):
        shared.partial, shared.backward_number = None, number
    if shared is not None and shared.partial is not None and shared.partial.shape == shape:
        return shared.partial, False
    partial = q.new_zeros(shape, dtype=torch.float32)
    if shared is None or shared.partial is not None:  # calls with other numbers of rows
        return partial, True
    shared.partial = partial
    return partial, False

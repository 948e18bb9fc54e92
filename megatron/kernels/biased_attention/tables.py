"""Tables of biases and weights by distance: their arrangement in memory, and how kernels read them.

A matrix product leaves four scores of an 8 × 8 pattern in consecutive registers of a thread: rows g and g + 8, columns
2t and 2t + 1 (PTX ISA, m16n8k16 and wgmma). Their distances are n, n − 1, n + 8 and n + 7, if n is the first one's. An
arranged table has these four entries side by side for every n, so a thread reads the entries of four scores at once,
into the registers in which a product accumulates.

Several calls may read one table. They then share its arranged form, the copy of a rank's heads, and one buffer of
partial gradients.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.runtime import cdiv, get_backward_number, get_uncompiled_apply, launch, launch_context

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MARGIN = tl.constexpr(512)
"""Number of zero entries before and after an arranged table, so that tiles at its ends need no mask."""
_ARRANGE_BLOCK = {"BLOCK": 512}
_ARRANGE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class Tables(NamedTuple):
    """Bias and weight by distance, arranged, or their partial gradients; None if absent.

    Kernels advance the pointers to their head inline, because in Triton 3.6 no function can return None.
    """

    bias_ptr: Any
    weight_ptr: Any


@triton.constexpr_function
def is_relative(bias_ptr: Any, weight_ptr: Any) -> bool:
    """Return True if there is a bias that is added to products of q and k. A weight does not apply to the bias."""
    return bias_ptr is not None and weight_ptr is None


@triton.constexpr_function
def joins_bias(element_type: Any) -> bool:
    """Return True if products of q and k accumulate onto the bias, which saves one instruction per score.

    False in float32, where every one of the accumulating sums would round.
    """
    return element_type != tl.float32


def arrange_tables(bias: Tensor | None, weight: Tensor | None, scale: float) -> Tables:
    """Return the tables as kernels read them.

    Weights include scale · log2(e). The bias is in base 2 with a weight, and otherwise relative to `scale`, because it
    is added to products of q and k.
    """
    factor = 1 / scale if weight is None else LOG2E.value
    return Tables(_arrange_once(bias, factor), _arrange_once(weight, scale * LOG2E.value))


def _arrange_once(table: Tensor | None, factor: float) -> Tensor | None:
    """Return the arranged table times `factor`. It is stored at the table, for other layers that read the same one.

    A parameter stores nothing: a replayed CUDA graph, which changes it without a new version, must arrange it again.
    """
    if table is None:
        return None
    if table.is_leaf and table.requires_grad:
        return _arrange(table.detach().contiguous(), factor)
    version = get_version(table)
    stored = getattr(table, "arranged", None)
    if stored is not None and stored[:2] == (factor, version):
        return stored[2]
    arranged = _arrange(table.detach().contiguous(), factor)
    table.arranged = factor, version, arranged  # type: ignore[attr-defined]
    return arranged


def _arrange(table: Tensor, factor: float) -> Tensor:
    """Return factor · table, arranged, float32 [H, MARGIN + N + MARGIN, 4]."""
    heads, size = table.shape
    entries = size + 2 * MARGIN.value
    arranged = table.new_empty((heads, entries, 4))
    with launch_context(table):
        grid = cdiv(4 * entries, _ARRANGE_BLOCK["BLOCK"]), heads, 1
        launch(_arrange_kernel, grid, (table, arranged, size, factor), _ARRANGE_BLOCK, _ARRANGE_OPTIONS)
    return arranged


@triton.jit
def _arrange_kernel(table_ptr, arranged_ptr, N, factor, BLOCK: tl.constexpr):
    """Write factor · table [H, N], arranged [H, MARGIN + N + MARGIN, 4]. Grid (blocks of a head's elements, H)."""
    h = tl.program_id(1).to(tl.int64)
    size = (N + 2 * MARGIN) * 4
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = i // 4 - MARGIN - i % 2 + i // 2 % 2 * 8
    values = tl.load(table_ptr + h * N + n, mask=(n >= 0) & (n < N), other=0.0)
    tl.store(arranged_ptr + h * size + i, values * factor, mask=i < size)


@triton.jit
def select_table(table_ptr, h, N):
    """Return the pointer to the arranged table of a head, at distance 0."""
    return table_ptr + (h * (N + 2 * MARGIN) + MARGIN) * 4


@triton.jit
def load_window(table_ptr, base, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load the entries of an arranged table that a tile needs, as `spread_window` reads them.

    `base` is the distance of the tile's first element. The window starts at the distance base − BLOCK_N. Windows of
    tiles that are not computed, for example of the tile after the last one, are moved into the margins.
    """
    SIZE: tl.constexpr = 2 * (BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N)
    tl.static_assert(2 * SIZE <= MARGIN)
    start = tl.maximum(tl.minimum(base, N + BLOCK_N), -BLOCK_M - BLOCK_N) - BLOCK_N
    if TRANSPOSED:
        # The entries of columns g, g + 8 and rows 2t, 2t + 1: n, n + 1, n − 8, n − 7, those at n − 7 in reverse.
        pairs = tl.reshape(tl.load(table_ptr + (start - 7) * 4 + tl.arange(0, SIZE * 4)), [SIZE, 2, 2])
        first, second = tl.split(pairs)
        first, second = tl.split(tl.permute(tl.join(second, first), (0, 2, 1)))
        values = tl.reshape(tl.permute(tl.join(second, first), (0, 2, 1)), [SIZE * 4])
    else:
        values = tl.load(table_ptr + start * 4 + tl.arange(0, SIZE * 4))
    return values


@triton.jit
def spread_window(values, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Expand a window to a tile: the entry of distance base + r − c at row r and column c, or transposed.

    This goes through shared memory, with one load per four scores. The constant part of a register's index is part of
    the load's address.
    """
    r, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if TRANSPOSED:
        r = r // 2 * 8 + r % 2
        c = (BLOCK_N // 16 - c // 16) * 64 - c % 8 * 4 + c // 8 % 2 * 2
        index = tl.reshape(c[:, None] + r[None, :], [BLOCK_N * BLOCK_M])
        tile = tl.reshape(tl.gather(values, index, 0), [BLOCK_N, BLOCK_M])
    else:
        r = r // 16 * 64 + r % 8 * 4 + r // 8 % 2 * 2
        c = (BLOCK_N // 8 - c // 8) * 32 - c % 8 // 2 * 8 + c % 2
        index = tl.reshape(r[:, None] + c[None, :], [BLOCK_M * BLOCK_N])
        tile = tl.reshape(tl.gather(values, index, 0), [BLOCK_M, BLOCK_N])
    return tile


@triton.jit
def load_table_tile(table_ptr, base, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load table[base + r − c] as [BLOCK_M, BLOCK_N], or transposed; zero outside 0 … N − 1."""
    values = load_window(table_ptr, base, N, BLOCK_M, BLOCK_N, TRANSPOSED)
    return spread_window(values, BLOCK_M, BLOCK_N, TRANSPOSED)


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

"""Queries, keys and values out of one matrix product, and their gradients back into one tensor.

Forward they are views, unless queries and keys are rotated. Backward one kernel writes the gradient of the product,
turned back, and sums it up for the bias's gradient.

T tokens, B sequences, g groups of n heads that share a key and a value, d head dimension, r ≤ d rotated dimensions.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch
from kernels.layer import configs
from kernels.layer.sums import sum_partials
from kernels.runtime import cdiv, launch_context


class Heads(NamedTuple):
    """Heads of all tokens [T, B, g, n or 1, d], whose d are contiguous."""

    ptr: Any
    stride_t: Any
    stride_b: Any
    stride_g: Any
    stride_h: Any


@triton.jit
def _select(x, group, head):
    """A head's first number, and its strides in 64 bits: a stride of 1 is a constant of another type."""
    stride_t = tl.to_tensor(x.stride_t).to(tl.int64)
    ptr = x.ptr + group.to(tl.int64) * x.stride_g + head.to(tl.int64) * x.stride_h
    return ptr, stride_t, tl.to_tensor(x.stride_b).to(tl.int64)


@triton.jit
def _copy_heads_kernel(
    q,
    k,
    v,
    q_out,
    k_out,
    v_out,
    cos_ptr,
    sin_ptr,
    partial_ptr,
    N,
    B,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    SIGN: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy heads, queries and keys rotated: x·cos + SIGN · swap(x)·sin. Grid (P, g · SLOTS).

    SLOTS: the heads of a group that are copied: QUERIES + 1 without values, QUERIES + 2 with them.
    cos_ptr, sin_ptr: float32 [T, R], or None with R = 0.
    partial_ptr: float32 [P, g · SLOTS · D], sums over the tokens, or None.
    N: T · B.
    """
    part = tl.program_id(0)
    group = tl.program_id(1) // SLOTS
    slot = tl.program_id(1) % SLOTS
    if slot < QUERIES:
        x_ptr, x_t, x_b = _select(q, group, slot)
        y_ptr, y_t, y_b = _select(q_out, group, slot)
    elif slot == QUERIES:
        x_ptr, x_t, x_b = _select(k, group, slot * 0)
        y_ptr, y_t, y_b = _select(k_out, group, slot * 0)
    else:
        x_ptr, x_t, x_b = _select(v, group, slot * 0)
        y_ptr, y_t, y_b = _select(v_out, group, slot * 0)
    turns = slot <= QUERIES
    columns = tl.arange(0, BLOCK_N)[None, :]
    swapped = tl.where(columns < R // 2, columns + R // 2, columns - R // 2)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(part * BLOCK_M, N, tl.num_programs(0) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        inside = (rows < N) & (columns < D)
        t = (rows // B).to(tl.int64)
        b = (rows % B).to(tl.int64)
        at = x_ptr + t * x_t + b * x_b
        x = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
        if R > 0:
            rotated = inside & (columns < R) & turns
            other = tl.load(at + swapped, mask=rotated, other=0.0).to(tl.float32)
            cos = tl.load(cos_ptr + t * R + columns, mask=rotated, other=1.0)
            sin = tl.load(sin_ptr + t * R + columns, mask=rotated, other=0.0)
            x = x * cos + SIGN * (other * sin)
        tl.store(y_ptr + t * y_t + b * y_b + columns, x.to(q_out.ptr.dtype.element_ty), mask=inside)
        total += x
    if partial_ptr is not None:
        own = tl.arange(0, BLOCK_N)
        at = partial_ptr + (part * tl.num_programs(1) + tl.program_id(1)) * D + own
        tl.store(at, tl.sum(total, 0), mask=own < D)


Rotation = tuple[Tensor, Tensor]
"""cos and sin, float32 [T, r]: of each pair both halves have the same cosine, and sines of opposite signs."""


def split_heads(
    mixed: Tensor, bias: Tensor | None, queries: int, groups: int, rotation: Rotation | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [T, B, g·n, d], keys and values [T, B, g, d]; queries and keys are rotated.

    Args:
        mixed: [T, B, g·(n + 2)·d], of each group its queries, its key and its value.
        bias: [g·(n + 2)·d], which was added to it already: it gets its gradient here. None for none.
        queries: n.
        groups: g.
        rotation: of queries and keys; None for none.
    """
    cos, sin = (None, None) if rotation is None else rotation
    query, key, value = _SplitHeads.apply(mixed, bias, cos, sin, queries, groups)
    return query, key, value


def _split(mixed: Tensor, queries: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries [T, B, g, n, d], keys and values [T, B, g, 1, d]."""
    query, key, value = mixed.view(*mixed.shape[:2], groups, queries + 2, -1).split([queries, 1, 1], dim=3)
    return query, key, value


def _copy_heads(
    sources: list[Tensor],
    results: list[Tensor],
    turns: tuple[Tensor | None, Tensor | None],
    sign: int,
    *,
    sums_up: bool,
) -> Tensor | None:
    """Copy queries and keys, and values if there are three tensors, turned. Return the sums over all tokens."""
    length, batch, groups, queries, dim = sources[0].shape
    slots = queries + len(sources) - 1
    cos, sin = turns
    tile, rows = configs.choose_head_tile(dim), length * batch
    parts = configs.count_parts(sources[0], cdiv(rows, tile.block_m), configs.SMALL_PROGRAMS, groups * slots)
    sums = None
    if sums_up:
        sums = torch.empty((parts, groups * slots * dim), dtype=torch.float32, device=sources[0].device)
    x, y = ([Heads(each, *each.stride()[:4]) for each in tensors] for tensors in (sources, results))
    constants = configs.build_constants(
        tile, QUERIES=queries, SLOTS=slots, SIGN=sign, D=dim, R=0 if cos is None else cos.shape[-1]
    )
    with launch_context(sources[0]):
        launch(
            _copy_heads_kernel,
            (parts, groups * slots, 1),
            (x[0], x[1], x[-1], y[0], y[1], y[-1], cos, sin, sums, rows, batch),
            constants,
            tile.options,
        )
        return None if sums is None else sum_partials(sums, sources[0].dtype)


def _make_rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        queries: int,
        groups: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.queries, ctx.groups, ctx.has_bias, ctx.shape = queries, groups, bias is not None, mixed.shape
        query, key, value = _split(mixed.detach(), queries, groups)
        if cos is not None:
            turned = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)]
            _copy_heads([query, key], turned, (cos, sin), 1, sums_up=False)
            query, key = turned
        return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        sources = [_make_rows_contiguous(x).unflatten(2, (ctx.groups, -1)) for x in grads]
        dmixed = torch.empty(ctx.shape, dtype=sources[0].dtype, device=sources[0].device)
        results = list(_split(dmixed, ctx.queries, ctx.groups))
        dbias = _copy_heads(sources, results, (cos, sin), -1, sums_up=ctx.has_bias)
        return dmixed, dbias, None, None, None, None

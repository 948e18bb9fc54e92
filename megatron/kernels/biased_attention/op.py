"""Differentiable operators `biased_attention` and `biased_attention_with_lse`, and the checks of their arguments.

B batch, H heads, R query rows, C key columns, d head dimension, N distances. Activation checkpointing supports them.
torch.compile does not trace into them.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.biased_attention import configs
from megatron.kernels.biased_attention.backward_dkdv import _bwd_dkdv_kernel
from megatron.kernels.biased_attention.backward_dq import _bwd_dq_kernel
from megatron.kernels.biased_attention.forward import AllHeadRows, AttentionSizes, _fwd_kernel
from megatron.kernels.biased_attention.tables import Tables, arrange_tables, find_shared_node, get_partial_sums
from megatron.kernels.head_dim import MAX_HEAD_DIM
from megatron.kernels.runtime import (
    DTYPES,
    cdiv,
    check_heads_in_batch,
    get_arch,
    get_uncompiled_apply,
    launch,
    launch_context,
)


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    *,
    offset: int = 0,
    window: int | None = None,
    document_starts: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute softmax(weight(n) · scale · q_i·k_j + bias(n) + key_bias_j) · v over the keys j ≤ i, with n = i − j.

    Memory is linear in R and C. The result is differentiable in q, k, v, sinks, biases and weights. Outputs and
    gradients are bitwise reproducible.

    Args:
        q: [B, H, R, d]; row r is at position offset + r of the keys.
        k, v: [B, H, C, d], of q's type: float16, bfloat16 or float32. d is at most 128.
        bias: float32 [H, N] for the distances 0 … N − 1, or None. −inf masks a distance.
        weight: float32 [H, N], multiplied with the scores, or None.
        key_bias: finite [B, H, C], added to all scores of a key, or None. float32 or float64; with float64, differences
            are computed before they are rounded to float32.
        offset: position of the first row, counted from key column 0; at least 0.
        window: number of keys that a row attends to, including its own; None for all.
        document_starts: int32 [B, R], first key column that each row attends to, which is where its document begins. It
            must be nondecreasing over the rows, and each row must attend to itself. None means 0. Values are not
            checked, because that would synchronize with the GPU. Earlier columns cost nothing: kernels skip column
            tiles that no row attends to.
        sinks: float32 [H], or None: one logit per head that joins those of every row's keys and has no value.
        scale: factor of the scores, not 0; 1/√d by default.

    Returns:
        [B, H, R, d] in q's type. Its memory layout is [R, B, H, d], the order of activations.

    Raises:
        ValueError: if shapes, types or values are invalid, or a row would attend to no key.
        RuntimeError: if tensors are on the CPU outside Triton's interpreter.
    """
    return _check_and_run_forward(q, k, v, bias, weight, key_bias, offset, window, document_starts, sinks, scale)[0]


def biased_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    *,
    offset: int = 0,
    window: int | None = None,
    document_starts: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `biased_attention` and the logsumexp of every row, float32 [B, H, R].

    The logsumexp includes the row's sink and is differentiable, so that results over blocks of keys can be combined.
    """
    out, lse = _check_and_run_forward(q, k, v, bias, weight, key_bias, offset, window, document_starts, sinks, scale)
    lse = lse * math.log(2)
    if key_bias is None:
        return out, lse
    # The kernels' lse is relative to the row's own key. Their gradient already accounts for that.
    own = torch.arange(offset, offset + q.shape[2], device=q.device).clamp_(max=k.shape[2] - 1)
    return out, lse + key_bias.detach()[:, :, own].float()


def _check_and_run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    key_bias: Tensor | None,
    offset: int,
    window: int | None,
    document_starts: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    check_call(
        *(describe_tensor(q), describe_tensor(k), describe_tensor(v), describe_tensor(bias), describe_tensor(weight)),
        *(describe_tensor(key_bias), offset, window, describe_tensor(document_starts), describe_tensor(sinks)),
    )
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if scale == 0:  # kernels add q·k to bias / scale
        raise ValueError(f"scale {scale}; it must not be 0")
    if scale < 0:  # the largest score would not be that of the largest product
        q, scale = -q, -scale
    if document_starts is not None and window is not None:
        document_starts, window = _merge_window(document_starts, offset, window), None
    apply = get_uncompiled_apply(_BiasedAttention)
    result: tuple[Tensor, Tensor] = apply(
        q, k, v, bias, weight, key_bias, sinks, document_starts, offset, window, scale
    )
    return result


def _merge_window(document_starts: Tensor, offset: int, window: int) -> Tensor:
    """Return the first column that each row attends to, given its document and a window."""
    start = offset - window + 1
    edges = torch.arange(start, start + document_starts.shape[1], dtype=torch.int32, device=document_starts.device)
    return torch.maximum(document_starts, edges)


def _make_rows_contiguous(x: Tensor) -> Tensor:
    """Make a tensor's last dimension contiguous. Kernels accept any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _make_contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _allocate_output(q: Tensor) -> Tensor:
    """Allocate the output [B, H, R, d] as activations [R, B, H, d], which the layers after attention read."""
    batch, heads, rows, dim = q.shape
    return q.new_empty((rows, batch, heads, dim)).permute(1, 2, 0, 3)


def _get_row_stride(x: Tensor) -> int:
    """Return the row stride, a constant of the backward kernels; for a single row, the head dimension."""
    return x.stride(2) if x.shape[2] > 1 else x.shape[3]


def _build_head_rows(x: Tensor) -> AllHeadRows:
    batch, head, row, _ = x.stride()
    return AllHeadRows(x, batch, head, row)


def _get_table_size(bias: Tensor | None, weight: Tensor | None) -> int:
    table = bias if bias is not None else weight
    return 0 if table is None else table.shape[1]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tables,
    size: int,
    key_bias: Tensor | None,
    sinks: Tensor | None,
    document_starts: Tensor | None,
    offset: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output and log2 of the softmax's denominator [B, H, R], relative to the bias of the row's own key.

    Args:
        tables: arranged tables of bias and weight, with `size` distances.
    """
    arch = get_arch(q)
    q, k, v = map(_make_rows_contiguous, (q, k, v))
    document_starts, key_bias, sinks = (
        _make_contiguous(document_starts),
        _make_contiguous(key_bias),
        _make_contiguous(sinks),
    )
    batch, heads, rows, dim = q.shape
    tile = configs.fit_tile_to_rows(configs.choose_tiles(arch, q.dtype, dim).fwd, rows)
    out = _allocate_output(q)
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
    sizes = AttentionSizes(scale, heads, rows, k.shape[2], size, offset, window or 0)
    with launch_context(q):
        launch(
            _fwd_kernel,
            (cdiv(rows, tile.block_m), batch * heads, 1),
            (
                *(_build_head_rows(q), _build_head_rows(k), _build_head_rows(v), tables),
                *(_build_head_rows(out), lse, document_starts, key_bias, sinks, sizes),
            ),
            configs.build_tile_constants(tile, dim, windowed=window is not None),
            tile.options,
        )
    return out, lse


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tables,
    size: int,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    document_starts: Tensor | None,
    offset: int,
    window: int | None,
    scale: float,
    needs_grad: tuple[bool, bool, bool],
    shared: tuple[Any, Any] = (None, None),
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]:
    """Return delta [B, H, R] and the gradients of q, k, v, bias, weight and key_bias, None if not needed.

    Args:
        needs_grad: True for each of bias, weight and key_bias that needs a gradient.
        shared: node of bias and of weight that accumulates partial gradients (`share_table`), or None. It computes the
            table's gradient.
    """
    arch = get_arch(q)
    grad, q, k, v = (
        _make_rows_contiguous(grad),
        _make_rows_contiguous(q),
        _make_rows_contiguous(k),
        _make_rows_contiguous(v),
    )
    document_starts, key_bias, grad_lse = (
        _make_contiguous(document_starts),
        _make_contiguous(key_bias),
        _make_contiguous(grad_lse),
    )
    batch, heads, rows, dim = q.shape
    columns = k.shape[2]
    tiles = configs.choose_tiles(arch, q.dtype, dim)
    if columns == rows:
        dq, dk, dv = q.new_empty((3, *q.shape)).unbind()  # one allocation instead of three, to save host time
    else:
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta = torch.empty_like(lse)
    dkey_bias = q.new_empty(k.shape[:3], dtype=torch.float32) if needs_grad[2] else None
    groups = configs.count_row_groups(rows, tiles.bwd_dq.block_m, batch * heads, needs_grad[0] or needs_grad[1])
    dbias_sums, bias_is_own = get_partial_sums(q, groups, size, needs_grad[0], shared[0])
    dweight_sums, weight_is_own = get_partial_sums(q, groups, size, needs_grad[1], shared[1])
    q_rows, k_rows, v_rows = _build_head_rows(q), _build_head_rows(k), _build_head_rows(v)
    grad_rows = _build_head_rows(grad)
    sizes = AttentionSizes(scale, heads, rows, columns, size, offset, window or 0)
    dtables = Tables(dbias_sums, dweight_sums)
    windowed = window is not None
    strides = (_get_row_stride(q), _get_row_stride(k), _get_row_stride(v), _get_row_stride(grad))
    with launch_context(q):
        launch(
            _bwd_dq_kernel,
            (groups, batch * heads, 1),
            (
                *(q_rows, k_rows, v_rows, grad_rows, tables, dtables, _build_head_rows(out), lse, grad_lse, dq, delta),
                *(document_starts, key_bias, sizes),
            ),
            configs.build_tile_constants(tiles.bwd_dq, dim, strides, windowed=windowed),
            tiles.bwd_dq.options,
        )
        launch(
            _bwd_dkdv_kernel,
            (cdiv(columns, tiles.bwd_dkdv.block_n), batch * heads, 1),
            (
                *(q_rows, k_rows, v_rows, grad_rows, tables, lse, delta, dk, dv),
                *(document_starts, key_bias, dkey_bias, sizes),
            ),
            configs.build_tile_constants(tiles.bwd_dkdv, dim, strides, windowed=windowed),
            tiles.bwd_dkdv.options,
        )
    dbias = dbias_sums.sum((0, 2)) if dbias_sums is not None and bias_is_own else None
    dweight = dweight_sums.sum((0, 2)) if dweight_sums is not None and weight_is_own else None
    if dkey_bias is not None and key_bias is not None:
        dkey_bias = dkey_bias.to(key_bias.dtype)
    return (dq, dk, dv, dbias, dweight, dkey_bias), delta


class _BiasedAttention(torch.autograd.Function):
    """Autograd function for output and logsumexp.

    Calling a custom operator of torch takes several times the host time.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        bias, weight, key_bias, sinks, document_starts, ctx.offset, ctx.window, ctx.scale = rest
        tables, ctx.size = arrange_tables(bias, weight, ctx.scale), _get_table_size(bias, weight)
        output = _forward(
            *(q, k, v, tables, ctx.size, key_bias, sinks, document_starts, ctx.offset, ctx.window, ctx.scale)
        )
        ctx.save_for_backward(q, k, v, *tables, key_bias, *output, document_starts, sinks)
        ctx.shared = find_shared_node(bias), find_shared_node(weight)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weight, key_bias, out, lse, document_starts, sinks = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        needs_bias, needs_weight, needs_key_bias = (
            x is not None and ctx.needs_input_grad[3 + index] for index, x in enumerate((bias, weight, key_bias))
        )
        gradients, delta = _backward(
            *(grad, grad_lse, q, k, v, Tables(bias, weight), ctx.size, key_bias, out, lse, document_starts),
            *(ctx.offset, ctx.window, ctx.scale, (needs_bias, needs_weight, needs_key_bias), ctx.shared),
        )
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[6]:
            # As for any key: P ∘ (0 − delta), since its value is zero. A row's P follows from its lse.
            dsinks = -(torch.exp2(sinks[:, None] / math.log(2) - lse) * delta).sum((0, 2))
        return (*gradients, dsinks, None, None, None, None)


def count_flops(batch: int, heads: int, rows: int, dim: int, *, backward: bool) -> float:
    """Return the causal FLOPs of a result for R = C: 4d forward and 10d backward per pair (i, j), not recomputed."""
    return (10 if backward else 4) * dim * batch * heads * math.comb(rows + 1, 2)


class TensorSignature(NamedTuple):
    """Properties of a tensor that are checked before a call."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def describe_tensor(x: Tensor | None) -> TensorSignature | None:
    return None if x is None else TensorSignature(x.shape, x.dtype, x.device)


@lru_cache(maxsize=64)
def check_call(
    q: TensorSignature,
    k: TensorSignature,
    v: TensorSignature,
    bias: TensorSignature | None,
    weight: TensorSignature | None,
    key_bias: TensorSignature | None,
    offset: int,
    window: int | None,
    document_starts: TensorSignature | None,
    sinks: TensorSignature | None,
) -> None:
    """Reject invalid arguments. The result is cached for equal calls, across layers and steps, to save host time."""
    _check_qkv(q, k, v)
    _check_tables(q, bias, weight, _count_distances(q, k, offset, window))
    if key_bias is not None:
        expected = TensorSignature(k.shape[:3], key_bias.dtype, q.device)
        if key_bias != expected or key_bias.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"key_bias is {key_bias.dtype} {list(key_bias.shape)} on {key_bias.device}; it must be float32 or "
                f"float64 {list(k.shape[:3])} on {q.device}"
            )
    if sinks is not None and key_bias is not None:
        # lse is relative to the row's own key, so the sinks' gradient would need more than the kernels return.
        raise ValueError("sinks and key_bias cannot be combined")
    for name, given, expected in (
        (
            "document_starts",
            document_starts,
            TensorSignature(torch.Size((q.shape[0], q.shape[2])), torch.int32, q.device),
        ),
        ("sinks", sinks, TensorSignature(torch.Size((q.shape[1],)), torch.float32, q.device)),
    ):
        if given is not None and given != expected:
            found, wanted = (f"{x.dtype} {list(x.shape)} on {x.device}" for x in (given, expected))
            raise ValueError(f"{name} is {found}; it must be {wanted}")


def _check_qkv(q: TensorSignature, k: TensorSignature, v: TensorSignature) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, heads, length, head dimension]")
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}; q, k and v must all be float16, all bfloat16 or all float32")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; no dimension may be 0")
    batch, heads, _, dim = q.shape
    if k.shape != v.shape or (k.shape[0], k.shape[1], k.shape[3]) != (batch, heads, dim):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together")
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"head dimension {dim}; it must be at most {MAX_HEAD_DIM}")
    check_heads_in_batch(batch, heads)


def _count_distances(q: TensorSignature, k: TensorSignature, offset: int, window: int | None) -> int:
    """Return the number of distances between rows and keys."""
    if offset < 0:
        raise ValueError(f"offset {offset}; it must not be negative, or rows see no key")
    needed = offset + q.shape[2]
    if window is not None:
        if window < 1:
            raise ValueError(f"window {window}; it must be at least 1")
        if needed - window >= k.shape[2]:
            raise ValueError(f"window {window}: the row at {needed - 1} sees none of the {k.shape[2]} keys")
        needed = min(needed, window)
    return needed


def _check_tables(
    q: TensorSignature, bias: TensorSignature | None, weight: TensorSignature | None, needed: int
) -> None:
    heads = q.shape[1]
    for name, table in (("bias", bias), ("weight", weight)):
        if table is None:
            continue
        if table.dtype != torch.float32 or table.device != q.device:
            raise ValueError(f"{name} is {table.dtype} on {table.device}; it must be float32 on {q.device}")
        if len(table.shape) != 2 or table.shape[0] != heads or table.shape[1] < needed:
            raise ValueError(f"{name} has shape {list(table.shape)}; it must be [{heads}, at least {needed}]")
    if bias is not None and weight is not None and bias.shape != weight.shape:
        raise ValueError(f"bias {list(bias.shape)} and weight {list(weight.shape)} must have the same shape")

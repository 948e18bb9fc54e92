"""A branch of a layer joins the residual stream, and the next norm reads the sum: one kernel in each direction.

    total = residual + scale · (branch + bias)          out = norm(total)

N rows of C numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch
from kernels.layer import configs
from kernels.layer.sums import sum_partials
from kernels.runtime import cdiv, launch_context


@triton.jit
def _add_norm_fwd_kernel(
    branch_ptr,
    bias_ptr,
    residual_ptr,
    weight_ptr,
    shift_ptr,
    total_ptr,
    out_ptr,
    N,
    C,
    epsilon,
    scale,
    CENTERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (rows in tiles). A pointer is None if there is no such tensor: without total_ptr the sum is not stored, and
    without out_ptr nothing is normalized."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < N) & (columns < C)
    at = rows.to(tl.int64) * C + columns
    total = tl.load(branch_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
    total *= scale
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(branch_ptr.dtype.element_ty)
    if total_ptr is not None:
        tl.store(total_ptr + at, rounded, mask=inside)
    if out_ptr is not None:
        x = rounded.to(tl.float32)
        if CENTERS:
            x = tl.where(inside, x - (tl.sum(x, 1) / C)[:, None], 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1) / C + epsilon)[:, None]
        x *= tl.load(weight_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
        if shift_ptr is not None:
            x += tl.load(shift_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_bwd_kernel(
    dtotal_ptr,
    dout_ptr,
    total_ptr,
    weight_ptr,
    dresidual_ptr,
    dbranch_ptr,
    partial_ptr,
    N,
    C,
    epsilon,
    scale,
    CENTERS: tl.constexpr,
    SHIFTS: tl.constexpr,
    ADDS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (P). Gradients of residual and branch, and partial sums float32 [P, K, C] of those of weight, shift and
    bias, as many as there are. dtotal_ptr and dbranch_ptr may be None."""
    part = tl.program_id(0)
    columns = tl.arange(0, BLOCK_N)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dshift = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(part * BLOCK_M, N, tl.num_programs(0) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        inside = (rows < N) & (columns < C)
        at = rows.to(tl.int64) * C + columns
        x = tl.load(total_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if CENTERS:
            x = tl.where(inside, x - (tl.sum(x, 1) / C)[:, None], 0.0)
        factor = tl.rsqrt(tl.sum(x * x, 1) / C + epsilon)[:, None]
        x *= factor
        dweight += dout * x
        if SHIFTS:
            dshift += dout
        dx = dout * weight
        along = (tl.sum(dx * x, 1) / C)[:, None]
        if CENTERS:
            dx -= (tl.sum(dx, 1) / C)[:, None]
        dx = (dx - x * along) * factor
        if dtotal_ptr is not None:
            dx += tl.load(dtotal_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual_ptr + at, dx.to(dresidual_ptr.dtype.element_ty), mask=inside)
        dx *= scale
        if dbranch_ptr is not None:
            tl.store(dbranch_ptr + at, dx.to(dbranch_ptr.dtype.element_ty), mask=inside)
        if ADDS_BIAS:
            dbias += tl.where(inside, dx, 0.0)
    own = tl.arange(0, BLOCK_N)
    K: tl.constexpr = 1 + SHIFTS + ADDS_BIAS
    at = partial_ptr + part * K * C + own
    tl.store(at, tl.sum(dweight, 0), mask=own < C)
    if SHIFTS:
        tl.store(at + C, tl.sum(dshift, 0), mask=own < C)
    if ADDS_BIAS:
        tl.store(at + (K - 1) * C, tl.sum(dbias, 0), mask=own < C)


def add_norm(
    branch: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    *,
    epsilon: float,
    centers: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return residual + scale · (branch + bias), and the norm of it, [..., C] each.

    Args:
        branch: [..., C], of the type of all others.
        bias, residual: [C] and [..., C], or None for 0.
        weight, shift: of the norm, [C]; shift is None for none.
        centers: whether the norm is layernorm, which subtracts the mean, or rmsnorm.
    """
    total, out = _AddNorm.apply(branch, bias, residual, weight, shift, epsilon, centers, scale)
    return total, out


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        weight: Tensor,
        shift: Tensor | None,
        epsilon: float,
        centers: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        branch = branch.contiguous()
        residual = None if residual is None else residual.contiguous()
        width, out = branch.shape[-1], torch.empty_like(branch)
        is_sum = bias is not None or residual is not None or scale != 1.0
        total = torch.empty_like(branch) if is_sum else branch.view_as(branch)
        rows, tile = branch.numel() // width, configs.choose_norm_tile(width)
        with launch_context(branch):
            launch(
                _add_norm_fwd_kernel,
                (cdiv(rows, tile.block_m), 1, 1),
                (
                    *(branch, bias, residual, weight, shift, total if is_sum else None, out),
                    *(rows, width, epsilon, scale),
                ),
                configs.build_constants(tile, CENTERS=centers),
                tile.options,
            )
        ctx.save_for_backward(total, weight)
        ctx.set_materialize_grads(False)
        ctx.options = epsilon, centers, scale, shift is not None, bias is not None, residual is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        epsilon, centers, scale, shifts, adds_bias, has_residual = ctx.options
        dout = torch.zeros_like(total) if dout is None else dout.contiguous()
        dtotal = None if dtotal is None else dtotal.contiguous()
        width = total.shape[-1]
        rows, tile = total.numel() // width, configs.choose_norm_tile(width)
        dresidual = torch.empty_like(total)
        dbranch = torch.empty_like(total) if scale != 1.0 else None
        parts = configs.count_parts(total, cdiv(rows, tile.block_m), configs.NORM_PROGRAMS)
        partial = torch.empty((parts, 1 + shifts + adds_bias, width), dtype=torch.float32, device=total.device)
        with launch_context(total):
            launch(
                _add_norm_bwd_kernel,
                (parts, 1, 1),
                (dtotal, dout, total, weight, dresidual, dbranch, partial, rows, width, epsilon, scale),
                configs.build_constants(tile, CENTERS=centers, SHIFTS=shifts, ADDS_BIAS=adds_bias),
                tile.options,
            )
            sums = sum_partials(partial, weight.dtype).unbind()
        return (
            dresidual if dbranch is None else dbranch,
            sums[-1] if adds_bias else None,
            dresidual if has_residual else None,
            sums[0],
            sums[1] if shifts else None,
            *(None, None, None),
        )


def add(branch: Tensor, bias: Tensor | None, residual: Tensor, *, scale: float = 1.0) -> Tensor:
    """Return residual + scale · (branch + bias) [..., C]; arguments as in `add_norm`."""
    total: Tensor = _Add.apply(branch, bias, residual, scale)
    return total


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, branch: Tensor, bias: Tensor | None, residual: Tensor, scale: float) -> Tensor:
        branch, residual = branch.contiguous(), residual.contiguous()
        width, total = branch.shape[-1], torch.empty_like(branch)
        rows, tile = branch.numel() // width, configs.choose_norm_tile(width)
        with launch_context(branch):
            launch(
                _add_norm_fwd_kernel,
                (cdiv(rows, tile.block_m), 1, 1),
                (branch, bias, residual, None, None, total, None, rows, width, 0.0, scale),
                configs.build_constants(tile, CENTERS=False),
                tile.options,
            )
        ctx.scale, ctx.adds_bias = scale, bias is not None
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dbranch = grad if ctx.scale == 1.0 else grad * ctx.scale
        return dbranch, dbranch.flatten(0, -2).sum(0) if ctx.adds_bias else None, grad, None

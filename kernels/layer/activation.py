"""The bias of a feed-forward layer's first matrix and its activation, gated or not: one kernel in each direction.

    out = f(x + bias)          gated: out = f(gate + its bias) · (x + its bias), x being [gate, x]

N rows of C outputs.
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

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")


@triton.jit
def _normal_cdf(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        return x * _normal_cdf(x)
    elif ACTIVATION == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(z))/2 = σ(2z)
    elif ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def _differentiate(x, ACTIVATION: tl.constexpr):
    """Derivative of the activation at x."""
    if ACTIVATION == "gelu":
        return _normal_cdf(x) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(x)
        return s + x * s * (1.0 - s)
    else:
        return tl.where(x > 0.0, 1.0, 0.0)


@triton.jit
def _activation_fwd_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    N,
    C,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (rows, columns) in tiles. bias_ptr may be None."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < N) & (columns < C)
    at = x_ptr + rows.to(tl.int64) * (C * (1 + GATED)) + columns
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
    out = _activate(x, ACTIVATION)
    if GATED:
        up = tl.load(at + C, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            up += tl.load(bias_ptr + C + columns, mask=columns < C, other=0.0).to(tl.float32)
        out *= up
    tl.store(out_ptr + rows.to(tl.int64) * C + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_bwd_kernel(
    x_ptr,
    bias_ptr,
    dout_ptr,
    dx_ptr,
    partial_ptr,
    N,
    C,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (P, columns in tiles). The gradient of x, and partial sums float32 [P, C or 2C] of the bias's, if there is
    one: else bias_ptr and partial_ptr are None."""
    part = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dbias_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    bias = dbias
    bias_up = dbias
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)
        if GATED:
            bias_up = tl.load(bias_ptr + C + columns, mask=columns < C, other=0.0).to(tl.float32)
    for start in range(part * BLOCK_M, N, tl.num_programs(0) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        inside = (rows < N) & (columns < C)
        at = rows.to(tl.int64) * (C * (1 + GATED)) + columns
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias
        dout = tl.load(dout_ptr + rows.to(tl.int64) * C + columns, mask=inside, other=0.0).to(tl.float32)
        dx = dout * _differentiate(x, ACTIVATION)
        if GATED:
            up = tl.load(x_ptr + at + C, mask=inside, other=0.0).to(tl.float32) + bias_up
            dup = dout * _activate(x, ACTIVATION)
            dx *= up
            tl.store(dx_ptr + at + C, dup.to(dx_ptr.dtype.element_ty), mask=inside)
            dbias_up += dup
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dbias += dx
    if partial_ptr is not None:
        own = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        at = partial_ptr + part * (C * (1 + GATED)) + own
        tl.store(at, tl.sum(dbias, 0), mask=own < C)
        if GATED:
            tl.store(at + C, tl.sum(dbias_up, 0), mask=own < C)


def activate(x: Tensor, bias: Tensor | None, activation: str, *, gated: bool) -> Tensor:
    """Return the activation of x + bias [..., C].

    Args:
        x: [..., C], or [..., 2C] if gated: the gates before what they are multiplied with.
        bias: of x's last dimension, or None.
        activation: one of ACTIVATIONS.
    """
    out: Tensor = _Activation.apply(x, bias, activation, gated)
    return out


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1] // (1 + gated)
        rows, tile = x.numel() // x.shape[-1], configs.choose_activation_tile(width)
        out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
        with launch_context(x):
            launch(
                _activation_fwd_kernel,
                (cdiv(rows, tile.block_m), cdiv(width, tile.block_n), 1),
                (x, bias, out, rows, width),
                configs.build_constants(tile, ACTIVATION=activation, GATED=gated),
                tile.options,
            )
        ctx.save_for_backward(x, bias)
        ctx.activation, ctx.gated = activation, gated
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dout, dx = dout.contiguous(), torch.empty_like(x)
        width = dout.shape[-1]
        rows, tile = dout.numel() // width, configs.choose_activation_tile(width)
        blocks = cdiv(width, tile.block_n)
        parts = configs.count_parts(x, cdiv(rows, tile.block_m), configs.SMALL_PROGRAMS, blocks)
        partial = None
        if bias is not None:
            partial = torch.empty((parts, x.shape[-1]), dtype=torch.float32, device=x.device)
        with launch_context(x):
            launch(
                _activation_bwd_kernel,
                (parts, blocks, 1),
                (x, bias, dout, dx, partial, rows, width),
                configs.build_constants(tile, ACTIVATION=ctx.activation, GATED=ctx.gated),
                tile.options,
            )
            dbias = None if partial is None or bias is None else sum_partials(partial, bias.dtype)
        return dx, dbias, None, None

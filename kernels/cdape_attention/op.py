"""CDAPE attention as one differentiable operation. Checkpointing works around it; `torch.compile` does not go into it.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, D processor width, k kernel size,
p = k//2.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.cdape_attention import driver
from kernels.cdape_attention.args import CdapeArgs, check_shapes
from kernels.cdape_attention.bias_product import BiasProduct
from kernels.cdape_attention.configs import MIN_ROWS, choose_chunk_rows, max_chunk_rows
from kernels.cdape_attention.weights import PackedWeights, WeightShape, pack_weights, unpack_gradients
from kernels.head_dim import MAX_HEAD_DIM
from kernels.runtime import DTYPES, get_arch, get_device_properties, launch_context, outside_graphs

MAX_PROCESSOR_WIDTH = 64
"""Widths beyond would need other tiles."""


def cdape_attention(args: CdapeArgs, *, chunk: int | None = None) -> Tensor:
    """softmax(S + bias + Conv2(LeakyReLU(Conv1([S, bias])))) · v in memory linear in R and C, on a GPU.

    DAPE V2, equation 5 (equation 2 with residual_bias False); the key axis is extended by zeros, so that no row depends
    on C.

    Args:
        args: d ≤ 128 and D ≤ 64; bfloat16, float16 or float32.
        chunk: query rows per chunk; None lets the shape decide.

    Returns:
        [B, H, R, d] of q's type.

    Raises:
        ValueError: shapes, types or options that do not fit.
        RuntimeError: a kernel cannot run where the tensors are (on a CPU without Triton's interpreter).
    """
    check_shapes(args)
    q, k, v, bias, w1, b1, w2, b2, offset, window, residual_bias, scale = args
    _check_limits(q, k, v, w1, offset, chunk)
    batch, heads, rows, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    if chunk is None:
        chunk = choose_chunk_rows(batch, heads, rows, offset + rows, q.dtype, get_device_properties(q))
    apply = outside_graphs(_CdapeAttention)
    output: Tensor = apply(q, k, v, bias, w1, b1, w2, b2, offset, window, residual_bias, scale, min(chunk, rows))
    return output


def _check_limits(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, offset: int, chunk: int | None) -> None:
    """What the kernels ask for beyond shapes that fit."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must be of one type: bfloat16, float16 or float32"
        )
    rows, dim = q.shape[2:]
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"head dimension {dim}; it must be at most {MAX_HEAD_DIM}")
    if w1.shape[0] > MAX_PROCESSOR_WIDTH:
        raise ValueError(f"w1 is {list(w1.shape)}; D must be from 1 to {MAX_PROCESSOR_WIDTH}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1, or None")
    max_rows = max_chunk_rows(q.shape[1], offset + rows)
    if max_rows < MIN_ROWS:
        raise ValueError(f"{offset + rows} columns; with {q.shape[1]} heads there must be fewer")
    if chunk is not None and min(chunk, rows) > max_rows:
        raise ValueError(f"chunk is {chunk}; it must be at most {max_rows} with {offset + rows} columns")


class _CdapeAttention(torch.autograd.Function):
    """Differentiable in all tensors. Between the passes it keeps q·scale, k and v, contiguous, rather than what they
    were, which is then free; the tables, the weights as kernels read them, and two numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        offset: int,
        window: int | None,
        residual_bias: bool,
        scale: float,
        chunk: int,
    ) -> Tensor:
        get_arch(q)  # raises where no kernel can run
        heads, rows = q.shape[1:3]
        shape = WeightShape(heads, w1.shape[0], w1.shape[-1], bias is not None)
        scaled = torch.mul(q, scale, out=torch.empty(q.shape, dtype=q.dtype, device=q.device))
        k, v = k.contiguous(), v.contiguous()
        bias = None if bias is None else bias.contiguous()
        weights = pack_weights(shape, w1, b1, w2, b2, q.dtype)
        product = BiasProduct(shape, bias, rows, offset, window, q.dtype)
        neighbourhoods = product.build_neighbourhoods()
        bias_contributions = product.compute(neighbourhoods, weights)
        bias_table = bias if bias is not None and residual_bias else scaled.new_empty(heads, 0, dtype=torch.float32)
        no_window = driver.NO_WINDOW_INT32
        bounded = no_window if window is None else min(window, no_window)
        # Tensors are kept by `save_for_backward`, which knows when they are needed no more.
        ctx.build_problem = partial(
            driver.CdapeProblem, shape=shape, rows=rows, offset=offset, window=bounded, dtype=scaled.dtype
        )
        problem = ctx.build_problem(bias_contributions, bias_table, weights)
        with launch_context(q):
            output, stats = driver.forward(scaled, k, v, problem, chunk)
        ctx.save_for_backward(scaled, k, v, stats, bias, neighbourhoods, bias_contributions, bias_table, *weights)
        ctx.window, ctx.scale, ctx.chunk = window, scale, chunk
        ctx.dtypes = tuple(x.dtype for x in (w1, b1, w2, b2))
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        scaled, k, v, stats, bias, neighbourhoods, bias_contributions, bias_table, *packed = ctx.saved_tensors
        weights = PackedWeights(*packed)
        problem = ctx.build_problem(bias_contributions, bias_table, weights)
        product = BiasProduct(problem.shape, bias, problem.rows, problem.offset, ctx.window, scaled.dtype)
        with launch_context(scaled):
            dq, sums = driver.backward(dout.contiguous(), scaled, k, v, stats, problem, product, ctx.scale, ctx.chunk)
        dbias = None if bias is None else sums.bias_table
        dweight, constant = product.differentiate(sums.bias_product, neighbourhoods, weights, dbias)
        gradients = unpack_gradients(problem.shape, sums.patches, dweight, constant, ctx.dtypes)
        dk, dv = (x.view(k.shape).to(k.dtype) for x in (sums.k, sums.v))
        return (dq, dk, dv, None if dbias is None else dbias.t(), *gradients, None, None, None, None, None)

"""CDAPE attention as torch custom operators, with gradients: `torch.compile` and checkpointing work around them.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, D processor width, k kernel size,
p = k//2.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.cdape_attention import driver
from kernels.cdape_attention.args import CdapeArgs, check_shapes
from kernels.cdape_attention.bias_term import compute_bias_contributions
from kernels.cdape_attention.configs import MIN_ROWS, choose_chunk_rows, max_chunk_rows
from kernels.cdape_attention.reference import at_least_float32
from kernels.head_dim import MAX_HEAD_DIM
from kernels.runtime import DTYPES, get_arch, get_device_properties, launch_context

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
    bias_contributions = compute_bias_contributions(bias, w1, b1, rows, offset, window, q.dtype)
    bias_table = bias if bias is not None and residual_bias else q.new_empty(heads, 0, dtype=torch.float32)
    return _attention(
        q,
        k,
        v,
        bias_contributions,
        bias_table,
        w1[:, :heads, 0],
        w2[:, :, 0],
        b2,
        offset,
        driver.NO_WINDOW_INT32 if window is None else min(window, driver.NO_WINDOW_INT32),
        dim**-0.5 if scale is None else scale,
        choose_chunk_rows(batch, heads, rows, offset + rows, q.dtype, get_device_properties(q))
        if chunk is None
        else min(chunk, rows),
    )[0]


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


def _build_problem(
    bias_contributions: Tensor,
    bias_table: Tensor,
    w1: Tensor,
    w2: Tensor,
    b2: Tensor,
    q: Tensor,
    offset: int,
    window: int,
) -> driver.CdapeProblem:
    return driver.CdapeProblem(
        bias_contributions=at_least_float32(bias_contributions).contiguous(),
        bias_table=bias_table.contiguous(),
        w1=w1,
        w2=w2,
        b2=b2,
        rows=q.shape[2],
        offset=offset,
        window=window,
        dtype=q.dtype,
    )


@torch.library.custom_op("farfield::cdape_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_contributions: Tensor,
    bias_table: Tensor,
    w1: Tensor,
    w2: Tensor,
    b2: Tensor,
    offset: int,
    window: int,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Output, and the softmax's maximum and sum [2, B, H, R].

    `bias_contributions` is from `bias_term.compute_bias_contributions`, `bias_table` float32 [H, N or 0], `w1`
    [D, H, k] the scores' half, `w2` [H, D, k].
    """
    get_arch(q)  # raises where no kernel can run
    problem = _build_problem(bias_contributions, bias_table, w1, w2, b2, q, offset, window)
    with launch_context(q):
        return driver.forward(q.contiguous(), k.contiguous(), v.contiguous(), problem, scale, chunk)


@_attention.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((2, *q.shape[:3]), dtype=torch.float32)


@torch.library.custom_op("farfield::cdape_attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: Tensor,
    bias_contributions: Tensor,
    bias_table: Tensor,
    w1: Tensor,
    w2: Tensor,
    b2: Tensor,
    offset: int,
    window: int,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias_contributions, bias_table, w1 and w2."""
    get_arch(q)  # raises where no kernel can run
    problem = _build_problem(bias_contributions, bias_table, w1, w2, b2, q, offset, window)
    with launch_context(q):
        dq, dk, dv, dbias_contributions, dbias_table, dw1, dw2 = driver.backward(
            dout.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), stats, problem, scale, chunk
        )
    return dq, dk, dv, dbias_contributions, dbias_table, dw1.to(w1.dtype), dw2.to(w2.dtype).contiguous()


@_attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: Tensor,
    bias_contributions: Tensor,
    bias_table: Tensor,
    w1: Tensor,
    w2: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        bias_contributions.new_empty(bias_contributions.shape, dtype=torch.float32),
        bias_table.new_empty(bias_table.shape),
        w1.new_empty(w1.shape),
        w2.new_empty(w2.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, offset, window, scale, chunk = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = offset, window, scale, chunk
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bias_contributions, bias_table, w1, w2, b2, stats = ctx.saved_tensors
    gradients = _attention_backward(dout, q, k, v, stats, bias_contributions, bias_table, w1, w2, b2, *ctx.options)
    return (*gradients, torch.zeros_like(b2), None, None, None, None)


_attention.register_autograd(_differentiate, setup_context=_save)

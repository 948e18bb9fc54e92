"""CDAPE attention as one differentiable operation. It supports checkpointing; `torch.compile` does not trace into it.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, D processor width, k kernel size, p =
k//2.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.cdape_attention import driver, mixer
from megatron.kernels.cdape_attention.args import CdapeArgs, check_shapes
from megatron.kernels.cdape_attention.bias_product import BiasProduct, get_bias_product
from megatron.kernels.cdape_attention.chunks import CdapeProblem
from megatron.kernels.cdape_attention.configs import MIN_ROWS, choose_chunk_rows, compute_max_chunk_rows
from megatron.kernels.cdape_attention.head_products import AttentionOutput
from megatron.kernels.cdape_attention.layer_terms import (
    LayerTerms,
    build_problems,
    compute_terms,
    differentiate_terms,
    get_layer_sums,
)
from megatron.kernels.cdape_attention.term_sums import TermSums, add_mixer_sums, allocate_term_sums
from megatron.kernels.cdape_attention.weights import PackedWeights, get_weight_shape
from megatron.kernels.head_dim import MAX_HEAD_DIM
from megatron.kernels.runtime import (
    DTYPES,
    check_heads_in_batch,
    get_arch,
    get_device_properties,
    get_uncompiled_apply,
    launch_context,
)

MAX_PROCESSOR_WIDTH = 64
"""Larger widths would need other tiles."""


def cdape_attention(args: CdapeArgs, *, chunk: int | None = None, terms: LayerTerms | None = None) -> Tensor:
    """Compute softmax(S + bias + Conv2(LeakyReLU(Conv1([S, bias])))) · v in memory linear in R and C, on a GPU.

    DAPE V2, equation 5, or equation 2 without residual_bias. The key axis is padded with zeros, so that no row depends
    on C.

    Args:
        args: arguments with d ≤ 128 and D ≤ 64, in bfloat16, float16 or float32.
        chunk: query rows per chunk; None chooses them by shape.
        terms: precomputed terms of the layer (`layer_terms.py`) that match the call (`LayerTerms.fits`).

    Returns:
        [B, H, R, d] of q's type, laid out as activations [R, B, H, d].

    Raises:
        ValueError: if shapes, types or options are invalid.
        RuntimeError: if a kernel cannot run on the tensors' device (a CPU without Triton's interpreter).
    """
    check_shapes(args)
    q, k, v, bias, w1, b1, w2, b2, offset, window, document_starts, residual_bias, sinks, scale, *_ = args
    head_map = args.head_map
    if document_starts is not None and document_starts.device != q.device:
        raise ValueError(f"document_starts is on {document_starts.device} and q on {q.device}")
    if sinks is not None and sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device} and q on {q.device}")
    _check_limits(q, k, v, w1, offset, chunk)
    if sinks is not None:
        # The kernels add b2 to the logits but compute no gradient for it, because softmax cancels it without sinks.
        # Raising the logits of all keys equals lowering the sink.
        sinks = sinks + (b2.detach() - b2).float()
    batch, heads, rows, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    if chunk is None:
        sizes = batch, heads, rows, offset + rows
        device, has_cuda_kernels = get_device_properties(q), _has_cuda_kernels(args)
        chunk = choose_chunk_rows(*sizes, q.dtype, device, has_cuda_kernels=has_cuda_kernels)
    if terms is not None:
        if document_starts is not None:
            raise ValueError("precomputed terms cannot be combined with document_starts")
        if not terms.fits(q, offset, window):
            raise ValueError("precomputed terms do not match the shape of this call")
        attended: Tensor = get_uncompiled_apply(_AttendWithTerms)(
            *(q, k, v, sinks, head_map, terms.anchor, terms, scale, min(chunk, rows)),
            _needs_gradients(q, k, v, sinks, head_map, terms.anchor),
        )
        return attended
    apply = get_uncompiled_apply(_CdapeAttention)
    tensors = (q, k, v, bias, w1, b1, w2, b2, sinks, head_map)
    options = (offset, window, document_starts, residual_bias, args.is_linear, scale, min(chunk, rows))
    output: Tensor = apply(*tensors, *options, _needs_gradients(*tensors))
    return output


def _has_cuda_kernels(args: CdapeArgs) -> bool:
    """Return True if the CUDA kernels of both passes support the shapes of a call on some GPU."""
    heads, rows, dim = args.q.shape[1:]
    width, _, _, kernel_size = args.w1.shape
    shape = get_weight_shape(heads, width, kernel_size, args.bias is not None, args.is_linear)
    return mixer.is_enabled() and mixer.is_supported(shape, args.q.dtype, dim, args.offset + rows)


def _needs_gradients(*tensors: Tensor | None) -> bool:
    """Return True if a backward pass may follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _check_limits(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, offset: int, chunk: int | None) -> None:
    """Check the limits of the kernels beyond valid shapes."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must be of one type: bfloat16, float16 or float32"
        )
    check_heads_in_batch(*q.shape[:2])
    rows, dim = q.shape[2:]
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"head dimension {dim}; it must be at most {MAX_HEAD_DIM}")
    if w1.shape[0] > MAX_PROCESSOR_WIDTH:
        raise ValueError(f"w1 is {list(w1.shape)}; D must be from 1 to {MAX_PROCESSOR_WIDTH}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1, or None")
    max_rows = compute_max_chunk_rows(q.shape[1], offset + rows)
    if max_rows < MIN_ROWS:
        raise ValueError(f"{offset + rows} columns; with {q.shape[1]} heads there must be fewer")
    if chunk is not None and min(chunk, rows) > max_rows:
        raise ValueError(f"chunk is {chunk}; it must be at most {max_rows} with {offset + rows} columns")


class _CdapeAttention(torch.autograd.Function):
    """Autograd function for calls without precomputed terms, differentiable in all tensors.

    It saves contiguous q·scale, k and v, so that the original tensors can be freed; the tables, the packed weights, and
    two numbers per row; for the CUDA kernels also the output and its rounding error.
    """

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
        sinks: Tensor | None,
        head_map: Tensor | None,
        offset: int,
        window: int | None,
        document_starts: Tensor | None,
        residual_bias: bool,
        is_linear: bool,
        scale: float,
        chunk: int,
        needs_gradients: bool,
    ) -> Tensor:
        get_arch(q)  # raises if no kernel can run
        heads, rows = q.shape[1:3]
        shape = get_weight_shape(heads, w1.shape[0], w1.shape[-1], bias is not None, is_linear)
        # Rows of packed documents can have any distance from their left edge.
        of_rows = (rows, offset) if document_starts is None else (offset + rows, 0)
        product = get_bias_product(shape, *of_rows, window, q.dtype)
        bias = None if bias is None else bias.contiguous()
        biases = None if bias is None else bias[None]
        contributions, packed = compute_terms(product, biases, [(w1, b1, w2, b2)])
        (problem,) = build_problems(product, contributions, biases, packed, residual_bias=residual_bias)
        problem = replace(problem, rows=rows, offset=offset, document_starts=document_starts)
        problem = replace(problem, sinks=_make_contiguous(sinks), head_map=_make_contiguous(head_map))
        problem = replace(problem, uses_mixer=mixer.is_enabled())
        output, kept = _attend(q, k, v, problem, scale, chunk, needs_gradients=needs_gradients)
        # `save_for_backward` frees these tensors after the backward pass.
        ctx.save_for_backward(*kept, biases, contributions, document_starts, problem.sinks, problem.head_map, *packed)
        ctx.residual_bias = residual_bias
        ctx.product, ctx.offset, ctx.scale, ctx.chunk = product, offset, scale, chunk
        ctx.uses_mixer = problem.uses_mixer
        ctx.dtypes = tuple(x.dtype for x in (w1, b1, w2, b2))
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, len(PackedWeights._fields)
        *kept, biases, contributions, document_starts, sinks, head_map = saved[:-count]
        packed, product = PackedWeights(*saved[-count:]), ctx.product
        (problem,) = build_problems(product, contributions, biases, packed, residual_bias=ctx.residual_bias)
        problem = replace(problem, rows=kept[0].shape[2], offset=ctx.offset, document_starts=document_starts)
        problem = replace(problem, sinks=sinks, head_map=head_map, uses_mixer=ctx.uses_mixer)
        num_distances = 0 if biases is None else biases.shape[2]
        sums = _allocate_sums(problem, product, num_distances, _has_mixer_sums(problem, kept, ctx.chunk))
        *dqkv, dsinks, dmap = _attend_backward(dout, kept, problem, product, sums.select_layer(0), ctx)
        (dbias,), (dweights,) = differentiate_terms(product, biases, packed.bias_weight, sums, ctx.dtypes)
        return (*dqkv, None if biases is None else dbias, *dweights, dsinks, dmap, *(None,) * 8)


class _AttendWithTerms(torch.autograd.Function):
    """Autograd function for a layer with precomputed terms, which receive the gradients of table and weights."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        head_map: Tensor | None,
        anchor: Tensor,
        terms: LayerTerms,
        scale: float,
        chunk: int,
        needs_gradients: bool,
    ) -> Tensor:
        get_arch(q)
        sinks, head_map = _make_contiguous(sinks), _make_contiguous(head_map)
        problem = _configure(terms.problem, sinks, head_map, uses_mixer=mixer.is_enabled())
        output, kept = _attend(q, k, v, problem, scale, chunk, needs_gradients=needs_gradients)
        ctx.save_for_backward(*kept, sinks, head_map)
        ctx.node, ctx.terms, ctx.scale, ctx.chunk = anchor.grad_fn, terms, scale, chunk
        ctx.uses_mixer = problem.uses_mixer
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *kept, sinks, head_map = ctx.saved_tensors
        problem = _configure(ctx.terms.problem, sinks, head_map, uses_mixer=ctx.uses_mixer)
        product, uses_mixer = ctx.terms.product, _has_mixer_sums(problem, kept, ctx.chunk)
        if ctx.node is None:  # neither table nor weights need a gradient
            sums = _allocate_sums(problem, product, problem.bias_table.shape[1], uses_mixer).select_layer(0)
        else:
            sums = get_layer_sums(ctx.node, problem, uses_mixer=uses_mixer)
        return (*_attend_backward(dout, kept, problem, product, sums, ctx), *(None,) * 5)


def _configure(
    problem: CdapeProblem, sinks: Tensor | None, head_map: Tensor | None, *, uses_mixer: bool
) -> CdapeProblem:
    """Return the problem with these fields, copied only if one differs: a copy costs as much host time as a launch."""
    if sinks is problem.sinks and head_map is problem.head_map and uses_mixer == problem.uses_mixer:
        return problem
    return replace(problem, sinks=sinks, head_map=head_map, uses_mixer=uses_mixer)


def _make_contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, problem: CdapeProblem, scale: float, chunk: int, *, needs_gradients: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the output and the tensors that the backward pass reads.

    These are scaled queries, k, v, the softmax statistics and, if needed, the output and its rounding error, else None.
    """
    scaled = torch.mul(q, scale, out=q.new_empty(q.shape))
    k, v = k.contiguous(), v.contiguous()
    with launch_context(q):
        output, stats, residue = driver.forward(scaled, k, v, problem, chunk, needs_gradients=needs_gradients)
    return output, (scaled, k, v, stats, None if residue is None else output, residue)


def _has_mixer_sums(problem: CdapeProblem, kept: Sequence[Any], chunk_rows: int) -> bool:
    """Return True if the CUDA kernels compute the backward pass of a call that saved these tensors."""
    *_, residue = kept
    if problem.head_map is None:
        return residue is not None
    return driver.uses_mixer_sums(problem, kept[1], chunk_rows)


def _allocate_sums(problem: CdapeProblem, product: BiasProduct, num_distances: int, uses_mixer: bool) -> TermSums:
    """Return zero-initialized sums for a single call, with L = 1."""
    sums = allocate_term_sums(1, product, num_distances, problem.bias_contributions.device)
    return add_mixer_sums(sums, problem) if uses_mixer else sums


def _attend_backward(
    dout: Tensor,
    kept: Sequence[Any],
    problem: CdapeProblem,
    product: BiasProduct,
    sums: TermSums,
    ctx: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v, the sinks and the head map, and add the others to the layer's sums."""
    scaled, k, v, stats, output, residue = kept
    attended = AttentionOutput(output, stats, residue)
    if output is not None and dout.stride() != output.stride():
        dout = torch.empty_like(output).copy_(dout)
    elif dout.stride(3) != 1:
        dout = dout.contiguous()
    with launch_context(scaled):
        gradients = driver.backward(dout, scaled, k, v, attended, problem, product, sums, ctx.scale, ctx.chunk)
    dq, dk, dv, dsinks, dmap = gradients
    return dq, dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), dsinks, dmap

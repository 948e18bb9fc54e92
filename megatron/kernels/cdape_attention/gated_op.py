"""CDAPE attention with a bias of gates, as one differentiable operation of the CUDA kernels.

The bias of row i and column j is the sum of a row term and a column term. It differs between sequences and is not a
function of the distance, so neither the tables of `op.cdape_attention` nor Triton's kernels support it.

B batch, H heads, R query rows, C key columns, d head dimension, D processor width, k kernel size, p = k//2.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.cdape_attention import mixer
from megatron.kernels.cdape_attention.args import CdapeArgs, check_shapes
from megatron.kernels.cdape_attention.attention_kernel import ATTENTION_KERNELS
from megatron.kernels.cdape_attention.chunks import NO_WINDOW_INT32, CdapeProblem, Chunk, list_chunks
from megatron.kernels.cdape_attention.configs import choose_chunk_rows
from megatron.kernels.cdape_attention.gate_terms import (
    GateBias,
    GateSums,
    build_gate_operands,
    compute_row_offsets,
    differentiate_gates,
)
from megatron.kernels.cdape_attention.geometry import (
    ELEMENTS,
    HEADS,
    WIDTH,
    KernelFamily,
    KernelForm,
    MixerKernel,
    SizeLimit,
    choose_kernel,
)
from megatron.kernels.cdape_attention.head_products import (
    AttentionOutput,
    allocate_key_gradients,
    allocate_output,
    differentiate_qkv,
    differentiate_sinks,
)
from megatron.kernels.cdape_attention.mixer_chunks import (
    BACKWARD_KERNELS,
    build_logit_inputs,
    compute_attention_of_chunk,
    differentiate_mixer_of_chunk,
    differentiate_softmax_of_chunk,
)
from megatron.kernels.cdape_attention.mixer_operands import Fragments
from megatron.kernels.cdape_attention.weights import PackedWeights, get_weight_shape
from megatron.kernels.runtime import (
    check_heads_in_batch,
    get_arch,
    get_device_properties,
    get_uncompiled_apply,
    launch_context,
)

LIMITS = (SizeLimit(7, HEADS, WIDTH),)
"""Largest sizes with gates, whose terms are those of one group of heads and one part of the width."""
FAMILIES = (ATTENTION_KERNELS, *BACKWARD_KERNELS)


def describe_unsupported(
    dtype: torch.dtype,
    heads: int,
    dim: int,
    width: int,
    kernel_size: int,
    columns: int,
    offset: int = 0,
) -> str | None:
    """Explain why the kernels do not support a call on any GPU, or return None if they support it on some GPU."""
    if dtype not in ELEMENTS:
        return f"a gate's bias before a processor in {dtype}"
    shape = get_weight_shape(heads, width, kernel_size, False)
    # Fewer heads and widths are padded, which is still faster than row blocks.
    padded = get_weight_shape(max(heads, HEADS), max(width, WIDTH), shape.kernel_size, False)
    if not mixer.is_supported(padded, dtype, dim, columns - columns % 8, LIMITS):
        return (
            f"a gate's bias before a processor of {heads} heads of {dim}, width {width} and kernel size {kernel_size}"
        )
    # The last column of a chunk is the offset plus a multiple of 8 rows.
    return "a number of tokens that is not a multiple of 8" if columns % 8 or offset % 8 else None


def describe_unsupported_device(q: Tensor, dim: int, kernel_size: int) -> str | None:
    """Explain why this GPU cannot run the kernels, or return None if it can."""
    if not mixer.is_enabled():
        return f"a gate's bias before a processor with {mixer.VARIABLE}=0"
    if not q.is_cuda:
        return "a gate's bias before a processor without a GPU"
    arch = get_arch(q)
    form = KernelForm(kernel_size, dim, q.dtype, is_gated=True)
    if arch is None or any(choose_kernel(family, form, arch) is None for family in FAMILIES):
        size = f"heads of {dim} and kernel size {kernel_size}"
        return f"a gate's bias before a processor with {size} on {torch.cuda.get_device_name(q.device)}"
    return None if mixer.has_compiler() else "a gate's bias before a processor without NVRTC"


@dataclass(frozen=True)
class GatedCall:
    """Inputs of a call that all its chunks share."""

    problem: CdapeProblem
    bias: GateBias
    scale: float
    chunk_rows: int

    @property
    def is_local(self) -> bool:
        """True if some rows may not see position 0."""
        problem = self.problem
        return problem.document_starts is not None or problem.window < problem.offset + problem.rows

    def find_sink_offsets(self) -> Tensor | None:
        """Return the row terms that the logits omit, float32 [B, H, R]; None if they have no effect."""
        if self.problem.sinks is None or not self.bias.is_residual:
            return None
        return compute_row_offsets(self.bias.rows, self.chunk_rows)

    def choose_kernel(self, family: KernelFamily, like: Tensor) -> MixerKernel:
        """Return the kernel for this call and tensors like `like`."""
        form = KernelForm(self.problem.shape.kernel_size, like.shape[3], like.dtype, self.is_local, is_gated=True)
        kernel = choose_kernel(family, form, get_arch(like))
        assert kernel is not None  # guaranteed by `describe_unsupported_device`
        return kernel

    def build_inputs(self, chunk: Chunk, scaled: Tensor, k: Tensor, fragments: Fragments | None) -> mixer.ChunkInputs:
        gates = build_gate_operands(self.problem, self.bias, chunk, fragments)
        # The kernel is chosen for the whole call, so all chunks or none have spans.
        spans = mixer.ColumnSpans(self.problem.window, chunk.left, chunk.document_starts) if self.is_local else None
        return build_logit_inputs(self.problem, chunk, scaled, k, gates)._replace(spans=spans)


def attend_with_gates(args: CdapeArgs, row_bias: Tensor, key_bias: Tensor, *, chunk: int | None = None) -> Tensor:
    """Compute softmax(S + B + Conv2(LeakyReLU(Conv1([S, B])))) · v, where B is row_bias + key_bias.

    Memory is linear in R and C. Arguments are those of `op.cdape_attention`, with `args.bias` None and both halves of
    `args.w1`.

    Args:
        args: arguments that `describe_unsupported` and `describe_unsupported_device` accept.
        row_bias: float32 or float64 [B, H, R].
        key_bias: float32 or float64 [B, H, C].
        chunk: query rows per chunk; None chooses them by shape.

    Returns:
        [B, H, R, d] of q's type, laid out as activations [R, B, H, d].

    Raises:
        ValueError: if shapes are invalid.
    """
    batch, heads, rows, dim = args.q.shape
    columns = args.offset + rows
    if args.bias is not None:
        raise ValueError("a bias of gates cannot be combined with a bias table")
    if args.is_linear or args.head_map is not None:
        raise ValueError("a bias of gates cannot be combined with a linear processor or a head map")
    check_shapes(args._replace(w1=args.w1[:, :heads]))
    check_heads_in_batch(batch, heads)
    if args.w1.shape[1] != 2 * heads or row_bias.shape != (batch, heads, rows) or key_bias.shape[2] < columns:
        raise ValueError(
            f"w1 is {list(args.w1.shape)}, row_bias {list(row_bias.shape)} and key_bias {list(key_bias.shape)}; "
            f"they must be [D, {2 * heads}, 1, k], [{batch}, {heads}, {rows}] and "
            f"[{batch}, {heads}, at least {columns}]"
        )
    if chunk is None:
        device = get_device_properties(args.q)
        chunk = choose_chunk_rows(batch, heads, rows, columns, args.q.dtype, device, has_cuda_kernels=True)
    scale = dim**-0.5 if args.scale is None else args.scale
    # The kernels omit b2: raising the logits of all keys equals lowering the sink.
    sinks = None if args.sinks is None else args.sinks - args.b2.float()
    weights = args.w1, args.b1, args.w2, args.b2
    tensors = (args.q, args.k, args.v, row_bias, key_bias[:, :, :columns], *weights, sinks)
    needs_gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    spans = args.offset, args.window, args.document_starts
    options = (*spans, args.residual_bias, scale, min(chunk, rows), needs_gradients)
    output: Tensor = get_uncompiled_apply(_AttendWithGates)(*tensors, *options)
    return output


class _AttendWithGates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row_bias: Tensor,
        key_bias: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        sinks: Tensor | None,
        offset: int,
        window: int | None,
        document_starts: Tensor | None,
        residual_bias: bool,
        scale: float,
        chunk: int,
        needs_gradients: bool,
    ) -> Tensor:
        scaled = torch.mul(q, scale, out=q.new_empty(q.shape))
        k, v = k.contiguous(), v.contiguous()
        row_bias, key_bias = _make_contiguous_rows(row_bias), _make_contiguous_rows(key_bias)
        w1, b1, w2 = w1.contiguous(), b1.contiguous(), w2.contiguous()
        problem = _describe_problem(scaled, w1, offset, window)
        problem = replace(problem, document_starts=document_starts, sinks=sinks)
        call = GatedCall(problem, GateBias(row_bias, key_bias, w1, b1, w2, residual_bias), scale, chunk)
        with launch_context(q):
            (output, stats, residue), fragments = _forward(call, scaled, k, v, needs_gradients=needs_gradients)
        saved = (scaled, k, v, stats, output, residue, row_bias, key_bias, w1, b1, w2, b2, sinks, document_starts)
        ctx.save_for_backward(*saved, *fragments)
        ctx.spans, ctx.options, ctx.residual_bias = (offset, window), (scale, chunk), residual_bias
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        scaled, k, v, stats, output, residue, *of_gates, b2, sinks, document_starts = ctx.saved_tensors[:-4]
        row_bias, key_bias, w1, b1, w2 = of_gates
        bias, fragments = (
            GateBias(row_bias, key_bias, w1, b1, w2, ctx.residual_bias),
            Fragments(*ctx.saved_tensors[-4:]),
        )
        if dout.stride() != output.stride():
            dout = torch.empty_like(output).copy_(dout)
        problem = _describe_problem(scaled, bias.w1, *ctx.spans)
        problem = replace(problem, document_starts=document_starts, sinks=sinks)
        call = GatedCall(problem, bias, *ctx.options)
        with launch_context(scaled):
            attended = AttentionOutput(output, stats, residue)
            dq, dk, dv, sums, dsinks = _backward(call, scaled, k, v, attended, dout, fragments)
            found = differentiate_gates(problem, bias, b2, sums)
        return (dq, dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), *found, dsinks, *(None,) * 7)


def _make_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


@lru_cache(maxsize=64)
def _describe_shape(
    heads: int, width: int, taps: int, rows: int, offset: int, window: int | None, dtype: torch.dtype
) -> CdapeProblem:
    """Return the problem of calls of these sizes, without tables and weights, which `GateOperands` has."""
    nothing = torch.empty(0)
    return CdapeProblem(
        bias_contributions=nothing,
        bias_table=nothing,
        weights=PackedWeights(*(nothing,) * len(PackedWeights._fields)),
        shape=get_weight_shape(heads, width, taps, False),
        rows=rows,
        offset=offset,
        window=NO_WINDOW_INT32 if window is None else window,
        dtype=dtype,
    )


def _describe_problem(scaled: Tensor, w1: Tensor, offset: int, window: int | None) -> CdapeProblem:
    _, heads, rows, _ = scaled.shape
    return _describe_shape(heads, w1.shape[0], w1.shape[3], rows, offset, window, scaled.dtype)


def _forward(
    call: GatedCall, scaled: Tensor, k: Tensor, v: Tensor, *, needs_gradients: bool
) -> tuple[AttentionOutput, Fragments]:
    attended, fragments = allocate_output(scaled, needs_residue=needs_gradients), None
    kernel, offsets = call.choose_kernel(ATTENTION_KERNELS, k), call.find_sink_offsets()

    def attend(chunk: Chunk, fragments: Fragments | None) -> Fragments:
        """Process a chunk. A separate function, so that its operands are freed before the next ones."""
        inputs = call.build_inputs(chunk, scaled, k, fragments)
        compute_attention_of_chunk(inputs, call.problem, chunk, v, attended, kernel, offsets)
        assert inputs.gates is not None
        return inputs.gates.fragments

    for chunk in list_chunks(call.problem, call.chunk_rows):
        fragments = attend(chunk, fragments)
    assert fragments is not None
    return attended, fragments


def _backward(
    call: GatedCall,
    scaled: Tensor,
    k: Tensor,
    v: Tensor,
    attended: AttentionOutput,
    dout: Tensor,
    fragments: Fragments,
) -> tuple[Tensor, Tensor, Tensor, GateSums, Tensor | None]:
    """Return the gradients of q, k [B·H, C, d], v, the terms of gates, and the sinks.

    The last chunk comes first, so that the others reuse its memory.
    """
    problem = call.problem
    batch, _, rows, _ = scaled.shape
    columns = problem.offset + rows
    chunks = list_chunks(problem, call.chunk_rows)[::-1]
    is_only = len(chunks) == 1
    dk, dv = allocate_key_gradients(chunks, k)
    dq, means = torch.empty_like(scaled), torch.empty_like(attended.stats[0])
    allocate = means.new_empty if is_only and chunks[0].left == 0 else means.new_zeros
    sums = GateSums(
        means.new_empty(batch, rows, WIDTH + HEADS),
        allocate(batch, columns, WIDTH + HEADS),
        means.new_zeros(batch, rows, 4 * problem.padding, WIDTH),
        allocate(1, 2 * fragments.w1.shape[1]),
    )
    to_logits, to_scores, to_weights = (call.choose_kernel(family, k) for family in BACKWARD_KERNELS)

    def differentiate(chunk: Chunk) -> None:
        """Process a chunk. A separate function, so that its maps are freed before the next ones."""
        inputs = call.build_inputs(chunk, scaled, k, fragments)
        maps = differentiate_softmax_of_chunk(inputs, chunk, v, dout, attended, means, to_logits)
        of_rows = mixer.RowGradients(*(x[:, chunk.first : chunk.last] for x in (sums.rows, sums.edge)))
        kernels = to_scores, to_weights
        dscores, found = differentiate_mixer_of_chunk(inputs, maps.dlogits, kernels, of_rows=of_rows)
        # The partial sums of a sequence's blocks, as rows that contain all columns.
        by_block = found.tables.view(batch, -1, (chunk.right - chunk.left) * (WIDTH + HEADS)).transpose(0, 1)
        of_columns = sums.columns[:, chunk.left : chunk.right].flatten(1)
        pairs = [(of_columns, by_block), (sums.weights, found.weights)]
        of_chunk = problem, chunk, (dscores, maps.probabilities), (scaled, k, dout), (dq, dk, dv), pairs
        differentiate_qkv(*of_chunk, call.scale, is_only=is_only)

    for chunk in chunks:
        differentiate(chunk)
    dsinks = None
    if problem.sinks is not None:
        dsinks = differentiate_sinks(problem.sinks, attended.stats, means, call.find_sink_offsets())
    return dq, dk, dv, sums, dsinks

"""Attention of a chunk by the CUDA kernels: their choice, their inputs, and where their results and sums go.

B batch, H heads, R query rows of a chunk, C columns of its maps.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron.kernels.cdape_attention import attention_kernel, logit_kernels, mixer
from megatron.kernels.cdape_attention.bias_product import BiasProduct
from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk
from megatron.kernels.cdape_attention.configs import has_enough_blocks
from megatron.kernels.cdape_attention.gate_terms import GateOperands
from megatron.kernels.cdape_attention.geometry import (
    HEADS,
    KernelFamily,
    KernelForm,
    MixerKernel,
    choose_kernel,
    pad_sizes,
)
from megatron.kernels.cdape_attention.head_products import AttentionOutput
from megatron.kernels.cdape_attention.term_sums import TermSums, pair_edges
from megatron.kernels.cdape_attention.weights import WeightShape
from megatron.kernels.cuda.compile import launch_kernel
from megatron.kernels.runtime import get_arch, get_device_properties

BACKWARD_KERNELS = (logit_kernels.LOGIT_GRADIENT_KERNELS, mixer.SCORE_GRADIENT_KERNELS, mixer.WEIGHT_GRADIENT_KERNELS)


def list_backward_kernels(problem: CdapeProblem) -> tuple[KernelFamily, ...]:
    """Return the CUDA kernels of the backward pass; the one for P and dL is omitted if a map follows the softmax."""
    return BACKWARD_KERNELS if problem.head_map is None else BACKWARD_KERNELS[1:]


def choose_kernels(
    problem: CdapeProblem, chunk: Chunk, k: Tensor, families: tuple[KernelFamily, ...]
) -> tuple[MixerKernel, ...] | None:
    """Return the CUDA kernels for this chunk, or None if Triton's are faster or one of them does not support it."""
    if not (problem.uses_mixer and k.is_cuda):
        return None
    batch, _, _, dim = k.shape
    if not has_enough_blocks(chunk.rows, batch, get_device_properties(k)):
        return None
    is_local = chunk.document_starts is not None or chunk.right > problem.window
    own = problem.shape, problem.dtype, dim, chunk.right - chunk.left, is_local
    return _choose_for_shape(families, *own, get_arch(k))


@lru_cache(maxsize=256)
def _choose_for_shape(
    families: tuple[KernelFamily, ...],
    shape: WeightShape,
    dtype: torch.dtype,
    dim: int,
    columns: int,
    is_local: bool,
    arch: int | None,
) -> tuple[MixerKernel, ...] | None:
    are_supported = all(mixer.is_supported(shape, dtype, dim, columns, family.limits) for family in families)
    if arch is None or not (are_supported and mixer.has_compiler()):
        return None
    sizes = pad_sizes(shape.heads, shape.width)
    form = KernelForm(shape.kernel_size, dim, dtype, is_local, *sizes, is_linear=shape.is_linear)
    kernels = [choose_kernel(family, form, arch) for family in families]
    found = tuple(kernel for kernel in kernels if kernel is not None)
    return found if len(found) == len(kernels) else None


def choose_attention_kernel(problem: CdapeProblem, chunk: Chunk, k: Tensor) -> MixerKernel | None:
    """Return the kernel that computes a chunk's output without storing its logits, or None if there is none."""
    if problem.head_map is not None:
        return None
    kernels = choose_kernels(problem, chunk, k, (attention_kernel.ATTENTION_KERNELS,))
    return None if kernels is None else kernels[0]


def compute_attention_of_chunk(
    inputs: mixer.ChunkInputs,
    problem: CdapeProblem,
    chunk: Chunk,
    v: Tensor,
    attended: AttentionOutput,
    kernel: MixerKernel,
    offsets: Tensor | None = None,
) -> None:
    """Write a chunk's output and softmax statistics from the inputs of its logits.

    Args:
        kernel: a kernel of `attention_kernel.ATTENTION_KERNELS`.
        offsets: row terms that the logits omit, float32 [B, H, all rows], or None without sinks.
    """
    output, stats, residue = attended
    of_chunk = AttentionOutput(
        chunk.slice_rows(output),
        chunk.slice_row_sums(stats),
        None if residue is None else chunk.slice_rows(residue),
    )
    offsets = None if offsets is None else chunk.slice_row_sums(offsets)
    values = chunk.slice_columns(v)
    attention_kernel.compute_attention(inputs, values, problem.sinks, offsets, of_chunk, kernel, launch_kernel)


def compute_logits(problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor) -> Tensor | None:
    """Return the logits of a chunk, float32 [B, H, R, C], undefined if masked; None if no kernel supports the chunk."""
    kernels = choose_kernels(problem, chunk, k, (logit_kernels.LOGIT_KERNELS,))
    if kernels is None:
        return None
    return logit_kernels.compute_logits(build_logit_inputs(problem, chunk, scaled, k), kernels[0], launch_kernel)


def build_logit_inputs(
    problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor, gates: GateOperands | None = None
) -> mixer.ChunkInputs:
    """Build the inputs from which the CUDA kernels compute a chunk's logits.

    Args:
        gates: operands with a bias of gates, or None for those of the problem.
    """
    return mixer.ChunkInputs(
        queries=chunk.slice_rows(scaled),
        keys=chunk.slice_columns(k),
        operands=problem.operands,
        layer=problem.layer,
        first_row=chunk.first if chunk.document_starts is None else 0,
        position=chunk.position - chunk.left,
        spans=find_spans(problem, chunk),
        gates=gates,
    )


def find_spans(problem: CdapeProblem, chunk: Chunk) -> mixer.ColumnSpans | None:
    """Return the columns that the chunk's rows see, or None if each row sees all columns from position 0."""
    if chunk.document_starts is None and chunk.right <= problem.window:
        return None
    return mixer.ColumnSpans(problem.window, chunk.left, chunk.document_starts)


def allocate_logit_gradients(chunk: Chunk, v: Tensor) -> logit_kernels.LogitGradients:
    """Allocate P and dL of a chunk, for values [B, H, columns, d]."""
    batch, heads, _, _ = v.shape
    columns = chunk.right - chunk.left
    return logit_kernels.LogitGradients(
        v.new_empty(batch, heads, chunk.rows, columns), v.new_empty(batch, chunk.rows, HEADS // 2, columns, 2)
    )


def differentiate_softmax_of_chunk(
    inputs: mixer.ChunkInputs,
    chunk: Chunk,
    v: Tensor,
    dout: Tensor,
    attended: AttentionOutput,
    sums: Tensor,
    kernel: MixerKernel,
) -> logit_kernels.LogitGradients:
    """Compute P and dL without storing logits, and write the chunk's Σ P ∘ dP to `sums` [B, H, R]."""
    output, stats, residue = attended
    assert residue is not None
    of_chunk = logit_kernels.SoftmaxChunk(
        *(chunk.slice_columns(v), chunk.slice_rows(output), chunk.slice_rows(residue), chunk.slice_rows(dout)),
        chunk.slice_row_sums(stats),
    )
    of_rows = chunk.slice_row_sums(sums)
    return logit_kernels.differentiate_softmax(inputs, of_chunk, of_rows, kernel, launch_kernel)


def differentiate_mixer_of_chunk(
    inputs: mixer.ChunkInputs,
    dlogits: Tensor,
    kernels: Sequence[MixerKernel],
    shared: mixer.SharedTables | None = None,
    of_rows: mixer.RowGradients | None = None,
) -> tuple[Tensor, mixer.MixerGradients]:
    """Return dS of a chunk, [B, H, R, C], undefined if masked, and the chunk's gradients of tables and weights.

    Args:
        dlogits, kernels, shared, of_rows: as for `mixer.differentiate_mixer`.
    """
    batch, rows, _, columns, _ = dlogits.shape
    sizes = batch, inputs.queries.shape[1], rows, columns
    dscores = torch.empty(*sizes, dtype=dlogits.dtype, device=dlogits.device)
    return dscores, mixer.differentiate_mixer(inputs, dlogits, dscores, kernels, launch_kernel, shared, of_rows)


def differentiate_mixer_of_layer(
    problem: CdapeProblem,
    product: BiasProduct,
    chunk: Chunk,
    inputs: mixer.ChunkInputs,
    dlogits: Tensor,
    sums: TermSums,
    kernels: Sequence[MixerKernel],
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return dS of a chunk, [B, H, R, C], undefined if masked, and its partial results with their totals in `sums`."""
    assert sums.mixer is not None
    # Chunks of a call write different entries, and so may calls with documents.
    is_alike = chunk.rows == problem.rows and chunk.document_starts is None
    shared = sums.mixer.shared if is_alike else None
    dscores, (tables, edge, weights) = differentiate_mixer_of_chunk(inputs, dlogits, kernels, shared)
    pairs = [(sums.mixer.tables, tables), (sums.mixer.weights, weights)]
    return dscores, [*pairs, *pair_edges(product, chunk, edge, sums)]

"""Attention in chunks of query rows: launches the kernels of each chunk.

B batch, H heads, R query rows, C key columns, d head dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.cdape_attention import mixer_chunks
from megatron.kernels.cdape_attention.bias_product import BiasProduct
from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk, list_chunks
from megatron.kernels.cdape_attention.head_products import (
    AttentionOutput,
    allocate_key_gradients,
    allocate_output,
    average_values,
    differentiate_qkv,
    differentiate_sinks,
)
from megatron.kernels.cdape_attention.mapped_softmax import average_mapped_values, differentiate_mapped_softmax
from megatron.kernels.cdape_attention.term_sums import TermSums
from megatron.kernels.cdape_attention.triton_mixer import (
    ChunkMaps,
    compute_scores,
    differentiate_processor,
    differentiate_softmax,
    differentiate_weights,
    process_scores,
)


def compute_logits(
    problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor, scores: Tensor | None = None
) -> Tensor:
    """Return the logits of a chunk, float32 [B, H, R, C]; undefined if masked.

    Args:
        scores: result of `compute_scores`, if available.
    """
    logits = mixer_chunks.compute_logits(problem, chunk, scaled, k)
    if logits is not None:
        return logits
    return process_scores(problem, chunk, compute_scores(problem, chunk, scaled, k) if scores is None else scores)


def uses_mixer_sums(problem: CdapeProblem, k: Tensor, chunk_rows: int) -> bool:
    """Return True if the CUDA kernels compute the backward pass of some chunk."""
    families = mixer_chunks.list_backward_kernels(problem)
    return any(mixer_chunks.choose_kernels(problem, chunk, k, families) for chunk in list_chunks(problem, chunk_rows))


def forward(
    scaled: Tensor, k: Tensor, v: Tensor, problem: CdapeProblem, chunk_rows: int, *, needs_gradients: bool
) -> AttentionOutput:
    """Attend in chunks of rows.

    Args:
        scaled: scale · q; like k and v contiguous.
        needs_gradients: True if a backward pass may follow, for which a residue may be kept.
    """
    # With a map after the softmax, dO·O does not replace the sums of P ∘ dP.
    needs_residue = needs_gradients and problem.head_map is None and uses_mixer_sums(problem, k, chunk_rows)
    attended = allocate_output(scaled, needs_residue=needs_residue)
    average = average_values if problem.head_map is None else average_mapped_values

    def attend(chunk: Chunk) -> None:
        """Process a chunk. A separate function, so that its maps are freed before the next ones."""
        kernel = mixer_chunks.choose_attention_kernel(problem, chunk, k)
        if kernel is None:
            average(problem, chunk, compute_logits(problem, chunk, scaled, k), v, attended)
        else:
            inputs = mixer_chunks.build_logit_inputs(problem, chunk, scaled, k)
            mixer_chunks.compute_attention_of_chunk(inputs, problem, chunk, v, attended, kernel)

    for chunk in _list_forward_chunks(problem, k, chunk_rows, needs_gradients=needs_gradients):
        attend(chunk)
    return attended


def _list_forward_chunks(
    problem: CdapeProblem, k: Tensor, chunk_rows: int, *, needs_gradients: bool
) -> Sequence[Chunk]:
    """Return the chunks of a forward pass: without gradients, all rows at once if a kernel needs no maps.

    Activation checkpointing repeats a pass without gradients as one with gradients, in chunks, and must get the same
    bits. Each chunk must then have that kernel, too, which it may lack if it has few rows. In inference mode no pass is
    repeated.
    """
    chunks = list_chunks(problem, chunk_rows)
    if needs_gradients:
        return chunks
    whole = list_chunks(problem, problem.rows)
    computed = whole if torch.is_inference_mode_enabled() else (*whole, *chunks)
    kernels = (mixer_chunks.choose_attention_kernel(problem, chunk, k) for chunk in computed)
    return chunks if any(kernel is None for kernel in kernels) else whole


def backward(
    dout: Tensor,
    scaled: Tensor,
    k: Tensor,
    v: Tensor,
    attended: AttentionOutput,
    problem: CdapeProblem,
    product: BiasProduct,
    terms: TermSums,
    scale: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v, sinks and the head map, and add those of tables and weights to `terms`.

    The gradients of k and v have the shape and type that `allocate_key_gradients` states. The last chunk is processed
    first. It has the most columns, so the other chunks reuse its memory.

    Args:
        dout: gradient of the output. Its last dimension is contiguous; with a residue it has the output's strides. The
            other tensors are contiguous.
        attended: results of the forward pass; the output is read only if there is a residue.
        terms: sums of the layer, initially zero.
    """
    stats = attended.stats
    chunks = list_chunks(problem, chunk_rows)[::-1]
    dk, dv = allocate_key_gradients(chunks, k)
    dq = torch.empty_like(scaled)
    means = torch.empty(stats.shape[1:], dtype=torch.float32, device=v.device)  # each row's Σ P ∘ dP
    families = mixer_chunks.list_backward_kernels(problem)
    head_map = problem.head_map
    dmap = None if head_map is None else torch.zeros_like(head_map)
    contiguous_dout = dout if head_map is None else dout.contiguous()

    def differentiate_logits(chunk: Chunk, logits: Tensor, results: tuple[Tensor, Tensor]) -> None:
        """Write P, or P' with a map after the softmax, and dL."""
        if dmap is None:
            differentiate_softmax(problem, chunk, logits, v, dout, (stats, means), results)
        else:
            own = problem, chunk, logits, v, contiguous_dout, (stats, means), results
            dmap.add_(differentiate_mapped_softmax(*own))

    def compute_maps(chunk: Chunk) -> ChunkMaps:
        """Compute the maps that Triton's kernels read. A separate function, so that the logits are freed before dS."""
        scores = compute_scores(problem, chunk, scaled, k)
        logits = compute_logits(problem, chunk, scaled, k, scores)
        maps = ChunkMaps(scores, torch.empty_like(logits, dtype=problem.dtype), torch.empty_like(scores))
        differentiate_logits(chunk, logits, (maps.probabilities, maps.dlogits))
        return maps

    def differentiate_chunk(chunk: Chunk) -> None:
        """Process a chunk. A separate function, so that its maps are freed before the next ones."""
        kernels = mixer_chunks.choose_kernels(problem, chunk, k, families)
        if kernels is None:
            maps = compute_maps(chunk)
            probabilities, sums = maps.probabilities, [differentiate_weights(problem, chunk, maps, terms)]
            dscores, of_tables = differentiate_processor(problem, product, chunk, maps, terms)
            sums += of_tables
        else:
            inputs = mixer_chunks.build_logit_inputs(problem, chunk, scaled, k)
            if dmap is None:
                own = inputs, chunk, v, dout, attended, means, kernels[0]
                probabilities, dlogits = mixer_chunks.differentiate_softmax_of_chunk(*own)
            else:
                probabilities, dlogits = mixer_chunks.allocate_logit_gradients(chunk, v)
                differentiate_logits(chunk, compute_logits(problem, chunk, scaled, k), (probabilities, dlogits))
            of_layer = problem, product, chunk, inputs, dlogits, terms
            dscores, sums = mixer_chunks.differentiate_mixer_of_layer(*of_layer, kernels[-2:])
        of_chunk = problem, chunk, (dscores, probabilities), (scaled, k, dout), (dq, dk, dv)
        differentiate_qkv(*of_chunk, sums, scale, is_only=len(chunks) == 1)

    for chunk in chunks:
        differentiate_chunk(chunk)
    dsinks = None if problem.sinks is None else differentiate_sinks(problem.sinks, stats, means)
    return dq, dk, dv, dsinks, dmap

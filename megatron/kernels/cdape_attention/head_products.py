"""Softmax of a chunk's logits, and products of its maps with rows of heads: Triton kernels that CUDA kernels need, too.

B batch, H heads, R query rows of a chunk, C columns of its maps, d head dimension.

The kernels take flat arguments, unlike those of `biased_attention`. They need `do_not_specialize` to avoid recompiling
for each decoding step, and it accepts only names of arguments, not of fields of a NamedTuple.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk
from megatron.kernels.cdape_attention.configs import (
    build_attend_constants,
    build_qkv_constants,
    choose_attend_tile,
    choose_product_tile,
)
from megatron.kernels.cdape_attention.partial_sums import build_sum_arguments
from megatron.kernels.cdape_attention.products import _differentiate_qkv_kernel
from megatron.kernels.cdape_attention.softmax import _attend_fwd_kernel
from megatron.kernels.runtime import cdiv, launch


class AttentionOutput(NamedTuple):
    """Results of the forward pass, which the backward pass reads."""

    output: Tensor
    """Output, [B, H, R, d], laid out as activations [R, B, H, d]."""
    stats: Tensor
    """Maximum and sum of exponentials of the softmax, float32 [2, B, H, R]."""
    residue: Tensor | None
    """Rounding error of the output, in its type, shape and layout, or None if the backward pass does not read the
    output."""


def allocate_output(scaled: Tensor, *, needs_residue: bool) -> AttentionOutput:
    """Allocate the results for queries [B, H, R, d]."""
    batch, heads, rows, dim = scaled.shape
    stats = torch.empty(2, batch, heads, rows, dtype=torch.float32, device=scaled.device)
    strides = (heads * dim, dim, batch * heads * dim, 1)
    output = scaled.new_empty_strided((batch, heads, rows, dim), strides)
    return AttentionOutput(output, stats, torch.empty_like(output) if needs_residue else None)


def launch_softmax(
    kernel: Any, name: str, problem: CdapeProblem, chunk: Chunk, v: Tensor, tensors: tuple[Tensor | None, ...]
) -> None:
    """Launch an attend kernel, attend_fwd or attend_sums by name.

    Args:
        tensors: its first arguments: logits, values, and the output or its gradient.
    """
    batch, heads, columns, dim = v.shape
    tile = choose_attend_tile(name, chunk.rows, problem.dtype)
    launch(
        kernel,
        (cdiv(chunk.rows, tile.block_m) * batch * heads, 1, 1),
        (
            *tensors,
            chunk.document_starts,
            *chunk.extent,
            problem.window,
            problem.rows,
            columns,
            *get_head_strides(tensors[2]),
        ),
        build_attend_constants(dim, tile, heads),
        tile.options,
    )


def get_head_strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of the first three dimensions of a tensor [B, H, R, d]."""
    assert x is not None
    return x.stride()[:3]


def average_values(
    problem: CdapeProblem,
    chunk: Chunk,
    logits: Tensor,
    v: Tensor,
    attended: AttentionOutput,
) -> None:
    """Write a chunk's output and softmax statistics, from its logits [B, H, R, C]."""
    residue = None if attended.residue is None else chunk.slice_rows(attended.residue)
    outputs = (chunk.slice_rows(attended.output), residue, chunk.slice_row_sums(attended.stats))
    tensors = (logits, chunk.slice_columns(v), *outputs, problem.sinks)
    launch_softmax(_attend_fwd_kernel, "attend_fwd", problem, chunk, v, tensors)


def differentiate_sinks(sinks: Tensor, stats: Tensor, means: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return the gradient of the sinks, [H]: the sum of −P_sink · Σ P ∘ dP over all rows.

    As for any key it is P ∘ (dP − Σ P ∘ dP), with dP = 0 because a sink has no value.

    Args:
        sinks, stats, means: the sinks [H], statistics of the softmax [2, B, H, R], and Σ P ∘ dP of each row [B, H, R].
        offsets: row terms that the logits omit, [B, H, R], or None.
    """
    maximum, total = stats
    logits = sinks[:, None] if offsets is None else sinks[:, None] - offsets
    probabilities = torch.exp2(logits / math.log(2) - maximum) / total
    return -(probabilities * means).sum((0, 2))


def allocate_key_gradients(chunks: Sequence[Chunk], k: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the gradients of keys and values, to which chunks add.

    Returns:
        [B·H, C, d] each; of k's type with one chunk, otherwise float32.
    """
    batch, heads, columns, dim = k.shape
    is_whole = len(chunks) == 1 and (chunks[0].left, chunks[0].right) == (0, columns)
    if is_whole:
        dk, dv = k.new_empty(2, batch * heads, columns, dim).unbind()  # one allocation saves host time
    else:
        dtype = k.dtype if len(chunks) == 1 else torch.float32
        dk, dv = k.new_zeros(2, batch * heads, columns, dim, dtype=dtype).unbind()
    return dk, dv


def differentiate_qkv(
    problem: CdapeProblem,
    chunk: Chunk,
    maps: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    sums: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    *,
    is_only: bool,
) -> None:
    """Compute the chunk's gradients of queries, keys and values, and sum the partial results of its other kernels.

    Args:
        maps: dS and P, [B, H, R, C]; masked entries are not read.
        inputs: scaled queries [B, H, all rows, d] and keys [B, H, all columns, d], contiguous, and the output's
            gradient, [B, H, all rows, d], whose last dimension is contiguous.
        gradients: gradients to write: of queries, [B, H, all rows, d], and of keys and values, [B·H, all columns, d].
        sums: totals and partial results, as for `partial_sums.build_sum_arguments`.
        scale: factor of q·k.
        is_only: True to overwrite the totals and the gradients of the chunk's keys and values, False to add to them.
    """
    (scaled, k, dout), (dq, dk, dv) = inputs, gradients
    batch, heads, rows, dim = scaled.shape
    tile = choose_product_tile(dim, problem.dtype)
    blocks = max(cdiv(chunk.rows, tile.block_m), cdiv(chunk.right - chunk.left, tile.block_n))
    if chunk.left:
        dk, dv = dk[:, chunk.left :], dv[:, chunk.left :]
    launch(
        _differentiate_qkv_kernel,
        (2 * blocks, batch * heads, 2),
        (
            *(*maps, chunk.slice_rows(scaled), chunk.slice_columns(k), chunk.slice_rows(dout)),
            *(chunk.slice_rows(dq), dk, dv, chunk.document_starts, build_sum_arguments(sums), heads, *chunk.extent),
            *(problem.window, rows, k.shape[2], scale, *get_head_strides(dout)),
        ),
        build_qkv_constants(dim, tile, add=not is_only),
        tile.options,
    )

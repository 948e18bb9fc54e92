"""Attention with a map between the heads after the softmax, for a chunk: launches of `mapped_softmax.py`.

The chunk's logits, and all that precedes them, are those of a processor without such a map.

B batch, H heads, R query rows of a chunk, C columns of its maps, d head dimension.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk
from megatron.kernels.cdape_attention.configs import build_product_constants, choose_product_tile
from megatron.kernels.cdape_attention.head_products import AttentionOutput, get_head_strides
from megatron.kernels.cdape_attention.mapped_softmax import _differentiate_mapped_kernel, _map_weights_kernel
from megatron.kernels.cdape_attention.products import _multiply_kernel
from megatron.kernels.cdape_attention.scores import count_padded_channels
from megatron.kernels.cdape_attention.triton_mixer import compute_scores
from megatron.kernels.head_dim import pad_for_dot
from megatron.kernels.runtime import INPUT_PRECISION, Tile, cdiv, launch


@cache
def choose_mapped_tile(heads: int, dtype: torch.dtype, *, is_backward: bool) -> Tile:
    """Return the tile of a kernel. The forward kernel takes one row, the backward kernel several one after another.

    A single warp has no barriers: with four, the backward kernel has 44 of them for 128 columns.
    """
    warps = 1 if heads <= 16 and dtype != torch.float32 else 2
    return Tile(8 if is_backward else 1, 32, warps, 1)


@cache
def build_mapped_constants(heads: int, tile: Tile) -> dict[str, Any]:
    """Return the constants of the forward kernel."""
    return {
        "H": heads,
        "BLOCK_H": pad_for_dot(heads),
        "BLOCK_N": tile.block_n,
        "INPUT_PRECISION": INPUT_PRECISION,
    }


@cache
def build_mapped_gradient_constants(heads: int, tile: Tile, *, in_pairs: bool) -> dict[str, Any]:
    """Return the constants of the backward kernel.

    Args:
        heads: number of heads.
        tile: tile of the kernel.
        in_pairs: True if dL is [B, R, 8, C, 2], False if it is [B, R, C, channels].
    """
    channels = count_padded_channels(heads)
    layout = {"STORED": 16, "COLUMN_STRIDE": 2} if in_pairs else {"STORED": channels, "COLUMN_STRIDE": channels}
    return build_mapped_constants(heads, tile) | {"CHANNELS": channels, "BLOCK_M": tile.block_m, **layout}


def average_mapped_values(
    problem: CdapeProblem, chunk: Chunk, logits: Tensor, v: Tensor, attended: AttentionOutput
) -> None:
    """Write a chunk's output and softmax statistics, from its logits [B, H, R, C]."""
    batch, heads, columns, dim = v.shape
    weights = torch.empty_like(logits, dtype=problem.dtype)
    tile = choose_mapped_tile(heads, problem.dtype, is_backward=False)
    stats = chunk.slice_row_sums(attended.stats)
    launch(
        _map_weights_kernel,
        (chunk.rows, batch, 1),
        (
            *(logits, problem.head_map, weights, stats, problem.sinks, chunk.document_starts),
            *(*chunk.extent, problem.window, problem.rows),
        ),
        build_mapped_constants(heads, tile),
        tile.options,
    )
    output, tile = chunk.slice_rows(attended.output), choose_product_tile(dim, problem.dtype)
    launch(
        _multiply_kernel,
        (cdiv(chunk.rows, tile.block_m), batch * heads, 1),
        (
            *(weights, chunk.slice_columns(v), output, chunk.document_starts, heads, *chunk.extent),
            *(problem.window, columns, *get_head_strides(output)),
        ),
        build_product_constants(dim, tile),
        tile.options,
    )


def differentiate_mapped_softmax(
    problem: CdapeProblem,
    chunk: Chunk,
    logits: Tensor,
    values: Tensor,
    dout: Tensor,
    of_rows: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
) -> Tensor:
    """Compute P' and dL of a chunk, and return the gradient of the map, float32 [H, H].

    Args:
        problem, chunk: the call and its chunk.
        logits: float32 [B, H, R, C].
        values: [B, H, all columns, d], contiguous.
        dout: gradient of the output, [B, H, all rows, d], contiguous.
        of_rows: statistics of the softmax [2, B, H, all rows], and where each row's Σ P ∘ dP is written, [B, H, all
            rows].
        results: where P' is written, [B, H, R, C]; and dL, [B, R, C, channels] or [B, R, 8, C, 2].
    """
    (stats, sums), (weights, dlogits) = of_rows, results
    batch, heads = values.shape[:2]
    dweights = compute_scores(problem, chunk, dout, values)
    in_pairs = dlogits.dim() == 5
    tile = choose_mapped_tile(heads, problem.dtype, is_backward=True)
    blocks, padded = cdiv(chunk.rows, tile.block_m), pad_for_dot(heads)
    partial = torch.empty(blocks * batch, padded, padded, dtype=torch.float32, device=logits.device)
    launch(
        _differentiate_mapped_kernel,
        (blocks, batch, 1),
        (
            *(logits, dweights, problem.head_map, chunk.slice_row_sums(stats), chunk.slice_row_sums(sums)),
            *(weights, dlogits, partial, chunk.document_starts, *chunk.extent, problem.window, problem.rows),
            dlogits.stride(2) if in_pairs else 2,
        ),
        build_mapped_gradient_constants(heads, tile, in_pairs=in_pairs),
        tile.options,
    )
    return partial.sum(0)[:heads, :heads]

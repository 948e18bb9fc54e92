"""Score processor of a chunk by Triton kernels, for shapes and GPUs that the CUDA kernels do not support.

B batch, H heads, R query rows of a chunk, C columns of its maps, D processor width, k kernel size, p = k//2.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.cdape_attention.backward import _processor_bwd_dw_kernel, _processor_bwd_kernel
from megatron.kernels.cdape_attention.bias_product import BiasProduct
from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk
from megatron.kernels.cdape_attention.configs import build_heads_constants, choose_heads_tile, choose_splits
from megatron.kernels.cdape_attention.forward import _processor_fwd_kernel
from megatron.kernels.cdape_attention.head_products import get_head_strides, launch_softmax
from megatron.kernels.cdape_attention.scores import _scores_kernel, count_padded_channels
from megatron.kernels.cdape_attention.softmax import _attend_bwd_kernel, _attend_sums_kernel
from megatron.kernels.cdape_attention.term_sums import TermSums, pair_edges
from megatron.kernels.runtime import Tile, cdiv, launch

ALIGNED = 16
"""If a map's columns are a multiple of this, kernels read four logits and store eight heads at a time."""


class ChunkMaps(NamedTuple):
    """Maps of one chunk that the kernels for dS, the weights and the products read.

    Maps for the processor have their heads last, [B, R, C, channels] (`scores.py`). Maps for matrix products and the
    softmax have them first, [B, H, R, C]: P, the logits, which are freed before dS is allocated, and dS. Kernels
    discard all entries in masked columns.
    """

    scores: Tensor
    """S = scale · q·k, compute type, heads last."""
    probabilities: Tensor
    """P, compute type; undefined if masked."""
    dlogits: Tensor
    """dL, compute type, heads last; undefined if masked."""


def compute_scores(problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor) -> Tensor:
    """Return S of a chunk, heads last, in the compute type; fully masked tiles are undefined."""
    batch, heads, columns, dim = k.shape
    tile = choose_heads_tile(chunk.rows, problem.dtype)
    width = chunk.right - chunk.left
    scores = torch.empty(batch, chunk.rows, width, count_padded_channels(heads), dtype=k.dtype, device=k.device)
    tensors = (chunk.slice_rows(scaled), chunk.slice_columns(k), scores)
    launch(
        _scores_kernel,
        compute_head_tile_grid(chunk, tile, batch),
        (*tensors, chunk.document_starts, *chunk.extent, problem.window, problem.rows, columns),
        build_heads_constants(heads, dim, tile, problem.dtype, True),
        tile.options,
    )
    return scores


def compute_head_tile_grid(chunk: Chunk, tile: Tile, batch: int) -> tuple[int, int, int]:
    """Return the grid of a kernel whose programs process a tile of all heads."""
    return cdiv(chunk.right - chunk.left, tile.block_n), cdiv(chunk.rows, tile.block_m), batch


def process_scores(problem: CdapeProblem, chunk: Chunk, scores: Tensor) -> Tensor:
    """Return the logits of a chunk, float32 [B, H, R, C], undefined if masked, from its scores."""
    batch, rows, columns, _ = scores.shape
    logits = torch.empty(batch, problem.heads, rows, columns, dtype=torch.float32, device=scores.device)
    tile = problem.tile("mix_fwd", chunk.rows)
    kept_distances = tile.block_n - 2 * problem.padding
    reach = min(chunk.right, problem.window)
    weights = problem.weights
    tensors = (scores, logits, problem.bias_contributions, problem.bias_table, weights.w1, weights.w2, weights.b2)
    launch(
        _processor_fwd_kernel,
        (cdiv(reach, kept_distances), cdiv(chunk.rows, tile.block_m), batch),
        (*tensors, chunk.document_starts, *chunk.processor_extent, problem.bias_table.shape[1], problem.window),
        problem.constants("mix_fwd", tile),
        tile.options,
    )
    return logits


def differentiate_softmax(
    problem: CdapeProblem,
    chunk: Chunk,
    logits: Tensor,
    v: Tensor,
    dout: Tensor,
    of_rows: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
) -> None:
    """Compute P and dL of a chunk.

    Args:
        problem, chunk: the call and its chunk.
        logits: float32 [B, H, R, C].
        v: [B, H, all columns, d], contiguous.
        dout: gradient of the output, [B, H, all rows, d]; the last dimension is contiguous.
        of_rows: statistics of the softmax [2, B, H, all rows], and where each row's Σ P ∘ dP is written, [B, H, all
            rows].
        results: where P and dL are written, as in `ChunkMaps`.
    """
    batch, heads, columns, dim = v.shape
    inputs = (logits, chunk.slice_columns(v), chunk.slice_rows(dout), *map(chunk.slice_row_sums, of_rows))
    launch_softmax(_attend_sums_kernel, "attend_sums", problem, chunk, v, inputs)
    aligned = (chunk.right - chunk.left) % ALIGNED == 0
    tile = choose_heads_tile(chunk.rows, problem.dtype)
    launch(
        _attend_bwd_kernel,
        compute_head_tile_grid(chunk, tile, batch),
        (
            *(*inputs, *results, chunk.document_starts),
            *(*chunk.extent, problem.window, problem.rows, columns, *get_head_strides(dout)),
        ),
        build_heads_constants(heads, dim, tile, problem.dtype, aligned),
        tile.options,
    )


def differentiate_processor(
    problem: CdapeProblem,
    product: BiasProduct,
    chunk: Chunk,
    maps: ChunkMaps,
    sums: TermSums,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return dS of a chunk, [B, H, R, C], undefined if masked, and the partial results of tables with their totals."""
    padding, batch, has_bias = problem.padding, maps.scores.shape[0], problem.has_bias
    tile = problem.tile("mix_bwd", chunk.rows)
    kept_distances = tile.block_n - 2 * padding
    reach = min(chunk.right, problem.window + padding)  # hidden values just beyond the window affect columns in it
    blocks, row_blocks = cdiv(reach, kept_distances), cdiv(chunk.rows, tile.block_m)
    parts = choose_splits(blocks, batch, row_blocks)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": maps.scores.device}
    width = problem.shape.width
    dbias_contributions = torch.empty(batch * parts, blocks * kept_distances + padding, width, **float32)
    dbias = torch.empty(batch * parts, blocks * kept_distances if has_bias else 0, problem.heads, **float32)
    dedge = torch.zeros(batch, chunk.rows, padding, width, **float32)
    dscores = torch.empty_like(maps.probabilities)
    inputs = (maps.scores, maps.dlogits, problem.bias_contributions, problem.weights.w1, problem.weights.w2)
    outputs = (dscores, dbias_contributions, dbias, dedge)
    launch(
        _processor_bwd_kernel,
        (batch, parts, blocks),  # small distances have the most rows: longest programs first
        (*inputs, *outputs, chunk.document_starts, *chunk.processor_extent, problem.window, cdiv(row_blocks, parts)),
        problem.constants("mix_bwd", tile),
        tile.options,
    )
    pairs = [(sums.bias_product[: padding + product.count], dbias_contributions)]
    if has_bias:
        pairs.append((sums.bias_table, dbias))
    return dscores, [*pairs, *pair_edges(product, chunk, dedge, sums)]


def differentiate_weights(
    problem: CdapeProblem, chunk: Chunk, maps: ChunkMaps, sums: TermSums
) -> tuple[Tensor, Tensor]:
    """Return the totals of the weights' gradients in `sums`, and the chunk's partial results."""
    padding, batch = problem.padding, maps.scores.shape[0]
    tile = problem.tile("mix_bwd_dw", chunk.rows)
    reach = min(chunk.right, problem.window + padding) + padding  # from −p on
    blocks, row_blocks = cdiv(reach, tile.block_n), cdiv(chunk.rows, tile.block_m)
    parts = choose_splits(blocks, batch, row_blocks)
    patches = sums.patches
    partial = patches.new_empty(batch * parts * blocks, 1, patches.numel())
    weights = problem.weights
    tensors = (maps.scores, maps.dlogits, problem.bias_contributions, weights.patches1, weights.patches2, partial)
    launch(
        _processor_bwd_dw_kernel,
        (batch, parts, blocks),  # small distances have the most rows: longest programs first
        (*tensors, chunk.document_starts, *chunk.processor_extent, problem.window, cdiv(row_blocks, parts)),
        problem.constants("mix_bwd_dw", tile),
        tile.options,
    )
    return patches.view(1, -1), partial

"""Attention in chunks of query rows: processor and softmax by kernels, matrix products by these or by PyTorch.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, D processor width, k kernel size,
p = k//2. A chunk's maps hold the columns that one of its rows sees, and nothing of a chunk outlives it, so memory is
linear in R and C.

The kernels take their arguments flat, unlike those of `biased_attention`: `do_not_specialize`, without which each step
of decoding could compile anew, names arguments and cannot name fields of a NamedTuple.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.cdape_attention.backward import _processor_bwd_dw_kernel, _processor_bwd_kernel
from kernels.cdape_attention.configs import (
    attend_constants,
    attend_tile,
    choose_splits,
    heads_constants,
    heads_tile,
    processor_constants,
    processor_tile,
)
from kernels.cdape_attention.forward import _processor_fwd_kernel
from kernels.cdape_attention.scores import _scores_kernel, padded_channels
from kernels.cdape_attention.softmax import _attend_bwd_kernel, _attend_fwd_kernel, _attend_sums_kernel
from kernels.head_dim import pad_for_dot
from kernels.runtime import Tile

NO_WINDOW_INT32 = 1 << 30
"""The window where there is none. Kernels take it in 32 bits, with room for sums with positions."""
ALIGNED = 16
"""Maps begin at a multiple of this many columns: where they end at one too, kernels read four logits at a time."""


@dataclass(frozen=True)
class CdapeProblem:
    """What stays the same over all chunks."""

    bias_contributions: Tensor
    """float32 [p + N + R·p, D], from `bias_term.compute_bias_contributions`."""
    bias_table: Tensor
    """float32 [H, N], added to the logits; [H, 0] where there is none."""
    w1: Tensor
    """Score half of Conv1 [D, H, k]."""
    w2: Tensor
    """Conv2 [H, D, k]."""
    b2: Tensor
    rows: int
    offset: int
    window: int
    dtype: torch.dtype

    @property
    def heads(self) -> int:
        return self.w1.shape[1]

    @property
    def width(self) -> int:
        return self.w1.shape[0]

    @property
    def kernel_size(self) -> int:
        return self.w1.shape[2]

    @property
    def padding(self) -> int:
        """p: how many columns a tap reaches to either side."""
        return self.kernel_size // 2

    @property
    def has_bias(self) -> bool:
        return self.bias_table.shape[1] > 0

    def tile(self, kernel: str, rows: int) -> Tile:
        """Of a processor kernel, for a chunk of so many rows."""
        return processor_tile(kernel, self.heads, self.width, self.kernel_size, rows, self.dtype)

    def constants(self, kernel: str, tile: Tile) -> dict[str, Any]:
        """Of a processor kernel."""
        return processor_constants(
            kernel, self.heads, self.width, self.kernel_size, self.dtype, tile, has_bias=self.has_bias
        )

    # Packed once for all chunks.

    @cached_property
    def packed_w1(self) -> Tensor:
        """[k, HP, DP]."""
        packed = self.w1.new_zeros(self.kernel_size, pad_for_dot(self.heads), pad_for_dot(self.width), dtype=self.dtype)
        packed[:, : self.heads, : self.width] = self.w1.permute(2, 1, 0)
        return packed

    @cached_property
    def packed_w2(self) -> Tensor:
        """[k, DP, HP]."""
        packed = self.w2.new_zeros(self.kernel_size, pad_for_dot(self.width), pad_for_dot(self.heads), dtype=self.dtype)
        packed[:, : self.width, : self.heads] = self.w2.permute(2, 1, 0)
        return packed

    @cached_property
    def packed_b2(self) -> Tensor:
        """[HP]."""
        packed = self.b2.new_zeros(pad_for_dot(self.heads), dtype=torch.float32)
        packed[: self.heads] = self.b2
        return packed

    @cached_property
    def patch_weights(self) -> tuple[Tensor, Tensor]:
        """Both weights as [KC, DP], row t·channels + h, the taps of the second mirrored: it is read backwards."""
        return self._of_patches(self.w1), self._of_patches(self.w2.transpose(0, 1).flip(2))

    def _of_patches(self, weight: Tensor) -> Tensor:
        """A weight [D, H, k]."""
        count = padded_channels(self.heads)
        packed = weight.new_zeros(pad_for_dot(self.kernel_size * count), pad_for_dot(self.width), dtype=self.dtype)
        by_tap = packed[: self.kernel_size * count].view(self.kernel_size, count, -1)
        by_tap[:, : self.heads, : self.width] = weight.permute(2, 1, 0)
        return packed

    def from_patches(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients [D, H, k] of both weights out of [2, KC, DP]."""
        count = padded_channels(self.heads)
        by_tap = sums[:, : self.kernel_size * count].unflatten(1, (self.kernel_size, count))
        first, second = by_tap[:, :, : self.heads, : self.width].permute(0, 3, 2, 1)
        return first, second.flip(2)


@dataclass(frozen=True)
class Chunk:
    """Rows first … last − 1 of the queries and the columns that one of them sees."""

    first: int
    last: int
    left: int
    right: int
    position: int
    """Of the first row."""

    @property
    def rows(self) -> int:
        return self.last - self.first

    def slice_rows(self, x: Tensor) -> Tensor:
        return x[:, :, self.first : self.last]

    def slice_columns(self, x: Tensor) -> Tensor:
        return x[:, :, self.left : self.right]

    def extent(self, problem: CdapeProblem) -> dict[str, int]:
        """Runtime arguments that say what a row sees, the same for all kernels."""
        return {
            "R": self.rows,
            "C": self.right - self.left,
            "first_row": self.position,
            "first_column": self.left,
            "window": problem.window,
        }

    def processor_extent(self, problem: CdapeProblem) -> dict[str, int]:
        """Runtime arguments that all processor kernels share."""
        edge = {"edge_start": problem.offset + problem.rows + problem.padding, "edge_row": self.first}
        return self.extent(problem) | edge


def iter_chunks(problem: CdapeProblem, chunk_rows: int) -> Iterator[Chunk]:
    for first in range(0, problem.rows, chunk_rows):
        last = min(first + chunk_rows, problem.rows)
        position = problem.offset + first
        left = max(position - problem.window + 1, 0) // ALIGNED * ALIGNED
        yield Chunk(first, last, left, problem.offset + last, position)


@dataclass(frozen=True)
class ChunkMaps:
    """The maps of one chunk: its workspace. What the processor reads has its heads last, [B, R, C, channels]
    (`scores.py`); what matrix products and the softmax read has them first, [B, H, R, C].

    The forward pass uses scores and logits. The backward pass fills, in this order: `scores`; `logits`; with one kernel
    `probabilities`, whole, and `dlogits`; then over the probabilities `dscores`. The kernels write gradients where a
    row sees a column. Elsewhere `dscores` must be zero, for it is multiplied with whole matrices: the probabilities
    beneath it are.
    """

    scores: Tensor
    """S = scale · q·k, compute type, heads last."""
    logits: Tensor
    """L, float32; undefined where a row does not see the column."""
    probabilities: Tensor
    """P, compute type; zero where a row does not see the column."""
    dlogits: Tensor
    """dL, compute type, heads last; undefined where a row does not see the column."""

    @property
    def dscores(self) -> Tensor:
        """dS, in the place of `probabilities`."""
        return self.probabilities


def compute_scores(problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor) -> Tensor:
    """S of a chunk, heads last, in the compute type; what a row does not see is left as it was."""
    batch, heads, columns, dim = k.shape
    tile = heads_tile(chunk.rows, dim, problem.dtype)
    width = chunk.right - chunk.left
    scores = torch.empty(batch, chunk.rows, width, padded_channels(heads), dtype=k.dtype, device=k.device)
    _scores_kernel[head_tile_grid(chunk, tile, batch)](
        *(chunk.slice_rows(scaled), chunk.slice_columns(k), scores),
        **chunk.extent(problem),
        R_total=problem.rows,
        C_total=columns,
        **heads_constants(heads, dim, tile),
        **tile.options,
    )
    return scores


def head_tile_grid(chunk: Chunk, tile: Tile, batch: int) -> tuple[int, int, int]:
    """The grid of a kernel whose programs take a tile of all heads."""
    return triton.cdiv(chunk.right - chunk.left, tile.block_n), triton.cdiv(chunk.rows, tile.block_m), batch


def compute_logits(problem: CdapeProblem, chunk: Chunk, scores: Tensor) -> Tensor:
    """Logits of a chunk, float32 [B, H, R, C]; what a row does not see is left as it was."""
    batch, rows, columns, _ = scores.shape
    logits = torch.empty(batch, problem.heads, rows, columns, dtype=torch.float32, device=scores.device)
    tile = problem.tile("mix_fwd", chunk.rows)
    kept_distances = tile.block_n - 2 * problem.padding
    reach = min(chunk.right, problem.window)
    _processor_fwd_kernel[(triton.cdiv(reach, kept_distances), triton.cdiv(chunk.rows, tile.block_m), scores.shape[0])](
        *(scores, logits, problem.bias_contributions, problem.bias_table),
        *(problem.packed_w1, problem.packed_w2, problem.packed_b2),
        bias_count=problem.bias_table.shape[1],
        **chunk.processor_extent(problem),
        **problem.constants("mix_fwd", tile),
        **tile.options,
    )
    return logits


def softmax_launch(kernel: str, problem: CdapeProblem, chunk: Chunk, v: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Grid, and arguments that the attend kernels share."""
    batch, heads, columns, dim = v.shape
    tile = attend_tile(kernel, chunk.rows, problem.dtype)
    options = {
        **chunk.extent(problem),
        "R_total": problem.rows,
        "C_total": columns,
        **attend_constants(dim, tile),
        **tile.options,
    }
    return (triton.cdiv(chunk.rows, tile.block_m) * batch * heads,), options


def forward(
    q: Tensor, k: Tensor, v: Tensor, problem: CdapeProblem, scale: float, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Output [B, H, R, d], and the softmax's maximum and sum of exponentials, float32 [2, B, H, R]."""
    batch, heads, rows = q.shape[:3]
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    stats = torch.empty(2, batch, heads, rows, dtype=torch.float32, device=q.device)
    scaled = q * scale
    for chunk in iter_chunks(problem, chunk_rows):
        logits = compute_logits(problem, chunk, compute_scores(problem, chunk, scaled, k))
        grid, options = softmax_launch("attend_fwd", problem, chunk, v)
        _attend_fwd_kernel[grid](
            logits, chunk.slice_columns(v), chunk.slice_rows(output), stats[..., chunk.first :], **options
        )
    return output, stats


@dataclass(frozen=True)
class GradientSums:
    """Gradients that chunks add to, float32."""

    k: Tensor
    v: Tensor
    bias_contributions: Tensor
    bias_table: Tensor
    w1: Tensor
    w2: Tensor
    """[D, H, k], as `w1`."""


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, problem: CdapeProblem, scale: float, chunk_rows: int
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, bias_contributions, bias_table, w1 and w2; the sums over chunks are float32."""
    shapes = (k, v, problem.bias_contributions, problem.bias_table, problem.w1, problem.w1)
    sums = GradientSums(*(torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in shapes))
    scaled, dq = q * scale, torch.empty_like(q)
    for chunk in iter_chunks(problem, chunk_rows):
        maps = _compute_maps(problem, chunk, scaled, k)
        softmax_backward(problem, chunk, maps, v, dout, stats)
        chunk.slice_columns(sums.v).add_(torch.matmul(maps.probabilities.transpose(-1, -2), chunk.slice_rows(dout)))
        _weights_backward(problem, chunk, maps, sums)
        _processor_backward(problem, chunk, maps, sums)  # dS over P
        chunk.slice_rows(dq).copy_(torch.matmul(maps.dscores, chunk.slice_columns(k)).mul_(scale))
        chunk.slice_columns(sums.k).add_(torch.matmul(maps.dscores.transpose(-1, -2), chunk.slice_rows(scaled)))
    return (
        dq,
        sums.k.to(k.dtype),
        sums.v.to(v.dtype),
        sums.bias_contributions,
        sums.bias_table,
        sums.w1,
        sums.w2.transpose(0, 1),
    )


def _compute_maps(problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor) -> ChunkMaps:
    """Scores and logits, and room for the rest."""
    scores = compute_scores(problem, chunk, scaled, k)
    logits = compute_logits(problem, chunk, scores)
    return ChunkMaps(scores, logits, torch.empty_like(logits, dtype=problem.dtype), torch.empty_like(scores))


def softmax_backward(
    problem: CdapeProblem, chunk: Chunk, maps: ChunkMaps, v: Tensor, dout: Tensor, stats: Tensor
) -> None:
    """P and dL."""
    batch, heads, columns, dim = v.shape
    sums = torch.empty(stats.shape[1:], dtype=torch.float32, device=v.device)
    inputs = (
        maps.logits,
        chunk.slice_columns(v),
        chunk.slice_rows(dout),
        stats[..., chunk.first :],
        sums[..., chunk.first :],
    )
    grid, options = softmax_launch("attend_sums", problem, chunk, v)
    _attend_sums_kernel[grid](*inputs, **options)
    tile = heads_tile(chunk.rows, dim, problem.dtype)
    _attend_bwd_kernel[head_tile_grid(chunk, tile, batch)](
        *(*inputs, maps.probabilities, maps.dlogits),
        **chunk.extent(problem),
        R_total=problem.rows,
        C_total=columns,
        **heads_constants(heads, dim, tile),
        **tile.options,
    )


def _processor_backward(problem: CdapeProblem, chunk: Chunk, maps: ChunkMaps, sums: GradientSums) -> None:
    """dS over P, where a row sees the column; adds the chunk's part to the gradients of the tables."""
    padding, batch, has_bias = problem.padding, maps.scores.shape[0], problem.has_bias
    tile = problem.tile("mix_bwd", chunk.rows)
    kept_distances = tile.block_n - 2 * padding
    reach = min(chunk.right, problem.window + padding)  # hidden values just beyond the window reach into it
    blocks, row_blocks = triton.cdiv(reach, kept_distances), triton.cdiv(chunk.rows, tile.block_m)
    parts = choose_splits(blocks, batch, row_blocks)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": maps.scores.device}
    dbias_contributions = torch.empty(batch * parts, blocks * kept_distances + padding, problem.width, **float32)
    dbias = torch.empty(batch * parts, blocks * kept_distances if has_bias else 0, problem.heads, **float32)
    dedge = torch.zeros(batch, chunk.rows, padding, problem.width, **float32)
    extent = chunk.processor_extent(problem)
    _processor_bwd_kernel[(blocks, parts, batch)](
        *(maps.scores, maps.dlogits, problem.bias_contributions, problem.packed_w1, problem.packed_w2),
        *(maps.dscores, dbias_contributions, dbias, dedge),
        split_blocks=triton.cdiv(row_blocks, parts),
        **extent,
        **problem.constants("mix_bwd", tile),
        **tile.options,
    )
    edge_start = extent["edge_start"]
    covered = min(blocks * kept_distances + padding, edge_start)
    sums.bias_contributions[:covered] += dbias_contributions.sum(0)[:covered]
    at_edge = sums.bias_contributions[edge_start:].view(problem.rows, padding, problem.width)
    at_edge[chunk.first : chunk.last] += dedge.sum(0)
    if has_bias:
        covered = min(blocks * kept_distances, problem.bias_table.shape[1])
        sums.bias_table[:, :covered] += dbias.sum(0)[:covered].T


def _weights_backward(problem: CdapeProblem, chunk: Chunk, maps: ChunkMaps, sums: GradientSums) -> None:
    """Adds the chunk's part to the gradients of the weights."""
    padding, batch = problem.padding, maps.scores.shape[0]
    tile = problem.tile("mix_bwd_dw", chunk.rows)
    reach = min(chunk.right, problem.window + padding) + padding  # from −p on
    blocks, row_blocks = triton.cdiv(reach, tile.block_n), triton.cdiv(chunk.rows, tile.block_m)
    parts = choose_splits(blocks, batch, row_blocks)
    w1, w2 = problem.patch_weights
    partial = torch.empty(batch * parts * blocks, 2, *w1.shape, dtype=torch.float32, device=maps.scores.device)
    _processor_bwd_dw_kernel[(blocks, parts, batch)](
        *(maps.scores, maps.dlogits, problem.bias_contributions, w1, w2, partial),
        split_blocks=triton.cdiv(row_blocks, parts),
        **chunk.processor_extent(problem),
        **problem.constants("mix_bwd_dw", tile),
        **tile.options,
    )
    first, second = problem.from_patches(partial.sum(0))
    sums.w1.add_(first)
    sums.w2.add_(second)

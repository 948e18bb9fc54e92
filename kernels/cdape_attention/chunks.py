"""Attention in chunks of query rows: mixer and softmax by kernels, matrix products by these or by PyTorch.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, D processor width, k kernel size,
p = k//2. A chunk's maps hold the columns that one of its rows sees, and nothing of a chunk outlives it, so memory is
linear in R and C.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.cdape_attention.attend import attend, attend_backward
from kernels.cdape_attention.backward import mix_backward, weight_backward
from kernels.cdape_attention.configs import Blocks, Tiles, attend_blocks, splits, tiles
from kernels.cdape_attention.forward import mix
from kernels.rows import padded, split_head_dim

UNBOUNDED = 1 << 30
"""The window where there is none."""
PRECISION = "ieee"
"""Of matrix products of float32, exact to the type; half types are not affected."""
ALIGNED = 16
"""Maps begin at a multiple of this many columns: where they end at one too, kernels read four logits at a time."""
FUSION = True
"""Multiply and add in one rounding, said explicitly: Triton's default depends on its version."""


@dataclass(frozen=True)
class Problem:
    """What stays the same over all chunks."""

    shares: Tensor
    bias: Tensor
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
    def size(self) -> int:
        return self.w1.shape[2]

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of every kernel."""
        return {
            "H": self.heads,
            "D": self.width,
            "K": self.size,
            "DP": padded(self.width),
            "SATURATE": self.dtype == torch.float16,
            "PRECISION": PRECISION,
            "enable_fp_fusion": FUSION,
        }

    def packed_w1(self) -> Tensor:
        """[k, HP, DP]."""
        packed = self.w1.new_zeros(self.size, padded(self.heads), padded(self.width), dtype=self.dtype)
        packed[:, : self.heads, : self.width] = self.w1.permute(2, 1, 0)
        return packed

    def packed_w2(self) -> Tensor:
        """[k, DP, HP]."""
        packed = self.w2.new_zeros(self.size, padded(self.width), padded(self.heads), dtype=self.dtype)
        packed[:, : self.width, : self.heads] = self.w2.permute(2, 1, 0)
        return packed

    def packed_b2(self) -> Tensor:
        """[HP]."""
        packed = self.b2.new_zeros(padded(self.heads), dtype=torch.float32)
        packed[: self.heads] = self.b2
        return packed

    def taps_and_heads(self, weight: Tensor) -> Tensor:
        """A weight [D, H, k] as [KC, DP], row t·H + h."""
        flat = weight.permute(2, 1, 0).flatten(0, 1)
        packed = flat.new_zeros(padded(flat.shape[0]), padded(self.width), dtype=self.dtype)
        packed[: flat.shape[0], : self.width] = flat
        return packed


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

    def of_rows(self, x: Tensor) -> Tensor:
        return x[:, :, self.first : self.last]

    def of_columns(self, x: Tensor) -> Tensor:
        return x[:, :, self.left : self.right]

    def extent(self, problem: Problem) -> dict[str, int]:
        """Runtime arguments that say what a row sees, the same for all kernels."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.right - self.left,
            "first_row": self.position,
            "first_column": self.left,
            "window": problem.window,
        }

    def launch(self, problem: Problem) -> dict[str, int]:
        """Runtime arguments that all mixer kernels share."""
        shares = {"share_count": problem.offset + problem.rows + problem.size // 2, "edge_row": self.first}
        return self.extent(problem) | shares


def chunks(problem: Problem, size: int) -> Iterator[Chunk]:
    for first in range(0, problem.rows, size):
        last = min(first + size, problem.rows)
        position = problem.offset + first
        left = max(position - problem.window + 1, 0) // ALIGNED * ALIGNED
        yield Chunk(first, last, left, problem.offset + last, position)


def chunk_logits(problem: Problem, chunk: Chunk, scores: Tensor) -> Tensor:
    """Logits of a chunk, float32 [B, H, R, C]; what a row does not see is left as it was."""
    logits = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    tile = tiles("forward", problem.heads, problem.width, problem.size, chunk.rows, problem.dtype)
    kept = tile.distances - 2 * (problem.size // 2)
    reach = min(chunk.right, problem.window)
    mix[(triton.cdiv(reach, kept), triton.cdiv(chunk.rows, tile.rows), scores.shape[0])](
        scores,
        logits,
        problem.shares,
        problem.bias,
        problem.packed_w1(),
        problem.packed_w2(),
        problem.packed_b2(),
        bias_count=problem.bias.shape[1],
        HP=padded(problem.heads),
        HAS_BIAS=problem.bias.shape[1] > 0,
        **chunk.launch(problem),
        **problem.constants,
        **_launch(tile),
    )
    return logits


def attend_constants(dim: int, block: Blocks) -> dict[str, Any]:
    """Constants of `attend` and `attend_backward`, as they are launched and as they are compiled for the record."""
    first, second = split_head_dim(dim)
    return {"DIM": dim, "DA": first, "DB": second, "BM": block.rows, "BN": block.columns, "PRECISION": PRECISION}


def attend_launch(kernel: str, problem: Problem, chunk: Chunk, v: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and arguments that `attend` and `attend_backward` share."""
    batch, heads, columns, dim = v.shape
    block = attend_blocks(kernel, chunk.rows, problem.dtype)
    options = {
        **chunk.extent(problem),
        "all_rows": problem.rows,
        "all_columns": columns,
        **attend_constants(dim, block),
        "num_warps": block.warps,
        "num_stages": block.stages,
        "enable_fp_fusion": FUSION,
    }
    return (triton.cdiv(chunk.rows, block.rows) * batch * heads,), options


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """Output [B, H, R, d], and the softmax's maximum and sum of exponentials, float32 [2, B, H, R]."""
    batch, heads, rows = q.shape[:3]
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    statistics = torch.empty(2, batch, heads, rows, dtype=torch.float32, device=q.device)
    scaled = q * scale
    for chunk in chunks(problem, size):
        scores = torch.matmul(chunk.of_rows(scaled), chunk.of_columns(k).transpose(-1, -2))
        logits = chunk_logits(problem, chunk, scores)
        grid, options = attend_launch("attend", problem, chunk, v)
        attend[grid](logits, chunk.of_columns(v), chunk.of_rows(output), statistics[..., chunk.first :], **options)
    return output, statistics


def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Tensor,
    problem: Problem,
    scale: float,
    size: int,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, shares, bias, w1 and w2; the sums over chunks are float32."""
    float32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    scaled = q * scale
    q_gradient = torch.empty_like(q)
    k_sum, v_sum = torch.zeros(k.shape, **float32), torch.zeros(v.shape, **float32)
    share_sum = torch.zeros(problem.shares.shape, **float32)
    bias_sum = torch.zeros(problem.bias.shape, **float32)
    w1_sum, w2_sum = torch.zeros(problem.w1.shape, **float32), torch.zeros(problem.w1.shape, **float32)
    for chunk in chunks(problem, size):
        scores = torch.matmul(chunk.of_rows(scaled), chunk.of_columns(k).transpose(-1, -2))
        logits = chunk_logits(problem, chunk, scores)
        probabilities = torch.empty_like(scores)
        into_output = chunk.of_rows(gradient)
        grid, options = attend_launch("attend_backward", problem, chunk, v)
        attend_backward[grid](
            logits, probabilities, chunk.of_columns(v), into_output, statistics[..., chunk.first :], **options
        )
        chunk.of_columns(v_sum).add_(torch.matmul(probabilities.transpose(-1, -2), into_output))
        _add_weights(problem, chunk, scores, logits, w1_sum, w2_sum)
        into_scores = probabilities  # their place: they are not needed any more
        _mixer_backward(problem, chunk, scores, logits, into_scores, share_sum, bias_sum)
        chunk.of_rows(q_gradient).copy_(torch.matmul(into_scores, chunk.of_columns(k)).mul_(scale))
        chunk.of_columns(k_sum).add_(torch.matmul(into_scores.transpose(-1, -2), chunk.of_rows(scaled)))
    return q_gradient, k_sum.to(k.dtype), v_sum.to(v.dtype), share_sum, bias_sum, w1_sum, w2_sum.transpose(0, 1)


def _mixer_backward(
    problem: Problem,
    chunk: Chunk,
    scores: Tensor,
    logits_gradient: Tensor,
    score_gradient: Tensor,
    share_sum: Tensor,
    bias_sum: Tensor,
) -> None:
    """Writes the gradient of the scores where a row sees the column, and adds the chunk's part to those of the tables.

    `score_gradient` must hold zeros elsewhere; the probabilities, whose memory it takes, do.
    """
    padding, batch = problem.size // 2, scores.shape[0]
    tile = tiles("backward", problem.heads, problem.width, problem.size, chunk.rows, problem.dtype)
    kept = tile.distances - 2 * padding
    reach = min(chunk.right, problem.window + padding)  # hidden values just beyond the window reach into it
    blocks, row_blocks = triton.cdiv(reach, kept), triton.cdiv(chunk.rows, tile.rows)
    parts = splits(blocks, batch, row_blocks)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": scores.device}
    share_partial = torch.empty(batch * parts, blocks * kept + padding, problem.width, **float32)
    has_bias = problem.bias.shape[1] > 0
    bias_partial = torch.empty(batch * parts, blocks * kept if has_bias else 0, problem.heads, **float32)
    edge = torch.zeros(batch, chunk.rows, padding, problem.width, **float32)
    launch = chunk.launch(problem)
    mix_backward[(blocks, parts, batch)](
        scores,
        logits_gradient,
        problem.shares,
        problem.packed_w1(),
        problem.packed_w2(),
        score_gradient,
        share_partial,
        bias_partial,
        edge,
        split_blocks=triton.cdiv(row_blocks, parts),
        HP=padded(problem.heads),
        HAS_BIAS=has_bias,
        **launch,
        **problem.constants,
        **_launch(tile),
    )
    count = launch["share_count"]
    covered = min(blocks * kept + padding, count)
    share_sum[:covered] += share_partial.sum(0)[:covered]
    at_edge = share_sum[count:].view(problem.rows, padding, problem.width)
    at_edge[chunk.first : chunk.last] += edge.sum(0)
    if has_bias:
        covered = min(blocks * kept, problem.bias.shape[1])
        bias_sum[:, :covered] += bias_partial.sum(0)[:covered].T


def _add_weights(
    problem: Problem, chunk: Chunk, scores: Tensor, logits_gradient: Tensor, w1_sum: Tensor, w2_sum: Tensor
) -> None:
    """Adds the chunk's part to the gradients of the weights, both [D, H, k]."""
    padding, batch = problem.size // 2, scores.shape[0]
    tile = tiles("weights", problem.heads, problem.width, problem.size, chunk.rows, problem.dtype)
    reach = min(chunk.right, problem.window + padding) + padding  # from −p on
    blocks, row_blocks = triton.cdiv(reach, tile.distances), triton.cdiv(chunk.rows, tile.rows)
    parts = splits(blocks, batch, row_blocks)
    w1 = problem.taps_and_heads(problem.w1)
    partial = torch.empty(batch * parts * blocks, 2, *w1.shape, dtype=torch.float32, device=scores.device)
    weight_backward[(blocks, parts, batch)](
        scores,
        logits_gradient,
        problem.shares,
        w1,
        problem.taps_and_heads(problem.w2.transpose(0, 1)),
        partial,
        split_blocks=triton.cdiv(row_blocks, parts),
        KC=w1.shape[0],
        **chunk.launch(problem),
        **problem.constants,
        **_launch(tile),
    )
    used = partial.sum(0)[:, : problem.size * problem.heads, : problem.width]
    first, second = used.unflatten(1, (problem.size, problem.heads)).permute(0, 3, 2, 1)
    w1_sum += first
    w2_sum += second


def _launch(tile: Tiles) -> dict[str, int]:
    return {"BM": tile.rows, "BN": tile.distances, "num_warps": tile.warps, "num_stages": tile.stages}

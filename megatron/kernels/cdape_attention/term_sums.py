"""Gradients of the tables and weights of all layers, to which the kernels of each layer's chunks add.

The backward kernels leave these gradients by program. `add_sums` sums several kinds of partial results in one launch.
PyTorch would sum each kind with a launch of its own, which costs the host as much as a kernel that computes for a
hundred times as long.

L layers, H heads, N distances, D processor width, k kernel size, p = k//2.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.cdape_attention.bias_product import BiasProduct
from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk
from megatron.kernels.cdape_attention.geometry import HEADS
from megatron.kernels.cdape_attention.mixer import SharedTables
from megatron.kernels.cdape_attention.mixer_operands import unpack_tables, unpack_weights
from megatron.kernels.runtime import Tile, cdiv, launch

TILE = Tile(32, 64, 4, 1)
"""Partial results and entries that a program loads at a time."""


class MixerSums(NamedTuple):
    """Sums of the CUDA kernels, in the kernels' layouts."""

    tables: Tensor
    """float32 [L, distances + p, padded D + 16], see `mixer_operands.unpack_tables`."""
    weights: Tensor
    """float32 [L, 1, n], see `mixer_operands.unpack_weights`."""
    has_bias: bool
    """True if the bias is added to the logits."""
    shared: SharedTables
    """Tables of partial sums for calls of one chunk."""


class TermSums(NamedTuple):
    """Gradients of the table and weight terms of layers, to which chunks add. Within a call, L is absent."""

    bias_product: Tensor
    """Gradient of the product in `BiasProduct`, float32 [L, 2p + N, D·(1 + p)] (`BiasProduct.allocate_gradient`)."""
    bias_table: Tensor
    """Gradient of the bias table from the logits, float32 [L, N, H]; [L, 0, H] without a bias."""
    patches: Tensor
    """Gradients of both weights, float32 [L, 2, KC, DP]."""
    mixer: MixerSums | None = None
    """Sums that the CUDA kernels add to all three, or None if they do not run."""

    def select_layer(self, layer: int) -> "TermSums":
        mixer = self.mixer
        if mixer is not None:
            mixer = mixer._replace(tables=mixer.tables[layer], weights=mixer.weights[layer])
        return TermSums(self.bias_product[layer], self.bias_table[layer], self.patches[layer], mixer)


def allocate_term_sums(layers: int, product: BiasProduct, num_distances: int, device: torch.device) -> TermSums:
    """Allocate sums, initially zero, so that a layer without a backward pass has zero gradients.

    Args:
        num_distances: number of distances of the bias; 0 without one.
    """
    shape = product.shape
    bias_table = torch.zeros(layers, num_distances, shape.heads, dtype=torch.float32, device=device)
    patches = torch.zeros(layers, 2, *shape.packed[2], dtype=torch.float32, device=device)
    return TermSums(product.allocate_gradient(layers, device), bias_table, patches)


def add_mixer_sums(sums: TermSums, problem: CdapeProblem) -> TermSums:
    """Return the sums of layers together with zero-initialized sums for the CUDA kernels."""
    assert problem.operands is not None
    layers, device = len(sums.patches), sums.patches.device
    count, width = problem.operands.distances + problem.padding, problem.operands.padded_sizes[1]
    tables = torch.zeros(layers, count, width + HEADS, dtype=torch.float32, device=device)
    weights = torch.zeros(layers, 1, 2 * problem.operands.fragments.w1.shape[1], dtype=torch.float32, device=device)
    return sums._replace(mixer=MixerSums(tables, weights, problem.has_bias, SharedTables()))


def unpack_mixer_sums(sums: TermSums, product: BiasProduct) -> None:
    """Add the CUDA kernels' sums of all layers to the others, if there are any."""
    if sums.mixer is None:
        return
    tables, weights, has_bias, _ = sums.mixer
    contributions, bias_table = unpack_tables(tables, product.shape)
    covered = product.shape.padding + product.count
    sums.bias_product[:, :covered, : product.shape.width].add_(contributions[:, :covered])
    if has_bias:
        covered = min(bias_table.shape[1], sums.bias_table.shape[1])
        sums.bias_table[:, :covered].add_(bias_table[:, :covered])
    sums.patches.add_(unpack_weights(weights[:, 0], product.shape))


def pair_edges(product: BiasProduct, chunk: Chunk, dedge: Tensor, sums: TermSums) -> Sequence[tuple[Tensor, Tensor]]:
    """Return totals and gradients of E for `add_sums`, or add those of documents here.

    Args:
        dedge: [B, rows, p, D or more].
    """
    if chunk.document_starts is None:
        return product.pair_edge_gradients(sums.bias_product, dedge, chunk.first)
    product.add_edge_gradient(sums.bias_product, dedge, chunk.position, chunk.document_starts)
    return ()


@cache
def build_sums_constants(tile: Tile, *, add: bool) -> dict[str, Any]:
    """Return the constants of the kernel; `add`: to the sums of other chunks."""
    return {"ADD": add, **tile.blocks}


@triton.jit
def _sum_entries(output, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum BLOCK_N entries of one output over all partial results."""
    total_ptr, partial_ptr, count, rows, columns, partial_stride, row_stride, total_stride = output
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, column = (entry // columns).to(tl.int64), entry % columns
    inside = row < rows
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, count, BLOCK_M):
        part = first + tl.arange(0, BLOCK_M)[:, None]
        pointers = partial_ptr + part.to(tl.int64) * partial_stride + (row * row_stride + column)[None]
        sums += tl.load(pointers, (part < count) & inside[None], 0.0)
    result = tl.sum(sums, 0)
    pointers = total_ptr + row * total_stride + column
    if ADD:
        result += tl.load(pointers, inside)
    tl.store(pointers, result, inside)


@triton.jit
def _partial_sums_kernel(
    outputs,  # for each: total, partial results, number of these, rows, columns, strides of both rows
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum partial results in a fixed order. Grid: blocks of the largest output's entries; outputs."""
    for i in tl.static_range(len(outputs)):
        if tl.program_id(1) == i:
            _sum_entries(outputs[i], ADD, BLOCK_M, BLOCK_N)


def add_sums(pairs: Sequence[tuple[Tensor, Tensor]], *, is_first: bool) -> None:
    """Add the sum of partial results [P, n, m] to each total [n, m], float32, in one launch.

    Args:
        pairs: totals and partial results, whose last dimensions are contiguous. Rows and columns that only one of both
            has are left out.
        is_first: True to overwrite the totals.
    """
    outputs: list[tuple[Any, ...]] = []
    for total, partial in pairs:
        count, rows, columns = partial.shape
        all_rows, all_columns = total.shape
        sizes = count, min(rows, all_rows), min(columns, all_columns)
        outputs.append((total, partial, *sizes, *partial.stride()[:2], total.stride(0)))
    blocks = max(cdiv(output[3] * output[4], TILE.block_n) for output in outputs)
    launch(
        _partial_sums_kernel,
        (blocks, len(outputs), 1),
        (tuple(outputs),),
        build_sums_constants(TILE, add=not is_first),
        TILE.options,
    )

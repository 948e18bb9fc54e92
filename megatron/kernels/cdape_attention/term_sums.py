"""Gradients of the tables and weights of all layers, to which the kernels of each layer's chunks add.

The backward kernels leave these gradients by program. The last launch of a chunk sums them (`partial_sums.py`).

L layers, H heads, N distances, D processor width, k kernel size, p = k//2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.cdape_attention.bias_product import BiasProduct
from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk
from megatron.kernels.cdape_attention.geometry import HEADS
from megatron.kernels.cdape_attention.mixer import SharedTables
from megatron.kernels.cdape_attention.mixer_operands import unpack_tables, unpack_weights


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
    """Return totals and partial results of the gradient of E, or add those of documents here.

    Args:
        dedge: [B, rows, p, D or more].
    """
    if chunk.document_starts is None:
        return product.pair_edge_gradients(sums.bias_product, dedge, chunk.first)
    product.add_edge_gradient(sums.bias_product, dedge, chunk.position, chunk.document_starts)
    return ()

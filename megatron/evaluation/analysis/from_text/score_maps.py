"""Maps of a layer while a model reads: scores, bias, effect of the processor, and attention.

    score       weighted and contextual scores q·k/√d of query i and key j, before the processor
    bias        bias added by the encoding
    processor   logits − score − bias: contribution of the score processor
    attention   softmax

A map of L × L entries per head is pooled to at most MAP_SIZE × MAP_SIZE cells, in row blocks. Each cell is the mean
over its unmasked entries.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.attention.inputs import AttentionInputs, iter_row_blocks
from megatron.attention.reference import (
    compute_logits,
    compute_scores_and_bias,
    compute_visible_mask,
    compute_weights,
    precompute_terms,
)
from megatron.evaluation.analysis.analysis import (
    Analysis,
    AnalysisContext,
    Block,
    Figure,
    NotApplicable,
    format_triangle,
)
from megatron.evaluation.forward_passes import choose_block_size, run_forward
from megatron.model.gpt import GPT

MAP_SIZE = 64
KIND_TITLES = {"score": "score", "bias": "bias", "processor": "processor contribution", "attention": "attention"}
"""Kinds of maps in order, with their titles in figures."""
MAX_PANELS = 5
"""Maximum number of lengths side by side in a figure."""


@dataclass(frozen=True)
class LayerMaps:
    """Pooled maps of one layer."""

    layer: int
    cells: dict[str, Tensor]
    """Kind → float64 [heads, side, side], rows are queries; NaN if all entries of a cell are masked."""


@torch.no_grad()
def compute_layer_maps(
    model: GPT, window: np.ndarray, layers: Collection[int], heads: Sequence[int]
) -> list[LayerMaps]:
    """Compute maps of layers while the model reads one window of tokens [L].

    Args:
        model: model in evaluation mode.
        layers, heads: indices of layers and heads to compute, from 0.
    """
    length = len(window)
    side = min(MAP_SIZE, length)
    sums: dict[tuple[int, str], Tensor] = {}
    counts: dict[int, Tensor] = {}

    def pool_layer(layer: int, inputs: AttentionInputs) -> None:
        if layer not in layers:
            return
        counts[layer] = torch.zeros(side, side, dtype=torch.float64)
        # Largest block first, see `compute_attention_in_blocks`.
        for block in reversed(list(iter_row_blocks(precompute_terms(inputs), choose_block_size(inputs)))):
            visible = compute_visible_mask(block)
            query_pooling = _build_pooling(block.query.indices(inputs.q.device), length, side)
            key_pooling = _build_pooling(block.key.indices(inputs.q.device), length, side)
            counts[layer] += (query_pooling.T @ visible[0, 0].double() @ key_pooling).cpu()
            for kind, values in _compute_block_maps(block).items():
                masked = values[:, list(heads)].double().masked_fill(~visible, 0)
                pooled = (query_pooling.T @ masked[0] @ key_pooling).cpu()
                sums[layer, kind] = sums.get((layer, kind), torch.zeros_like(pooled)) + pooled

    run_forward(model, window, pool_layer)
    return [
        LayerMaps(layer, {kind: sums[layer, kind] / counts[layer] for kind in KIND_TITLES if (layer, kind) in sums})
        for layer in sorted(layers)
    ]


def _compute_block_maps(block: AttentionInputs) -> dict[str, Tensor]:
    """Compute all kinds of maps for a row block, [1, H, R, C]."""
    scores, bias = compute_scores_and_bias(block)
    logits = compute_logits(block)
    maps = {"score": scores, "attention": compute_weights(block)}
    if bias is not None:
        maps["bias"] = bias.expand_as(scores)  # a bias computed from the layer's input already has a batch dimension
    if block.processor is not None:
        maps["processor"] = logits - scores - (0 if bias is None else bias)
    return maps


def _build_pooling(indices: Tensor, length: int, side: int) -> Tensor:
    """Build a one-hot matrix that assigns each token to a cell, float64 [tokens, side]."""
    return torch.nn.functional.one_hot(indices * side // length, side).double()


@dataclass(frozen=True)
class ScoreMapResult:
    maps: dict[int, list[LayerMaps]]
    """Maps by length."""
    heads: list[int]
    name: str
    """Name of the method."""


class ScoreMaps(Analysis):
    order = 80
    data_format = "json"
    title = "Scores, bias, and processor of each head"
    description = (
        "Maps over query i and key j in the last window of each length: the score q·k/√d, including changes by the "
        "encoding; the bias; the contribution of the score processor; and the resulting attention "
        "(Zheng et al. 2024, DAPE V2, figures 8 to 25). Maps are pooled to "
        f"{MAP_SIZE} × {MAP_SIZE} cells of means. Score, bias, and processor have color scales symmetric around zero, "
        "and attention has a logarithmic scale."
    )

    def measure(self, context: AnalysisContext) -> ScoreMapResult:
        model, layers, heads = context.trained_model, context.drawn_layers, context.drawn_heads
        if not layers or not heads:
            raise NotApplicable("It has none of the requested layers or heads.")
        maps = {
            length: compute_layer_maps(model, windows[-1], layers, heads)
            for length, windows in context.readable_windows.items()
        }
        return ScoreMapResult(maps, heads, context.name)

    def render_blocks(self, results: Mapping[str, ScoreMapResult], names: Sequence[str]) -> list[Block]:
        blocks: list[Block] = []
        for name, result in results.items():
            first = next(iter(result.maps.values()))
            kinds = [kind for kind in KIND_TITLES if kind in first[0].cells]
            reasons = {"bias": "adds no bias", "processor": "has no score processor"}
            missing = [reason for kind, reason in reasons.items() if kind not in kinds]
            if missing:
                blocks.append(f"{name} {' and '.join(missing)}, so it has no such maps.")
            for index in range(len(first)):
                by_length = {length: layer_maps[index] for length, layer_maps in result.maps.items()}
                for row, head in enumerate(result.heads):
                    blocks.append(_build_figure(name, head, row, by_length, kinds))
        return blocks

    def list_rows(self, result: ScoreMapResult) -> Iterator[Mapping[str, object]]:
        for length, layer_maps in result.maps.items():
            for maps in layer_maps:
                for kind, cells in maps.cells.items():
                    for row, head in enumerate(result.heads):
                        yield {
                            "length": length, "layer": maps.layer, "head": head, "map": kind,
                            "cells": format_triangle(cells[row], 3),
                        }  # fmt: skip


def _build_figure(name: str, head: int, row: int, by_length: Mapping[int, LayerMaps], kinds: list[str]) -> Figure:
    """Build a figure with lengths side by side, and one row and one color scale for each kind."""
    lengths = list(by_length)[:MAX_PANELS]
    layer = by_length[lengths[0]].layer

    def draw(narrow: bool) -> bytes:
        from megatron.evaluation.analysis.drawing import draw_map_grid

        grid = {KIND_TITLES[kind]: [by_length[length].cells[kind][row].numpy() for length in lengths] for kind in kinds}
        title = f"{name}\nlayer {layer}, head {head}"
        return draw_map_grid(grid, lengths, title, logarithmic=(KIND_TITLES["attention"],), narrow=narrow)

    titles = ", ".join(KIND_TITLES[kind] for kind in kinds)
    at = ", ".join(f"{length:,}" for length in lengths)
    return Figure(f"{titles} of query i and key j: layer {layer}, head {head} of {name}, at lengths {at}", draw)

"""Maps of one layer while a model reads a text: scores, bias, what the processor adds, and attention.

    score       weighted and contextual scores q·k/√d of query i and key j, as a processor reads them
    bias        what the encoding adds
    processor   logits − score − bias: what the score processor adds to both
    attention   the softmax

A map of L × L entries per head is pooled to at most SIDE × SIDE cells, each the mean over the entries that the query
may see, block of rows by block of rows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.analysis.observe import choose_block_size, run_forward
from megatron.attention.inputs import AttentionInputs, iter_row_blocks
from megatron.attention.reference import compute_logits, compute_scores_and_bias, compute_visibility, precompute_terms
from megatron.model.gpt import GPT

SIDE = 64
KINDS = ("score", "bias", "processor", "attention")


@dataclass(frozen=True)
class LayerMaps:
    """Pooled maps of one layer."""

    layer: int
    cells: dict[str, Tensor]
    """Kind → float64 [heads, side, side], rows are queries; NaN where no query of the cell sees a key of it."""


@torch.no_grad()
def compute_layer_maps(
    model: GPT, window: np.ndarray, layers: Collection[int], heads: Sequence[int]
) -> list[LayerMaps]:
    """The maps of some layers while the model reads one window of tokens [L].

    Args:
        model: in evaluation mode.
        layers, heads: whose maps are kept, counted from 0.
    """
    length = len(window)
    side = min(SIDE, length)
    sums: dict[tuple[int, str], Tensor] = {}
    counts: dict[int, Tensor] = {}

    def see(layer: int, rows: AttentionInputs) -> None:
        if layer not in layers:
            return
        counts[layer] = torch.zeros(side, side, dtype=torch.float64)
        # The largest block first: see `compute_attention_in_blocks`.
        for block in reversed(list(iter_row_blocks(precompute_terms(rows), choose_block_size(rows)))):
            visible = compute_visibility(block)
            down = _build_pooling(block.query.indices(rows.q.device), length, side)
            across = _build_pooling(block.key.indices(rows.q.device), length, side)
            counts[layer] += (down.T @ visible[0, 0].double() @ across).cpu()
            for kind, values in _compute_block(block).items():
                seen = values[:, list(heads)].double().masked_fill(~visible, 0)
                pooled = (down.T @ seen[0] @ across).cpu()
                sums[layer, kind] = sums.get((layer, kind), torch.zeros_like(pooled)) + pooled

    run_forward(model, window, see)
    return [
        LayerMaps(layer, {kind: sums[layer, kind] / counts[layer] for kind in KINDS if (layer, kind) in sums})
        for layer in sorted(layers)
    ]


def _compute_block(block: AttentionInputs) -> dict[str, Tensor]:
    """Each kind of map of a block of rows, [1, H, R, C]."""
    scores, bias = compute_scores_and_bias(block)
    logits = compute_logits(block)
    found = {"score": scores, "attention": torch.softmax(logits, dim=-1)}
    if bias is not None:
        found["bias"] = bias[None]
    if block.processor is not None:
        found["processor"] = logits - scores - (0 if bias is None else bias)
    return found


def _build_pooling(places: Tensor, length: int, side: int) -> Tensor:
    """Which cell each place falls into, float64 [places, side] of zeros and ones."""
    return torch.nn.functional.one_hot(places * side // length, side).double()

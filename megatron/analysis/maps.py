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

from megatron.analysis.observe import block_size, read
from megatron.model.gpt import GPT
from megatron.position.rows import AttentionInputs, logits_of_rows, prepared_blocks
from megatron.position.scores import compute_scores_and_bias, visibility_mask
from megatron.position.shape import ALL_HEADS

SIDE = 64
KINDS = ("score", "bias", "processor", "attention")


@dataclass(frozen=True)
class Maps:
    """Pooled maps of one layer."""

    layer: int
    cells: dict[str, Tensor]
    """Kind → float64 [heads, side, side], rows are queries; NaN where no query of the cell sees a key of it."""


@torch.no_grad()
def layer_maps(model: GPT, window: np.ndarray, layers: Collection[int], heads: Sequence[int]) -> list[Maps]:
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
        for block, table, share in reversed(prepared_blocks(rows, block_size(rows))):  # the largest first: see rows.py
            visible = visibility_mask(block.query, block.key, rows.q.device, block.window, block.key_mask)
            down = _pooling(block.query.indices(rows.q.device), length, side)
            across = _pooling(block.key.indices(rows.q.device), length, side)
            counts[layer] += (down.T @ visible[0, 0].double() @ across).cpu()
            for kind, values in _block(block, table, share).items():
                seen = values[:, list(heads)].double().masked_fill(~visible, 0)
                pooled = (down.T @ seen[0] @ across).cpu()
                sums[layer, kind] = sums.get((layer, kind), torch.zeros_like(pooled)) + pooled

    read(model, window, see)
    return [
        Maps(layer, {kind: sums[layer, kind] / counts[layer] for kind in KINDS if (layer, kind) in sums})
        for layer in sorted(layers)
    ]


def _block(block: AttentionInputs, table: object, share: object) -> dict[str, Tensor]:
    """Each kind of map of a block of rows, [1, H, R, C]."""
    scores, bias = compute_scores_and_bias(
        block.q, block.k, block.query, block.key, block.encoding, table, ALL_HEADS, block.dense  # type: ignore[arg-type]
    )  # fmt: skip
    logits = logits_of_rows(block, table, share)  # type: ignore[arg-type]
    found = {"score": scores, "attention": torch.softmax(logits, dim=-1)}
    if bias is not None:
        found["bias"] = bias[None]
    if block.processor is not None:
        found["processor"] = logits - scores - (0 if bias is None else bias)
    return found


def _pooling(places: Tensor, length: int, side: int) -> Tensor:
    """Which cell each place falls into, float64 [places, side] of zeros and ones."""
    return torch.nn.functional.one_hot(places * side // length, side).double()

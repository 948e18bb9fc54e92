"""Attention maps of a model's layers for a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megatron.attention.inputs import AttentionInputs


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMaps:
    """Attention maps of one layer for one window, float32 [heads, queries, keys]; NaN for hidden keys.

    Equality is identity, because arrays have no truth value.
    """

    scores: np.ndarray
    """Scores q·k/√d with weights and contextual terms, before bias and score processor."""
    bias: np.ndarray | None
    """Bias of the encoding, or None if it adds none."""
    logits: np.ndarray
    """Logits: scores plus bias, after the score processor if there is one."""
    weights: np.ndarray
    """Attention weights after the softmax."""

    def __repr__(self) -> str:
        heads, queries, keys = self.weights.shape
        bias = "no bias" if self.bias is None else "a bias"
        return f"<AttentionMaps: {heads} heads × {queries:,} queries × {keys:,} keys, {bias}>"

    @property
    def processor_term(self) -> np.ndarray:
        """Term that the score processor adds to scores and bias."""
        added: np.ndarray = self.logits - self.scores - (0 if self.bias is None else self.bias)
        return added


def compute_maps(inputs: AttentionInputs) -> AttentionMaps:
    """Compute the maps of one layer from the inputs of its attention."""
    import torch

    from megatron.attention.inputs import iter_row_blocks
    from megatron.attention.reference import (
        compute_logits,
        compute_scores_and_bias,
        compute_visible_mask,
        compute_weights,
        precompute_terms,
    )
    from megatron.evaluation.forward_passes import choose_block_size

    shape = (inputs.q.shape[1], inputs.query.length, inputs.key.length)
    maps: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for block in iter_row_blocks(precompute_terms(inputs), choose_block_size(inputs)):
            rows = slice(block.query.start, block.query.stop)
            columns = slice(block.key.start, block.key.start + block.key.length)
            is_hidden = ~compute_visible_mask(block)
            scores, bias = compute_scores_and_bias(block)
            parts = {"scores": scores, "logits": compute_logits(block), "weights": compute_weights(block)}
            if bias is not None:
                parts["bias"] = bias.expand_as(scores)
            for name, values in parts.items():
                whole = maps.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
                whole[:, rows, columns] = values[0].float().masked_fill(is_hidden[0], torch.nan).cpu().numpy()
    return AttentionMaps(maps["scores"], maps.get("bias"), maps["logits"], maps["weights"])

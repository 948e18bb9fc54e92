"""The empirical receptive field: how many of the last keys hold the attention that a trained model pays.

Exploring Transformer Extrapolation (Qin et al. 2023, section 3.3) defines, of a query i, n_emp(ε) = min{j : C_ij >
(1 − ε)·C_ii}, with C_ij / C_ii the share of the softmax that the last j keys have. How it averages over queries, heads,
layers and texts is not said. Here: per layer and head, the mean share a_t of the key at distance t, over all queries of
some windows that have at least m keys before them, their own included; a query with fewer would count its few keys as
the whole. So half of a window's length is m, and the queries are those of its second half. What these pay to keys at
distances from m on is the share `beyond`.

It asks the softmax itself, so it is defined for every method, score processors and windows included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.analysis.observe import choose_block_size, run_forward, slice_from_row
from megatron.analysis.receptive_field import TIE
from megatron.attention.inputs import AttentionInputs, iter_row_blocks
from megatron.attention.reference import compute_logits, precompute_terms
from megatron.model.gpt import GPT


@dataclass(frozen=True)
class AttentionMass:
    """Mean attention by distance."""

    shares: Tensor
    """float64 [layers, H, m]: of the key at the distance t."""
    queries: int
    """So many were averaged."""

    @property
    def mass_beyond(self) -> Tensor:
        """float64 [layers, H]: the mean share of all keys further away."""
        return (1 - self.shares.sum(-1)).clamp(min=0)

    def receptive_field(self, layer: int, head: int, share: float) -> int | None:
        """n_emp(ε) of the mean shares; None if the last m keys do not hold as much."""
        sums = self.shares[layer, head].cumsum(0)
        enough = sums > (1 - share) * (1 + TIE)
        return int(enough.int().argmax()) + 1 if bool(enough.any()) else None


@torch.no_grad()
def measure_attention_mass(
    model: GPT, windows: Sequence[np.ndarray], progress: Callable[[float], None] = lambda share: None
) -> AttentionMass:
    """Mean attention by distance while a model reads windows of one length.

    Args:
        model: in evaluation mode.
        windows: tokens [L] of each.
        progress: told which share is done, after each block of rows of each layer of each window.
    """
    length = len(windows[0])
    near = max(length // 2, 1)
    heads = model.config.num_attention_heads
    sums = torch.zeros(model.config.num_layers, heads, near, dtype=torch.float64)
    queries = length - near + 1
    seen, all_ = 0, len(windows) * len(sums)

    def see(layer: int, rows: AttentionInputs) -> None:
        nonlocal seen
        late = slice_from_row(rows, near - 1)
        done = 0
        # The largest block first: see `compute_attention_in_blocks`.
        for block in reversed(list(iter_row_blocks(precompute_terms(late), choose_block_size(late)))):
            attention = torch.softmax(compute_logits(block), dim=-1)
            sums[layer] += group_by_distance(attention, block, near).sum(dim=(0, 2), dtype=torch.float64).cpu()
            done += block.query.length
            progress((seen + done / late.query.length) / all_)
        seen += 1

    for window in windows:
        run_forward(model, window, see)
    return AttentionMass(sums / (queries * len(windows)), queries * len(windows))


def group_by_distance(values: Tensor, block: AttentionInputs, count: int) -> Tensor:
    """Values [B, H, R, C] over keys as values [B, H, R, count] over the distances 0 … count − 1 in places, zero where
    the block does not hold the key."""
    columns = block.query.indices(values.device)[:, None] - torch.arange(count, device=values.device)
    columns = columns - block.key.start
    there = columns >= 0
    index = columns.clamp(min=0).expand(*values.shape[:3], -1)
    return values.gather(-1, index).masked_fill(~there, 0)

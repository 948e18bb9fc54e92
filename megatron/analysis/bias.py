"""Biases over the distance in float64, from the encoding's own code: b_t = exp(bias at the distance t).

The models themselves compute biases in float32; sums over many thousand terms, and their tails, want more digits. The
parameters are those of the encoding, copied to float64, so the formula is written nowhere but in the encoding.

H heads, N distances.
"""

from copy import deepcopy

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.token_range import ALL_HEADS, TokenRange


@torch.no_grad()
def to_float64(encoding: Encoding) -> Encoding:
    """A copy on the CPU whose parameters are float64."""
    return deepcopy(encoding).cpu().double()


@torch.no_grad()
def compute_terms(encoding: Encoding, distances: Tensor, row: int | None = None) -> ScoreTerms:
    """Bias and weight at distances, float64 [H, N]; None where the encoding has none.

    Args:
        encoding: `to_float64`.
        distances: float64 [N], whole numbers.
        row: the query's position i, for an encoding whose bias depends on it; its distances are 0 … i in that order,
            and `distances` is not read.
    """
    if type(encoding).overrides_hook("table"):
        return encoding.table(distances)
    if not type(encoding).overrides_hook("dense"):
        return ScoreTerms()
    if row is None:
        raise ValueError("the bias depends on the query's position: name a row")
    like = torch.zeros((), dtype=torch.float64)
    found = encoding.dense(TokenRange(row, 1), TokenRange(0, row + 1), like, ALL_HEADS)
    return ScoreTerms(*(None if term is None else term[:, 0].flip(-1) for term in found))


def compute_bias_by_distance(encoding: Encoding, count: int) -> Tensor:
    """The bias at the distances 0 … count − 1, float64 [H, count]: zero where the encoding has none.

    Where it depends on the query's position, it is that of the query at position count − 1.

    Args:
        encoding: as the model has it.
    """
    distances = torch.arange(count, dtype=torch.float64)
    bias = compute_terms(to_float64(encoding), distances, row=count - 1).bias
    return torch.zeros(encoding.dims.num_heads, count, dtype=torch.float64) if bias is None else bias


def mask_window(bias: Tensor, window: int | None) -> Tensor:
    """A bias [H, N] of −∞ where a window hides the key."""
    if window is None or window >= bias.shape[-1]:
        return bias
    hidden = bias.clone()
    hidden[:, window:] = -torch.inf
    return hidden

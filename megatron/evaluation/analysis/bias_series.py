"""Biases over the distance in float64, from the encoding's own code, and the series Σ_t b_t, b_t = exp(bias at t).

Models compute biases in float32. Sums over many thousand terms and their tails need more digits. The parameters are
copied from the encoding and converted to float64, so that only the encoding implements the formula.

Exploring Transformer Extrapolation (Qin et al. 2023, theorem 3.4): if queries, keys, and values are bounded and the
series converges, then the output of attention to the last j keys approaches that of attention to all keys. This
condition is sufficient, for one layer and head. Only experiments suggest that it is necessary.

H heads, N distances.
"""

import math
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.series_tails import SeriesTail, windowed_tail
from megatron.position.token_range import ALL_HEADS, TokenRange

NUM_TERMS = 1 << 16
"""Number of terms that are summed explicitly."""
MAX_TERMS = 1 << 20
"""Maximum number of explicit terms, for series whose asymptotic form starts later."""


@torch.no_grad()
def to_float64(encoding: Encoding) -> Encoding:
    """Copy an encoding to the CPU with float64 parameters."""
    return deepcopy(encoding).cpu().double()


@torch.no_grad()
def compute_terms(encoding: Encoding, distances: Tensor, row: int | None = None) -> ScoreTerms:
    """Compute bias and weight at distances, float64 [H, N], or None if the encoding has none.

    Args:
        encoding: result of `to_float64`.
        distances: whole numbers, float64 [N].
        row: position i of the query, for an encoding whose bias depends on it. Its distances are then 0 … i, in this
            order, and `distances` is ignored.
    """
    if type(encoding).overrides_hook("table"):
        return encoding.table(distances)
    if not type(encoding).overrides_hook("dense"):
        return ScoreTerms()
    if row is None:
        raise ValueError("the bias depends on the query's position; a row is required")
    like = torch.zeros((), dtype=torch.float64)
    terms = encoding.dense(TokenRange(row, 1), TokenRange(0, row + 1), like, ALL_HEADS)
    return ScoreTerms(*(None if term is None else term[:, 0].flip(-1) for term in terms))


def compute_bias_by_distance(encoding: Encoding, count: int) -> Tensor:
    """Compute the bias at distances 0 … count − 1, float64 [H, count], or zeros if the encoding has none.

    If it depends on the query's position, it is computed for position count − 1.

    Args:
        encoding: encoding of the model.
    """
    distances = torch.arange(count, dtype=torch.float64)
    bias = compute_terms(to_float64(encoding), distances, row=count - 1).bias
    return torch.zeros(encoding.dims.num_heads, count, dtype=torch.float64) if bias is None else bias


def mask_window(bias: Tensor, window: int | None) -> Tensor:
    """Set a bias [H, N] to −∞ at distances outside a window."""
    if window is None or window >= bias.shape[-1]:
        return bias
    masked = bias.clone()
    masked[:, window:] = -torch.inf
    return masked


@dataclass(frozen=True)
class BiasSeries:
    """Series of one head."""

    head: int
    tail: SeriesTail
    bias: Tensor
    """Logarithm ln b_t of the first terms, float64."""

    @property
    def verdict(self) -> str:
        return {True: "converges", False: "diverges", None: "not known"}[self.tail.converges]

    def sum_to(self, count: int) -> float:
        """Return the sum of the first `count` terms."""
        return _exp(torch.logsumexp(self.bias[:count], 0).item())

    @property
    def total(self) -> tuple[float, float]:
        """Lower and upper bound of Σ b_t over all t."""
        log_sum = torch.logsumexp(self.bias, 0).item()
        low, high = self.tail.log_remainder_bounds(len(self.bias))
        return _exp(_log_add(log_sum, low)), _exp(_log_add(log_sum, high))


def _exp(x: float) -> float:
    """Return exp(x), or infinity on overflow."""
    return math.inf if x > 709 else math.exp(x)


def _log_add(a: float, b: float) -> float:
    return torch.logaddexp(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)).item()


@torch.no_grad()
def sum_bias_series(encoding: Encoding, window: int | None = None, num_terms: int = NUM_TERMS) -> list[BiasSeries]:
    """Compute the series of each head.

    Args:
        encoding: encoding of the model.
        window: number of most recent keys that a token attends to; b is 0 from this distance on.
        num_terms: number of explicitly summed terms. If the bias depends on the query's position, they are those of
            position num_terms − 1.
    """
    tails = encoding.bias_tails()
    if window is not None:
        tails = [windowed_tail(window)] * len(tails)
    starts = [tail.start for tail in tails if tail.start <= MAX_TERMS]
    num_terms = max([num_terms, *(math.ceil(start) + 1 for start in starts)])
    bias = mask_window(compute_bias_by_distance(encoding, num_terms), window)
    return [BiasSeries(head, tail, bias[head]) for head, tail in enumerate(tails)]

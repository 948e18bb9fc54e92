"""Biases over the distance in float64, from the encoding's own code, and the series Σ_t b_t, b_t = exp(bias at t).

The models themselves compute biases in float32; sums over many thousand terms, and their tails, want more digits. The
parameters are those of the encoding, copied to float64, so the formula is written nowhere but in the encoding.

Exploring Transformer Extrapolation (Qin et al. 2023, theorem 3.4): where queries, keys and values are bounded and the
series converges, the output of attention to all keys and that of attention to the last j come as near to each other as
one likes. That is sufficient, for one layer and head. That it is necessary is shown by experiments alone.

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
"""Terms that are added up one by one."""
MAX_TERMS = 1 << 20
"""The same of a series whose form holds from later on."""


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
    terms = encoding.dense(TokenRange(row, 1), TokenRange(0, row + 1), like, ALL_HEADS)
    return ScoreTerms(*(None if term is None else term[:, 0].flip(-1) for term in terms))


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
    masked = bias.clone()
    masked[:, window:] = -torch.inf
    return masked


@dataclass(frozen=True)
class BiasSeries:
    """One head's series."""

    head: int
    tail: SeriesTail
    bias: Tensor
    """ln b_t of the first terms, float64."""

    @property
    def verdict(self) -> str:
        return {True: "converges", False: "diverges", None: "not known"}[self.tail.converges]

    def sum_to(self, count: int) -> float:
        """Σ of the first terms."""
        return _exp(torch.logsumexp(self.bias[:count], 0).item())

    @property
    def total(self) -> tuple[float, float]:
        """Bounds of Σ b_t over all t."""
        log_sum = torch.logsumexp(self.bias, 0).item()
        low, high = self.tail.log_remainder_bounds(len(self.bias))
        return _exp(_log_add(log_sum, low)), _exp(_log_add(log_sum, high))


def _exp(x: float) -> float:
    """exp(x), infinite where that is too large for a float."""
    return math.inf if x > 709 else math.exp(x)


def _log_add(a: float, b: float) -> float:
    return torch.logaddexp(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)).item()


@torch.no_grad()
def sum_bias_series(encoding: Encoding, window: int | None = None, num_terms: int = NUM_TERMS) -> list[BiasSeries]:
    """The series of each head.

    Args:
        encoding: as the model has it.
        window: every token sees the last `window` keys only: from there on b is 0.
        num_terms: how many are added up one by one. Where an encoding's bias depends on the query's position, they are
            those of the query at position num_terms − 1.
    """
    tails = encoding.bias_tails()
    if window is not None:
        tails = [windowed_tail(window)] * len(tails)
    starts = [tail.start for tail in tails if tail.start <= MAX_TERMS]
    num_terms = max([num_terms, *(math.ceil(start) + 1 for start in starts)])
    bias = mask_window(compute_bias_by_distance(encoding, num_terms), window)
    return [BiasSeries(head, tail, bias[head]) for head, tail in enumerate(tails)]

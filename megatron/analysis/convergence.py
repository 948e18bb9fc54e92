"""Is a model sure to extrapolate? The verdict of Σ exp(bias) for each head, with its reason.

Exploring Transformer Extrapolation (Qin et al. 2023, theorem 3.4): where queries, keys and values are bounded and the
series Σ_t b_t converges, b_t = exp(bias at the distance t), the output of attention to all keys and that of attention
to the last j come as near to each other as one likes. That is sufficient, for one layer and head. That it is necessary
is shown by experiments alone.
"""

import math
from dataclasses import dataclass

import torch

from megatron.analysis.bias import compute_bias_by_distance, mask_window
from megatron.position.encoding import Encoding
from megatron.position.series_tails import SeriesTail, windowed_tail

TERMS = 1 << 16
"""Terms that are added up one by one."""
MAX_TERMS = 1 << 20
"""The same of a series whose form holds from later on."""


@dataclass(frozen=True)
class BiasSeries:
    """One head's series."""

    head: int
    tail: SeriesTail
    bias: torch.Tensor
    """ln b_t of the first TERMS terms, float64."""

    @property
    def verdict(self) -> str:
        return {True: "converges", False: "diverges", None: "not known"}[self.tail.converges]

    def sum_to(self, count: int) -> float:
        """Σ of the first terms."""
        return math.exp(torch.logsumexp(self.bias[:count], 0).item())

    @property
    def total(self) -> tuple[float, float]:
        """Bounds of Σ b_t over all t."""
        inside = torch.logsumexp(self.bias, 0).item()
        return tuple(_exp(_log_add(inside, rest)) for rest in self.tail.log_remainder_bounds(len(self.bias)))  # type: ignore[return-value]


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


def _log_add(a: float, b: float) -> float:
    return torch.logaddexp(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)).item()


@torch.no_grad()
def sum_bias_series(encoding: Encoding, window: int | None = None, terms: int = TERMS) -> list[BiasSeries]:
    """The series of each head.

    Args:
        encoding: as the model has it.
        window: every token sees the last `window` keys only: from there on b is 0.
        terms: how many are added up one by one. Where an encoding's bias depends on the query's position, they are
            those of the query at position terms − 1.
    """
    tails = encoding.bias_tails()
    if window is not None:
        tails = [windowed_tail(window)] * len(tails)
    starts = [tail.start for tail in tails if tail.start <= MAX_TERMS]
    terms = max(terms, *(math.ceil(start) + 1 for start in starts))
    bias = mask_window(compute_bias_by_distance(encoding, terms), window)
    return [BiasSeries(head, tail, bias[head]) for head, tail in enumerate(tails)]

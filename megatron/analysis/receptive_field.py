"""The receptive field of a series: how many of its first terms hold all but a share ε of its sum.

Two definitions of Qin et al. 2023 (Exploring Transformer Extrapolation), which differ in more than ties:

* `theoretical`, equation 22: min{j ≥ 1 : Σ_{t<j} b_t > (1 − ε)·Σ_{t≥0} b_t}, over the infinite series. What lies beyond
  the terms that are added up is bounded by the form that the encoding declares (`megatron.position.series_tails`);
  where the bounds leave several answers open, the field is an interval.
* `finite`, the algorithm of the paper's plots (appendix E): of m terms, the least j with Σ_{t<j} a_t ≥ (1 − ε)·Σ_{t<m}
  a_t, and m at ε = 0.

Keys are counted with the query's own. Two sums that differ by less than a few roundings count as equal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.position.series_tails import SeriesTail

MAX_FIELD = 2**53
"""Above this whole numbers are not exact in float64; no receptive field is looked for beyond."""
TIE_TOLERANCE = 1e-12
"""Relative difference below which sums are equal: 2^16 terms in float64 are added to better than that."""
PLOTTED_EPSILONS: tuple[float, ...] = tuple(torch.linspace(1, 0, 50, dtype=torch.float64).tolist())
"""The values of ε in the paper's plots."""


@dataclass(frozen=True)
class ReceptiveField:
    """The receptive field, or bounds of it."""

    low: float
    """Whole, or infinite where the series diverges."""
    high: float
    """The same as `low` where it is known exactly; infinite where only a lower bound is."""

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def __str__(self) -> str:
        if self.exact:
            return "∞" if math.isinf(self.low) else f"{int(self.low):,}"
        if math.isinf(self.high):
            if self.low <= 1:
                return "not known"
            return "over 2^53" if self.low >= MAX_FIELD else f"over {int(self.low) - 1:,}"
        return f"{int(self.low):,} to {int(self.high):,}"


UNBOUNDED = ReceptiveField(math.inf, math.inf)


def compute_theoretical_field(bias: Tensor, tail: SeriesTail, epsilons: Sequence[float]) -> list[ReceptiveField]:
    """The receptive field by equation 22 at each ε.

    Args:
        bias: ln b_t of the first terms, float64 [N]; −∞ for a term that is 0.
        tail: what is known of the terms from N on.
        epsilons: each in (0, 1].

    Returns:
        A field for each ε; infinite where the series diverges.
    """
    if tail.converges is False:
        return [UNBOUNDED] * len(epsilons)
    count = len(bias)
    remainder_bounds = tail.log_remainder_bounds(count)
    # ln Σ_{t ≥ j} b_t for j = 0 … N, with either bound of the terms from N on.
    low, high = (
        torch.logcumsumexp(torch.cat([bias, torch.tensor([bound], dtype=torch.float64)]).flip(0), 0).flip(0)
        for bound in remainder_bounds
    )
    fields = []
    for epsilon in epsilons:
        below, above = math.log(epsilon) + low[0].item(), math.log(epsilon) + high[0].item()
        # Where the bounds say nothing, the field is at least 1, and at most anything.
        lower = _find_first(low, above, lambda j: tail.log_remainder_bounds(j)[0], unknown=1, beyond=MAX_FIELD)
        upper = _find_first(high, below, lambda j: tail.log_remainder_bounds(j)[1], unknown=math.inf, beyond=math.inf)
        fields.append(ReceptiveField(lower, upper))
    return fields


def _find_first(
    inside: Tensor, bound: float, outside: Callable[[int], float], *, unknown: float, beyond: float
) -> float:
    """The least j ≥ 1 with ln Σ_{t ≥ j} b_t < bound.

    Args:
        inside: one bound of ln Σ_{t ≥ j} b_t for j = 0 … N.
        bound: what it has to fall below.
        outside: the same bound for j > N.
        unknown: what is returned if the bound is not finite: the sum of all, or what is beyond the terms, is not known.
        beyond: what is returned if there is no such j up to MAX_FIELD.
    """
    bound -= TIE_TOLERANCE
    if not math.isfinite(bound):
        return unknown
    is_below = inside[1:] < bound
    if bool(is_below.any()):
        return int(is_below.int().argmax()) + 1
    first = _bisect(lambda j: outside(j) < bound, len(inside) - 1)
    return beyond if first is None else first


def _bisect(holds: Callable[[int], bool], fails: int) -> int | None:
    """The least j for which a condition holds that fails for `fails` and all before; None if that is past
    MAX_FIELD."""
    step = max(fails, 1)
    while not holds(fails + step):
        fails += step
        step *= 2
        if fails + step > MAX_FIELD:
            return None
    low, high = fails, fails + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def compute_finite_field(terms: Tensor, epsilons: Sequence[float] = PLOTTED_EPSILONS) -> list[int]:
    """The receptive field of m terms at each ε, as the paper's plots have it.

    It is the least j with Σ_{t<j} a_t ≥ (1 − ε)·Σ_{t<m} a_t, and m at ε = 0, where terms may be too small to be seen.

    Args:
        terms: a_t ≥ 0, float64 [m].
        epsilons: each in [0, 1].
    """
    total = terms.sum()
    sums = torch.cat([total.new_zeros(1), terms.cumsum(0)])
    return [
        len(terms) if epsilon == 0 else int((sums >= (1 - epsilon) * total * (1 - TIE_TOLERANCE)).int().argmax())
        for epsilon in epsilons
    ]

"""Receptive field of a series: the number of first terms that contain all but a share ε of its sum.

Qin et al. 2023 (Exploring Transformer Extrapolation) use two definitions, which differ in more than ties:

* `theoretical`, equation 22: min{j ≥ 1 : Σ_{t<j} b_t > (1 − ε)·Σ_{t≥0} b_t}, over the infinite series. The remainder
  after the explicit terms is bounded by the form that the encoding declares (`megatron.position.series_tails`). If the
  bounds allow several answers, the field is an interval.
* `finite`, the algorithm of the paper's plots (appendix E): of m terms, the smallest j with
  Σ_{t<j} a_t ≥ (1 − ε)·Σ_{t<m} a_t, and m at ε = 0.

The count of keys includes the query's own. Two sums are equal if they differ by less than a few rounding errors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.position.series_tails import SeriesTail

MAX_FIELD = 2**53
"""Largest receptive field that is searched for; larger whole numbers are not exact in float64."""
TIE_TOLERANCE = 1e-12
"""Relative difference below which sums are equal. Sums of 2^16 float64 terms are more accurate than this."""
PLOTTED_EPSILONS: tuple[float, ...] = tuple(torch.linspace(1, 0, 50, dtype=torch.float64).tolist())
"""Values of ε in the paper's plots."""


@dataclass(frozen=True)
class ReceptiveField:
    """Receptive field, or its bounds."""

    low: float
    """Lower bound: a whole number, or infinity if the series diverges."""
    high: float
    """Upper bound: equal to `low` if the field is known exactly; infinity if only a lower bound is known."""

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
    """Compute the receptive field by equation 22 at each ε.

    Args:
        bias: ln b_t of the first terms, float64 [N]; −∞ for a term that is 0.
        tail: asymptotic form of the terms from N on.
        epsilons: values in (0, 1].

    Returns:
        A field for each ε; infinite if the series diverges.
    """
    if tail.converges is False:
        return [UNBOUNDED] * len(epsilons)
    count = len(bias)
    remainder_bounds = tail.log_remainder_bounds(count)
    # ln Σ_{t ≥ j} b_t for j = 0 … N, using the lower and the upper bound of the terms from N on.
    low, high = (
        torch.logcumsumexp(torch.cat([bias, torch.tensor([bound], dtype=torch.float64)]).flip(0), 0).flip(0)
        for bound in remainder_bounds
    )
    fields = []
    for epsilon in epsilons:
        below, above = math.log(epsilon) + low[0].item(), math.log(epsilon) + high[0].item()
        # Without useful bounds, the field is at least 1 and has no upper limit.
        lower = _find_first(low, above, lambda j: tail.log_remainder_bounds(j)[0], unknown=1, beyond=MAX_FIELD)
        upper = _find_first(high, below, lambda j: tail.log_remainder_bounds(j)[1], unknown=math.inf, beyond=math.inf)
        fields.append(ReceptiveField(lower, upper))
    return fields


def _find_first(
    inside: Tensor, bound: float, outside: Callable[[int], float], *, unknown: float, beyond: float
) -> float:
    """Find the smallest j ≥ 1 with ln Σ_{t ≥ j} b_t < bound.

    Args:
        inside: one bound of ln Σ_{t ≥ j} b_t, for j = 0 … N.
        bound: threshold.
        outside: the same bound for j > N.
        unknown: return value if the threshold is not finite, because the total or the remainder is unknown.
        beyond: return value if there is no such j up to MAX_FIELD.
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
    """Find the smallest j that satisfies a monotone condition which is false up to `fails`.

    Return None if j exceeds MAX_FIELD.
    """
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
    """Compute the receptive field of m terms at each ε, as in the paper's plots.

    It is the smallest j with Σ_{t<j} a_t ≥ (1 − ε)·Σ_{t<m} a_t, and m at ε = 0, because terms may be too small to
    change the sum.

    Args:
        terms: a_t ≥ 0, float64 [m].
        epsilons: values in [0, 1].
    """
    total = terms.sum()
    sums = torch.cat([total.new_zeros(1), terms.cumsum(0)])
    return [
        len(terms) if epsilon == 0 else int((sums >= (1 - epsilon) * total * (1 - TIE_TOLERANCE)).int().argmax())
        for epsilon in epsilons
    ]

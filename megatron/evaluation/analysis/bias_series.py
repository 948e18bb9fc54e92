"""Biases over the distance in float64, from the encoding's own code, and the series Σ_t b_t, b_t = exp(bias at t).

Models compute biases in float32. Sums over many thousand terms and their tails need more digits. The parameters are
copied from the encoding and converted to float64, so that only the encoding implements the formula.

Exploring Transformer Extrapolation (Qin et al. 2023, theorem 3.4): if queries, keys, and values are bounded and the
series converges, then the output of attention to the last j keys approaches that of attention to all keys. This
condition is sufficient, for one layer and head. Only experiments suggest that it is necessary.

The receptive field of a series is the number of first terms that contain all but a share ε of its sum. Qin et al. use
two definitions, which differ in more than the treatment of ties:

* `theoretical`, equation 22: min{j ≥ 1 : Σ_{t<j} b_t > (1 − ε)·Σ_{t≥0} b_t}, over the infinite series. The remainder
  after the explicit terms is bounded by the asymptotic form of the encoding (`megatron.position.series_tails`). If the
  bounds allow several answers, the field is an interval.
* `finite`, the algorithm of the paper's plots (appendix E): of m terms, the smallest j with
  Σ_{t<j} a_t ≥ (1 − ε)·Σ_{t<m} a_t, and m at ε = 0.

The count of keys includes the query's own. Two sums are equal if they differ by less than a few rounding errors.

H heads, N distances.
"""

import math
from collections.abc import Callable, Sequence
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
        distances: integers, float64 [N].
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

    def sum_first(self, count: int) -> float:
        """Return the sum of the first `count` terms."""
        return _compute_exp(torch.logsumexp(self.bias[:count], 0).item())

    @property
    def total(self) -> tuple[float, float]:
        """Lower and upper bound of Σ b_t over all t."""
        log_sum = torch.logsumexp(self.bias, 0).item()
        low, high = self.tail.log_remainder_bounds(len(self.bias))
        return _compute_exp(_log_add(log_sum, low)), _compute_exp(_log_add(log_sum, high))


def _compute_exp(x: float) -> float:
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


MAX_FIELD = 2**53
"""Largest receptive field that is searched for; larger integers are not exact in float64."""
TIE_TOLERANCE = 1e-12
"""Relative difference below which sums are equal. Sums of 2^16 float64 terms are more accurate than this."""
PLOTTED_EPSILONS: tuple[float, ...] = tuple(torch.linspace(1, 0, 50, dtype=torch.float64).tolist())
"""Values of ε in the paper's plots."""


@dataclass(frozen=True)
class ReceptiveField:
    """Receptive field, or its bounds."""

    low: float
    """Lower bound: an integer, or infinity if the series diverges."""
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

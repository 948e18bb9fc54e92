"""Tail of the bias series Σ_t b_t, where b_t = exp(bias at distance t), as declared by an encoding.

A model is guaranteed to extrapolate if this series converges (Qin et al. 2023, Exploring Transformer Extrapolation,
theorem 3.4). A finite number of terms says nothing about the rest of the series. So an encoding declares the asymptotic
form of its bias (`Encoding.bias_tails`), with its parameters.

A convergent form provides the integral of b, which bounds the remainder after any number of terms. b decreases and is
convex from `start` on. Each term b_t is therefore at most the integral over [t − 1/2, t + 1/2]. The sum from t on is at
least the integral from t plus half of the integral over [t, t + 1], by the trapezoidal rule and because b decreases.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SeriesTail:
    """Tail of the series of one head."""

    converges: bool | None
    """True if the series converges; None if the encoding does not say."""
    reason: str
    """Reason with the parameters of the head, as a clause without a period."""
    log_integral: Callable[[float], float] | None = None
    """ln ∫_x^∞ b(t) dt for x ≥ start; None for a series that is not known to converge."""
    start: float = 0.0
    """Distance from which b decreases and is convex."""

    def log_remainder_bounds(self, first: int) -> tuple[float, float]:
        """Return a lower and an upper bound of ln Σ_{t ≥ first} b_t; infinite if no better bound is known."""
        if self.converges is False:
            return math.inf, math.inf
        if self.log_integral is None or first - 0.5 < self.start:
            return -math.inf, math.inf
        here, next_ = self.log_integral(first), self.log_integral(first + 1)
        if math.isinf(here):
            return -math.inf, -math.inf
        return here + math.log1p(-0.5 * math.expm1(next_ - here)), self.log_integral(first - 0.5)


def windowed_tail(window: int) -> SeriesTail:
    """Return the tail of a windowed bias: b is 0 outside the window, so a sum over the window is exact."""
    reason = f"b is 0 outside the window of {window:,} keys"
    return SeriesTail(True, reason, lambda x: -math.inf, window - 0.5)


def unknown_tail(
    reason: str = "its encoding does not declare how the bias ends (Encoding.bias_tails)",
) -> SeriesTail:
    """Return the tail of a bias whose encoding declares nothing or cannot know it."""
    return SeriesTail(None, reason)


def constant_tail(value: float, reason: str) -> SeriesTail:
    """Return the tail of a bias for which b stays at or above `value`, or returns to it: Σ b diverges."""
    return SeriesTail(False, f"{reason}, so b does not tend to 0 (it stays at {value:.3g})")


def power_tail(exponent: float, rate: float = 1.0, inner: float = 1.0, *, decay_name: str | None = None) -> SeriesTail:
    """Return the tail of b = (1 + rate·t^inner)^(−exponent), which converges if exponent·inner > 1.

    Args:
        decay_name: name of exponent·inner in the reason, if it is a parameter.
    """
    decay = exponent * inner
    if decay <= 1:
        reason = (
            "as 1/n" if decay_name is None else f"as n^(−{decay_name}), and {decay_name} = {decay:.4g} is not above 1"
        )
        return SeriesTail(False, f"b falls {reason}")

    def log_integral(x: float) -> float:
        if inner == 1:
            return (1 - exponent) * math.log1p(rate * x) - math.log(rate * (exponent - 1))
        # (1 + u)^−p = u^−p·(1 + 1/u)^−p with u = rate·t^inner; expand the second factor as a binomial series in 1/u.
        log_u = math.log(rate) + inner * math.log(x)
        term, total = 1.0, 0.0
        for k in range(60):
            total += term / (inner * (exponent + k) - 1)
            term *= -(exponent + k) / (k + 1) * math.exp(-log_u)
        return -exponent * log_u + math.log(x) + math.log(total)

    start = 0.0 if inner == 1 else _compute_root(10 * max(1.0, exponent) / rate, inner)
    reason = (
        f"n^(−{decay:.4g})" if decay_name is None else f"n^(−{decay_name}), and {decay_name} = {decay:.4g} is above 1"
    )
    return SeriesTail(True, f"b falls as {reason}", log_integral, start)


def exponential_tail(rate: float, exponent: float = 1.0) -> SeriesTail:
    """Return the tail of b = exp(−rate·t^exponent) with rate > 0 and 0 < exponent ≤ 2.

    It converges, also for exponents below 1.
    """

    def log_integral(x: float) -> float:
        a = 1 / exponent
        return _log_upper_gamma(a, rate * x**exponent) + math.log(a) - a * math.log(rate)

    start = _compute_root((exponent - 1) / (exponent * rate), exponent) if exponent > 1 else 0.0
    power = "n" if exponent == 1 else f"n^{exponent:.4g}"
    return SeriesTail(True, f"b = exp(−{rate:.4g}·{power}) falls faster than any power of n", log_integral, start)


def squared_log_tail(rate: float = 1.0, offset: float = 1.0) -> SeriesTail:
    """Return the tail of b = exp(−ln²(offset + rate·t)) with an offset of at least 1."""

    def log_integral(x: float) -> float:
        z = math.log(offset + rate * x) - 0.5
        scaled = torch.special.erfcx(torch.tensor(z, dtype=torch.float64))
        return 0.25 + 0.5 * math.log(math.pi) - math.log(2) + math.log(scaled) - z * z - math.log(rate)

    b = "exp(−ln²(n + 1))" if (rate, offset) == (1, 1) else f"exp(−ln²({offset:g} + {rate:.4g}·n))"
    start = max(0.0, (math.exp(0.5) - offset) / rate)
    return SeriesTail(True, f"b = {b} falls faster than any power of n", log_integral, start)


def _compute_root(value: float, exponent: float) -> float:
    """Return value^(1/exponent), or infinity if it overflows."""
    logarithm = math.log(value) / exponent
    return math.exp(logarithm) if logarithm < 700 else math.inf


def _log_upper_gamma(a: float, s: float) -> float:
    """Return ln Γ(a, s), the upper incomplete gamma function, for a > 0 and s ≥ 0."""
    if s < a + 1:
        ratio = torch.special.gammaincc(*torch.tensor([a, s], dtype=torch.float64))
        return math.lgamma(a) + math.log(ratio)
    # Legendre's continued fraction, evaluated forward (Lentz).
    tiny = 1e-300
    b = s + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for k in range(1, 10_000):
        factor = -k * (k - a)
        b += 2
        d = 1 / (factor * d + b or tiny)
        c = b + factor / c or tiny
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return -s + a * math.log(s) + math.log(fraction)

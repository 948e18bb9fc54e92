"""How the series of a bias ends: what an encoding knows of Σ_t b_t, where b_t = exp(bias at the distance t).

A model is sure to extrapolate where that series converges (Qin et al. 2023, Exploring Transformer Extrapolation,
theorem 3.4). However many terms are added up, they say nothing of the infinitely many after them, so an encoding
declares the form of its bias far away (`Encoding.bias_tails`), with the numbers that its parameters give it.

A form that converges knows the integral of b, and so bounds what is left of the series after any number of terms: b
falls and is convex from `start` on, so each term b_t lies below the integral over [t − 1/2, t + 1/2], and the sum from
t on above the integral from t and half of that over [t, t + 1] (by the trapezium's rule, and because b falls).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SeriesTail:
    """The end of one head's series."""

    converges: bool | None
    """Does the series converge? None if the encoding does not say."""
    reason: str
    """Why, with the head's numbers: a clause without a full stop."""
    log_integral: Callable[[float], float] | None = None
    """ln ∫_x^∞ b(t) dt for x ≥ start; None for a series that is not known to converge."""
    start: float = 0.0
    """From here on b falls and is convex."""

    def log_remainder_bounds(self, first: int) -> tuple[float, float]:
        """A lower and an upper bound of ln Σ_{t ≥ first} b_t; infinite where nothing better is known."""
        if self.converges is False:
            return math.inf, math.inf
        if self.log_integral is None or first - 0.5 < self.start:
            return -math.inf, math.inf
        here, next_ = self.log_integral(first), self.log_integral(first + 1)
        if math.isinf(here):
            return -math.inf, -math.inf
        return here + math.log1p(-0.5 * math.expm1(next_ - here)), self.log_integral(first - 0.5)


def windowed_tail(window: int) -> SeriesTail:
    """b is 0 from some distance on, which a sum of more terms than that has seen."""
    reason = f"b is 0 outside the window of {window:,} keys"
    return SeriesTail(True, reason, lambda x: -math.inf, window - 0.5)


def unknown_tail(
    reason: str = "its encoding does not declare how the bias ends (Encoding.bias_tails)",
) -> SeriesTail:
    """Of a bias whose encoding declares nothing, or cannot know."""
    return SeriesTail(None, reason)


def constant_tail(value: float, reason: str) -> SeriesTail:
    """b stays at or above `value` for ever, or comes back to it: Σ b diverges."""
    return SeriesTail(False, f"{reason}, so b does not tend to 0 (it stays at {value:.3g})")


def power_tail(exponent: float, rate: float = 1.0, inner: float = 1.0, *, decay_name: str | None = None) -> SeriesTail:
    """b = (1 + rate·t^inner)^(−exponent), which converges if exponent·inner > 1.

    Args:
        decay_name: the name of exponent·inner, for the reason, where it is a parameter.
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
        # (1 + u)^−p = u^−p·(1 + 1/u)^−p with u = rate·t^inner, and the second factor as a binomial series in 1/u.
        log_u = math.log(rate) + inner * math.log(x)
        term, total = 1.0, 0.0
        for k in range(60):
            total += term / (inner * (exponent + k) - 1)
            term *= -(exponent + k) / (k + 1) * math.exp(-log_u)
        return -exponent * log_u + math.log(x) + math.log(total)

    start = 0.0 if inner == 1 else _root(10 * max(1.0, exponent) / rate, inner)
    reason = (
        f"n^(−{decay:.4g})" if decay_name is None else f"n^(−{decay_name}), and {decay_name} = {decay:.4g} is above 1"
    )
    return SeriesTail(True, f"b falls as {reason}", log_integral, start)


def exponential_tail(rate: float, exponent: float = 1.0) -> SeriesTail:
    """b = exp(−rate·t^exponent) with rate > 0 and 0 < exponent ≤ 2: it converges, for exponents below 1 too."""

    def log_integral(x: float) -> float:
        a = 1 / exponent
        return _log_upper_gamma(a, rate * x**exponent) + math.log(a) - a * math.log(rate)

    start = _root((exponent - 1) / (exponent * rate), exponent) if exponent > 1 else 0.0
    power = "n" if exponent == 1 else f"n^{exponent:.4g}"
    return SeriesTail(True, f"b = exp(−{rate:.4g}·{power}) falls faster than any power of n", log_integral, start)


def squared_log_tail(rate: float = 1.0, offset: float = 1.0) -> SeriesTail:
    """b = exp(−ln²(offset + rate·t)) with an offset of at least 1."""

    def log_integral(x: float) -> float:
        z = math.log(offset + rate * x) - 0.5
        scaled = torch.special.erfcx(torch.tensor(z, dtype=torch.float64))
        return 0.25 + 0.5 * math.log(math.pi) - math.log(2) + math.log(scaled) - z * z - math.log(rate)

    b = "exp(−ln²(n + 1))" if (rate, offset) == (1, 1) else f"exp(−ln²({offset:g} + {rate:.4g}·n))"
    start = max(0.0, (math.exp(0.5) - offset) / rate)
    return SeriesTail(True, f"b = {b} falls faster than any power of n", log_integral, start)


def _root(value: float, exponent: float) -> float:
    """value^(1/exponent), infinite where that is too large for a float."""
    logarithm = math.log(value) / exponent
    return math.exp(logarithm) if logarithm < 700 else math.inf


def _log_upper_gamma(a: float, s: float) -> float:
    """ln Γ(a, s), the upper incomplete gamma function, for a > 0 and s ≥ 0."""
    if s < a + 1:
        ratio = torch.special.gammaincc(*torch.tensor([a, s], dtype=torch.float64))
        return math.lgamma(a) + math.log(ratio)
    # Legendre's continued fraction, evaluated from the front (Lentz).
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

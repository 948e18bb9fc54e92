"""Declared series tails of encodings, compared with high-precision sums and the papers' conclusions."""

import math

import mpmath
import pytest
import torch
from position_methods import SHAPE, build

from megatron.position import registry, series_tails
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims

HEADS = SHAPE.num_heads
CONVERGING = {"alibi", "bam", "kerple_power", "kerple_bias_weight", "type1", "type2"}
BY_PARAMETERS = {"kerple_log", "kerple_log3"}
TYPES = ("type1", "type2")
BY_INPUT = {name for name in registry.list_encodings() if registry.load_encoding_class(name).overrides_hook("gate")}
"""Encodings whose decay depends on the input; the others diverge."""


@pytest.mark.parametrize("name", registry.list_encodings())
def test_every_encoding_declares_the_end_of_each_head(name: str) -> None:
    encoding, _ = build(name, "none")
    found = encoding.bias_tails()
    assert len(found) == HEADS
    if name in BY_PARAMETERS:
        decay = encoding.r1() * (encoding.r3() if name == "kerple_log3" else 1)
        assert [tail.converges for tail in found] == (decay > 1).tolist()
    else:
        assert {tail.converges for tail in found} == {None if name in BY_INPUT else name in CONVERGING}


FORMS = [*((name, {}) for name in sorted(CONVERGING | BY_PARAMETERS)), *((t, {"released": True}) for t in TYPES)]


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_a_declared_form_is_that_of_the_table(name: str, options: dict[str, bool]) -> None:
    """The bias equals minus the derivative of the integral declared by the form."""
    shape = AttentionDims(num_heads=8, head_dim=8, hidden_size=64, train_length=16, max_length=16)
    encoding = registry.build_encoding(name, shape, options).double()
    with torch.no_grad():
        for place, parameter in enumerate(encoding.parameters()):
            parameter.copy_(torch.linspace((1.2, 0.3, 1.4, 0.5)[place], (2.5, 0.9, 1.9, 1.5)[place], 8))
    x, step = 900.0, 0.5
    bias = encoding.table(torch.tensor([x])).bias[:, 0].tolist()
    for tail, expected in zip(encoding.bias_tails(), bias, strict=True):
        assert tail.log_integral is not None
        assert tail.start < x
        near, far = tail.log_integral(x - step), tail.log_integral(x + step)
        # Midpoint rule with step h: relative error h²/24·|b''/b|, which is below (largest exponent/x)².
        rate = max(abs(expected) / x * 2, 4 / x)
        assert near + math.log(-math.expm1(far - near)) == pytest.approx(expected, abs=(step * rate) ** 2 + 1e-6)


POWERS = [(2.0, 1.0, 1.0), (1.5, 0.5, 1.0), (1.05, 0.01, 1.0), (3.0, 0.2, 0.6), (0.8, 0.7, 1.9), (20.0, 1.0, 1.0)]
EXPONENTIALS = [(1.0, 1.0), (1 / 256, 1.0), (0.1, 0.5), (0.05, 0.3), (0.01, 1.9), (2.0, 2.0)]


@pytest.mark.parametrize("parameters", POWERS)
@pytest.mark.parametrize("first", [200, 5_000])
def test_bounds_of_powers_hold_the_sum(parameters: tuple[float, float, float], first: int) -> None:
    exponent, rate, inner = parameters
    tail = series_tails.power_tail(exponent, rate, inner)
    first = max(first, math.ceil(tail.start) + 1)
    if inner == 1:  # Hurwitz zeta function
        exact = mpmath.mpf(rate) ** -exponent * mpmath.zeta(exponent, first + 1 / mpmath.mpf(rate))
    else:
        exact = _sum(lambda t: (1 + rate * t**inner) ** -mpmath.mpf(exponent), first)
    _holds(tail, first, exact, narrow=(exponent * inner / first) ** 2 + 1e-9)


@pytest.mark.parametrize("parameters", EXPONENTIALS)
@pytest.mark.parametrize("first", [3, 40, 700])
def test_bounds_of_exponentials_hold_the_sum(parameters: tuple[float, float], first: int) -> None:
    rate, exponent = parameters
    tail = series_tails.exponential_tail(rate, exponent)
    if first - 0.5 < tail.start:
        assert tail.log_remainder_bounds(first) == (-math.inf, math.inf)
        return
    exact = _sum(lambda t: mpmath.exp(-mpmath.mpf(rate) * mpmath.mpf(t) ** exponent), first)
    _holds(tail, first, exact, narrow=2 * rate * exponent * max(1.0, first ** (exponent - 1)))


@pytest.mark.parametrize("first", [2, 12, 300])
def test_bounds_of_the_squared_logarithm_hold_the_sum(first: int) -> None:
    exact = _sum(lambda t: mpmath.exp(-(mpmath.log(t + 1) ** 2)), first)
    _holds(series_tails.squared_log_tail(), first, exact, narrow=1.0)


def _sum(term, first: int) -> mpmath.mpf:
    """Compute Σ_{t ≥ first} by explicit terms and the Euler-Maclaurin formula, with an error far below float64."""
    with mpmath.workdps(30):
        stop = first + 400
        head = mpmath.fsum(term(t) for t in range(first, stop))
        rest = mpmath.quad(term, [stop, 2 * stop, 10 * stop, 1000 * stop, 10**6 * stop, 10**12 * stop, mpmath.inf])
        slope, third = (mpmath.diff(term, stop, order) for order in (1, 3))
        return head + rest + term(stop) / 2 - slope / 12 + third / 720


def _holds(tail: series_tails.SeriesTail, first: int, exact: mpmath.mpf, narrow: float) -> None:
    low, high = tail.log_remainder_bounds(first)
    rounding = 1e-12 * max(1.0, abs(low))
    assert low - rounding <= mpmath.log(exact) <= high + rounding
    assert high - low < narrow


def test_an_ended_series_has_no_rest() -> None:
    assert series_tails.windowed_tail(8).log_remainder_bounds(9) == (-math.inf, -math.inf)


def test_divergent_series_have_an_infinite_tail() -> None:
    assert series_tails.power_tail(1.0).log_remainder_bounds(5) == (math.inf, math.inf)


class Undeclared(Encoding):
    """User-defined encoding without a declared tail."""

    adds_bias = True

    def table(self, distances: torch.Tensor) -> ScoreTerms:
        return ScoreTerms(bias=-distances.expand(self.dims.num_heads, -1))


def test_a_bias_without_a_declaration_is_unknown() -> None:
    assert [tail.converges for tail in Undeclared(SHAPE).bias_tails()] == [None] * HEADS
    assert Undeclared(SHAPE).bias_tails()[0].log_remainder_bounds(10) == (-math.inf, math.inf)


@pytest.mark.parametrize(("exponent", "limit"), [(-0.5, "0"), (0.0, "−0.5")])
def test_bam_without_a_positive_exponent_diverges(exponent: float, limit: str) -> None:
    encoding = registry.build_encoding("bam", SHAPE, {"exponent_init": exponent})
    with torch.no_grad():
        encoding.log_scale.value.fill_(math.log(0.5))
    bias = encoding.table(torch.arange(1.0, 1e5)).bias
    for tail, lowest in zip(encoding.bias_tails(), bias.amin(-1).tolist(), strict=True):
        assert tail.converges is False
        assert f"far away the bias is {limit}" in tail.reason
        assert float(tail.reason.split("stays at ")[1].rstrip(")")) <= math.exp(lowest) + 5e-4  # three digits


def test_fire_never_falls_below_its_least_value() -> None:
    """FIRE's bias never falls below its declared minimum at any row and distance, by a fine search."""
    from megatron.position.token_range import ALL_HEADS, TokenRange

    encoding, _ = build("fire", "none")
    with torch.no_grad():
        for row in (15, 4095):
            bias = encoding.dense(TokenRange(row, 1), TokenRange(0, row + 1), torch.zeros(1), ALL_HEADS).bias[:, 0]
            for tail, least in zip(encoding.bias_tails(), bias.amin(-1).tolist(), strict=True):
                value = float(tail.reason.split("stays at ")[1].rstrip(")"))
                assert math.log(value) <= least + 0.01  # three digits are shown


def test_sandwich_comes_back() -> None:
    """Sandwich does not decay: its mean over many distances is at least exp(−k·m/2), but a convergent series has mean
    zero.
    """
    encoding = registry.build_encoding("sandwich", SHAPE, {"dimension": 16})
    b = encoding.table(torch.arange(1e6, dtype=torch.float64)).bias.exp()
    for head in range(HEADS):
        k = HEADS / (8 * (head + 1))
        assert b[head, 500_000:].mean() >= math.exp(-k * 8)
        assert b[head, 500_000:].max() > 2 * math.exp(-k * 8)

"""The learning rate against its formula, written down a second time."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.options.training import AdamParams, OptimizerChoice, OptimizerOptions
from megatron.training.optimizer import build_schedule


def options(**keys: object) -> OptimizerOptions:
    return OptimizerOptions(optimizer=OptimizerChoice(params=AdamParams(lr=1e-3)), **keys)


def test_known_values() -> None:
    linear = build_schedule(options(warmup=0.1, min_lr=1e-4, lr_decay_iters=100), train_iters=500)
    assert linear(0) == pytest.approx(1e-3 / 11)
    assert linear(9) == pytest.approx(1e-3 * 10 / 11)
    assert linear(10) == pytest.approx(1e-3)
    assert linear(55) == pytest.approx((1e-3 + 1e-4) / 2)
    assert linear(100) == linear(499) == 1e-4
    cosine = build_schedule(options(warmup=0.0, lr_decay_style="cosine"), train_iters=100)
    assert cosine(0) == 1e-3
    assert cosine(50) == pytest.approx(5e-4)
    assert cosine(25) == pytest.approx(1e-3 * (1 + math.sqrt(0.5)) / 2)
    assert cosine(100) == 0.0
    constant = build_schedule(options(warmup=0.5, lr_decay_style="constant", min_lr=1e-4), train_iters=10)
    assert [constant(step) for step in (4, 5, 9, 1000)] == pytest.approx([1e-3 * 5 / 6, 1e-3, 1e-3, 1e-3])

    # 1706.03762, equation 3, without the model's width: the rate falls as 1/√s, s counted from 1.
    inverse = build_schedule(options(warmup=0.03, lr_decay_style="inverse_sqrt", min_lr=1e-4), train_iters=100)
    assert inverse(2) == pytest.approx(1e-3 * 3 / 4)
    assert [inverse(step) for step in (3, 15, 63)] == pytest.approx([1e-3, 1e-3 / 2, 1e-3 / 4])
    assert inverse(10**6) == 1e-4


@given(
    style=st.sampled_from(["cosine", "linear", "constant", "inverse_sqrt"]),
    steps=st.integers(1, 400),
    warmup=st.floats(0, 1),
    floor=st.floats(0, 1e-3),
)
def test_it_rises_then_never_rises_again_and_ends_at_min_lr(
    style: str, steps: int, warmup: float, floor: float
) -> None:
    schedule = build_schedule(options(warmup=warmup, min_lr=floor, lr_decay_style=style, lr_decay_iters=steps), 7)
    rates = [schedule(step) for step in range(steps + 50)]
    peak = round(warmup * steps)
    assert all(a < b for a, b in itertools.pairwise(rates[:peak]))
    assert all(a >= b for a, b in itertools.pairwise(rates[peak:]))
    assert all(0 < rate <= 1e-3 + 1e-12 for rate in rates[:peak])
    assert min(rates[peak:]) >= floor - 1e-12
    if style not in ("constant", "inverse_sqrt"):
        assert rates[steps:] == [floor] * 50

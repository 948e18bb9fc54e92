"""Learning rate of every step, compared with the papers' formulas in float64."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.execution import build_stages
from megatron.config.load import load_config
from megatron.config.stages import Stage
from megatron.options.optimizer import OptimizerChoice, OptimizerOptions, OptimizerParams
from megatron.training.schedule import (
    LearningRateSchedule,
    build_schedule,
    describe_late_warmup,
    describe_rate_jump,
)
from megatron.utils.errors import UserError


def options(**keys: object) -> OptimizerOptions:
    return OptimizerOptions(optimizer=OptimizerChoice(params=OptimizerParams(lr=1e-3)), **keys)


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

    # 1706.03762, equation 3, without the model's width: the rate decreases as 1/√s, with s counted from 1.
    inverse = build_schedule(options(warmup=0.03, lr_decay_style="inverse_sqrt", min_lr=1e-4), train_iters=100)
    assert inverse(2) == pytest.approx(1e-3 * 3 / 4)
    assert [inverse(step) for step in (3, 15, 63)] == pytest.approx([1e-3, 1e-3 / 2, 1e-3 / 4])
    assert inverse(10**6) == 1e-4


@given(
    style=st.sampled_from(["cosine", "linear", "constant", "inverse_sqrt", "wsd", "infinite"]),
    final=st.sampled_from(["linear", "minus_sqrt", "cosine", "exponential"]),
    cooldown=st.sampled_from(["cosine", "inverse_sqrt"]),
    steps=st.integers(1, 400),
    warmup=st.floats(0, 1),
    floor=st.floats(1e-6, 5e-4),
    shares=st.tuples(st.integers(0, 400), st.integers(0, 400)),
    first_step=st.integers(0, 10**6),
)
def test_it_rises_then_never_rises_again_and_ends_at_min_lr(
    style: str, final: str, cooldown: str, steps: int, warmup: float, floor: float, shares: tuple[int, int],
    first_step: int,
) -> None:  # fmt: skip
    keys = {
        "warmup": warmup, "min_lr": floor, "lr_decay_style": style, "lr_decay_iters": steps,
        "lr_wsd_decay_style": final, "lr_wsd_decay_iters": shares[0] or None, "constant_lr": max(floor, 5e-4),
        "lr_cooldown_style": cooldown, "lr_cooldown_iters": shares[0], "lr_anneal_iters": 0,
    }  # fmt: skip
    if style == "infinite" and round(warmup * steps) + shares[0] < steps:
        keys["lr_anneal_iters"] = min(shares[1], steps - shares[0] - round(warmup * steps))
    schedule = build_schedule(options(**keys), 7, first_step)
    rates = [schedule(first_step + step) for step in range(steps + 50)]
    peak = round(warmup * steps)
    assert all(a < b for a, b in itertools.pairwise(rates[:peak]))
    assert all(a >= b - 1e-15 for a, b in itertools.pairwise(rates[peak:]))
    assert all(0 < rate <= 1e-3 + 1e-12 for rate in rates[:peak])
    assert min(rates[peak:]) >= floor - 1e-12
    if style in ("cosine", "linear", "wsd") or keys["lr_anneal_iters"]:
        assert rates[steps:] == pytest.approx([floor] * 50, rel=1e-12)


@pytest.mark.parametrize("style", ["linear", "minus_sqrt", "cosine", "exponential"])
@pytest.mark.parametrize("floor", [0.0, 1e-4])
def test_wsd_matches_the_papers(style: str, floor: float) -> None:
    """WSD: MiniCPM's three phases (2404.06395, section 4.2), the cooldowns of 2405.18392, section 3.1, and
    Megatron's.
    """
    peak, warmup, total, decay = 1e-3, 20, 500, 80
    schedule = build_schedule(
        options(
            lr_decay_style="wsd", lr_wsd_decay_style=style, lr_wsd_decay_iters=decay, min_lr=floor,
            lr_warmup_iters=warmup,
        ),
        total,
    )  # fmt: skip
    n = np.arange(total + 1, dtype=np.float64)
    x = (n - (total - decay)) / decay
    falls = {
        "linear": 1 - x,
        "minus_sqrt": 1 - np.sqrt(np.maximum(x, 0)),
        "cosine": 0.5 + 0.5 * np.cos(np.pi * x),
        "exponential": np.exp2(1 - x) - 1,
    }[style]
    # Warmup counts its first step as 1 of w + 1, so that no step has a rate of zero (GPT-NeoX #1379).
    expected = np.where(
        n < warmup, peak * (n + 1) / (warmup + 1), np.where(x <= 0, peak, floor + (peak - floor) * falls)
    )
    np.testing.assert_allclose([schedule(int(step)) for step in n], expected, rtol=1e-12, atol=1e-18)
    share = build_schedule(
        options(lr_decay_style="wsd", lr_wsd_decay_style=style, lr_wsd_decay_fraction=0.16, min_lr=floor, warmup=0.04),
        total,
    )
    assert share == schedule


@pytest.mark.parametrize("cooldown", ["cosine", "inverse_sqrt"])
def test_infinite_matches_the_paper(cooldown: str) -> None:
    """Infinite schedule (2403.08763, section 7.4): warmup, cooldown to a constant rate, that rate, exponential
    annealing.
    """
    peak, constant, floor = 1e-3, 4e-4, 1e-5
    warmup, cooled, total, anneal = 10, 110, 400, 50
    keys = {
        "lr_decay_style": "infinite", "constant_lr": constant, "min_lr": floor, "lr_warmup_iters": warmup,
        "lr_cooldown_iters": cooled - warmup, "lr_cooldown_style": cooldown,
    }  # fmt: skip
    t = np.arange(total + 1, dtype=np.float64)
    x = np.clip((t - warmup) / (cooled - warmup), 0, 1)
    h = 1 / np.sqrt(1 + 10 * x) - 1
    down = {
        "cosine": constant + (peak - constant) / 2 * (1 + np.cos(np.pi * x)),
        "inverse_sqrt": peak + (constant - peak) / (1 / np.sqrt(11) - 1) * h,
    }[cooldown]
    trunk = np.where(t < warmup, peak * (t + 1) / (warmup + 1), down)
    y = np.maximum(0, (t - (total - anneal)) / anneal)
    whole = trunk * (floor / constant) ** y
    trunk_schedule = build_schedule(options(**keys), total)
    np.testing.assert_allclose([trunk_schedule(int(step)) for step in t], trunk, rtol=1e-12)
    np.testing.assert_allclose(trunk_schedule(10**7), constant, rtol=1e-15)  # no end
    annealed = build_schedule(options(**keys, lr_anneal_iters=anneal), total)
    np.testing.assert_allclose([annealed(int(step)) for step in t], whole, rtol=1e-12)
    # Restarted from another step.
    again = build_schedule(options(**keys, lr_anneal_iters=anneal), 1000 + total, first_step=1000)
    assert [again(1000 + int(step)) for step in t] == [annealed(int(step)) for step in t]


def test_a_decay_added_to_a_trunk_is_not_a_jump() -> None:
    trunk = build_schedule(options(lr_decay_style="wsd", lr_warmup_iters=2, lr_decay_iters=1000), 1000)
    branch = build_schedule(options(lr_decay_style="wsd", lr_warmup_iters=2, lr_wsd_decay_iters=50), 550)
    assert describe_rate_jump(trunk, branch, 500) is None
    assert [branch(step) for step in range(501)] == [trunk(step) for step in range(501)]
    late = describe_rate_jump(trunk, LearningRateSchedule(1e-3, 0.0, 2, 550, "wsd", 100, "linear"), 500)
    assert "drops to 5.00e-04, because its decay now ends at step 550" in (late or "")


def stages(*keys: str) -> tuple[Stage, ...]:
    shape = ("num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "optimizer.params.lr=1e-3")
    return build_stages(load_config([], [*shape, *keys]).config)


STYLES = {"linear": (), "cosine": (), "constant": (), "inverse_sqrt": (), "infinite": ("constant_lr=1e-4",)}


@pytest.mark.parametrize("style", STYLES)
def test_a_too_long_warmup_is_reported_for_every_schedule(style: str) -> None:
    keys = (f"lr_decay_style={style}", *STYLES[style])
    assert describe_late_warmup(stages("train_iters=5", "lr_warmup_iters=30", *keys)) == (
        "lr_warmup_iters 30: warm-up does not end before train_iters 5; the rate reaches 16% of 0.001",
    )
    assert describe_late_warmup(stages("train_iters=100", "lr_warmup_iters=30", *keys)) == ()
    assert describe_late_warmup(stages("train_iters=4", "warmup=1.0", *keys)) == (
        "warmup 1 (4 steps): warm-up does not end before train_iters 4; the rate reaches 80% of 0.001",
    )


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_a_warmup_longer_than_the_decay_is_reported(style: str) -> None:
    keys = ("train_iters=100", "lr_warmup_iters=30", "lr_decay_iters=10", "min_lr=1e-5", f"lr_decay_style={style}")
    assert describe_late_warmup(stages(*keys)) == (
        "lr_warmup_iters 30: warm-up ends after lr_decay_iters 10, which leaves no decay: the rate drops "
        "from 9.68e-04 to 1.00e-05 at step 30",
    )
    assert describe_late_warmup(stages(*keys, "lr_decay_style=constant")) == ()


def test_a_too_long_warmup_of_a_stage_is_reported() -> None:
    changes = "stages=[{until: 50}, {lr_decay_style: cosine, lr_warmup_iters: 70}]"
    (line,) = describe_late_warmup(stages("train_iters=100", "train_batch_size=1", "save=runs/a", changes))
    assert line.startswith("lr_warmup_iters 70: warm-up does not end before its last step 50; the rate reaches 70% of")


def test_wsd_errors_name_the_given_values() -> None:
    with pytest.raises(
        UserError, match=r"lr_warmup_iters 30 \+ lr_wsd_decay_fraction 0.1 \(steps: 1\) are more steps than"
    ):
        stages("train_iters=5", "lr_warmup_iters=30", "lr_decay_style=wsd")


def test_the_difference_of_linear_decay_is_noted_for_gpt_neox_files() -> None:
    shape = ("num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "min_lr=1e-5")
    output = [note for note in load_config([], [*shape, "attention_config=[[[global], 1]]"]).notes if "linear" in note]
    assert output == [
        "command line: lr_decay_style linear decays to min_lr 1e-05, as in Megatron-LM; GPT-NeoX "
        "decays toward 0 and stops at min_lr"
    ]
    for keys in (shape, (*shape, "attention_config=[[[global], 1]]", "min_lr=0.0")):
        assert not any("linear" in note for note in load_config([], keys).notes)

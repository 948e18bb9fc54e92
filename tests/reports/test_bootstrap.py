"""Intervals, compared with a plain loop, with all possible resamples, and by their coverage of a known truth."""

import itertools
import math
import random
import statistics
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.reports import bootstrap
from megatron.reports.bootstrap import CONFIDENCE_LEVEL, NUM_RESAMPLES, draw_bootstrap_means


class Intervals(NamedTuple):
    nll: np.ndarray  # [K, 2]
    change: np.ndarray  # of each row from the first


def intervals(sums: np.ndarray, counts: np.ndarray, **choices: int) -> Intervals | None:
    """Return the intervals of each row's mean, and of its difference from the first row."""
    draws = draw_bootstrap_means(sums, counts, **choices)
    if draws is None:
        return None
    return Intervals(
        *(np.array([bootstrap.compute_percentile_interval(row) for row in rows]) for rows in (draws, draws - draws[0]))
    )


def quantiles(values: list[float], weights: list[float]) -> tuple[float, float]:
    """Return the smallest values with at least 2.5% and 97.5% of the cumulative weight."""
    ordered = sorted(zip(values, weights, strict=True))
    reached = list(itertools.accumulate(weight for _, weight in ordered))
    low, high = (
        next(value for (value, _), sum_ in zip(ordered, reached, strict=True) if sum_ >= share * reached[-1])
        for share in ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2)
    )
    return low, high


def test_against_every_possible_resample() -> None:
    sums, counts = [[3.0, 9.0, 2.0, 5.5], [2.0, 9.5, 4.0, 7.0]], [2, 3, 1, 2]
    means: list[list[float]] = [[], []]
    for drawn in itertools.product(range(4), repeat=4):
        for length in range(2):
            means[length].append(sum(sums[length][b] for b in drawn) / sum(counts[b] for b in drawn))
    differences = [after - before for before, after in zip(*means, strict=True)]
    found = intervals(np.array(sums), np.array(counts), num_resamples=200_000)
    alike = [1.0] * 4**4
    # 256 resamples have probabilities of at least 1/256, so a quantile is exact except at a jump.
    assert found.nll[0] == pytest.approx(quantiles(means[0], alike))
    assert found.nll[1] == pytest.approx(quantiles(means[1], alike))
    assert found.change[1] == pytest.approx(quantiles(differences, alike))
    assert found.change[0].tolist() == [0, 0]


def test_against_a_plain_loop() -> None:
    generator = random.Random(1)
    counts = [generator.randint(1, 9) for _ in range(20)]
    sums = [[generator.gauss(2, 0.5) * count for count in counts] for _ in range(3)]
    drawn: list[list[float]] = [[], [], []]
    for _ in range(20_000):
        chosen = [generator.randrange(20) for _ in range(20)]
        for length in range(3):
            drawn[length].append(sum(sums[length][b] for b in chosen) / sum(counts[b] for b in chosen))
    found = intervals(np.array(sums), np.array(counts))
    for length in range(3):
        pairs = [(found.nll[length], drawn[length])]
        if length:
            pairs.append((found.change[length], [a - b for a, b in zip(drawn[length], drawn[0], strict=True)]))
        for ends, values in pairs:
            # A quantile q of n draws has standard error √(q(1 − q)/n)/density; the density at 2.5% of a normal is
            # 0.058/σ.
            scatter = math.sqrt(0.025 * 0.975 * (1 / NUM_RESAMPLES + 1 / 20_000)) / 0.058 * statistics.stdev(values)
            ordered = sorted(values)
            assert ends == pytest.approx([ordered[500], ordered[-500]], abs=5 * scatter)


def test_the_truth_is_covered_as_often_as_promised() -> None:
    generator = np.random.default_rng(3)
    repetitions, blocks = 400, 64
    covered = np.zeros(2)
    for _ in range(repetitions):
        hard = generator.normal(2, 0.4, blocks)  # of a block, at both lengths
        counts = generator.integers(40, 65, blocks)
        before, after = hard, hard + generator.normal(0.03, 0.1, blocks)
        found = intervals(np.array([before * counts, after * counts]), counts, num_resamples=1000)
        covered += [found.nll[0, 0] < 2 < found.nll[0, 1], found.change[1, 0] < 0.03 < found.change[1, 1]]
    # A fraction of 400 has standard error √(0.95 · 0.05/400) = 1.1%; with 64 blocks the percentile method is 1% too
    # low.
    assert np.all(np.abs(covered / repetitions - CONFIDENCE_LEVEL) < 0.01 + 3 * 0.011)


def test_difficulty_that_both_lengths_share_cancels() -> None:
    generator = np.random.default_rng(4)
    counts = np.full(30, 8)
    gain = generator.normal(-0.02, 0.01, 30)
    narrow, wide = (
        intervals(np.array([hard * 8, (hard + gain) * 8]), counts)
        for hard in (generator.normal(2, 0.01, 30), generator.normal(2, 1.0, 30))
    )
    assert np.ptp(wide.nll[0]) > 50 * np.ptp(narrow.nll[0])
    assert wide.change[1] == pytest.approx(narrow.change[1], abs=1e-12)
    assert wide.change[1, 1] < 0  # so the improvement is detected, at 1/50 of the spread of blocks


@given(
    st.integers(2, 12).flatmap(
        lambda blocks: st.tuples(
            st.lists(st.floats(0, 50), min_size=2 * blocks, max_size=2 * blocks),
            st.lists(st.integers(0, 20), min_size=blocks, max_size=blocks).filter(lambda n: sum(map(bool, n)) > 1),
        )
    )
)
def test_intervals_are_ordered_repeatable_and_within_the_blocks(drawn: tuple[list[float], list[int]]) -> None:
    losses, counts = np.array(drawn[0]).reshape(2, -1), np.array(drawn[1])
    first = intervals(losses * counts, counts, num_resamples=200)
    second = intervals(losses * counts, counts, num_resamples=200)
    assert np.array_equal(first.nll, second.nll)
    assert np.array_equal(first.change, second.change)
    assert np.all(first.nll[:, 0] <= first.nll[:, 1])
    for row, of_length in zip(first.nll, losses[:, counts > 0], strict=True):
        assert of_length.min() - 1e-9 <= row[0]
        assert row[1] <= of_length.max() + 1e-9


def test_work_in_pieces_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, counts = np.random.default_rng(5).random((3, 40)) * 9, np.full(40, 4)
    whole = intervals(sums, counts)
    monkeypatch.setattr(bootstrap, "MAX_DRAWS_PER_CHUNK", 40 * 77)
    pieces = intervals(sums, counts)
    assert np.array_equal(whole.nll, pieces.nll)
    assert np.array_equal(whole.change, pieces.change)


def test_one_block_has_no_interval() -> None:
    assert intervals(np.ones((2, 1)), np.array([4])) is None
    assert intervals(np.array([[1.0, 0.0, 0.0]]), np.array([4, 0, 0])) is None
    assert intervals(np.array([[1.0, 0.0, 2.0]]), np.array([4, 0, 3])) is not None

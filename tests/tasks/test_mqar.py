"""Multi-query associative recall, checked by reading sequences from left to right."""

import numpy as np
import pytest

from megatron.data.tasks import task_config
from megatron.utils.errors import UserError


def drawn(count: int, length: int, seed: int = 0, **options: float):
    return task_config.build_task("mqar", options).sample_batch(np.random.default_rng(seed), count, length)


@pytest.mark.parametrize(("length", "options"), [(64, {}), (32, {}), (256, {"pairs": 64}), (16, {"pairs": 2})])
def test_values_follow_from_the_pairs(length: int, options: dict[str, int]) -> None:
    pairs, found = options.get("pairs", 8), drawn(300, length, **options)
    for tokens, labels, asked in zip(found.tokens, found.labels, found.loss_mask, strict=True):
        known = dict(zip(tokens[: 2 * pairs : 2].tolist(), tokens[1 : 2 * pairs : 2].tolist(), strict=True))
        assert len(known) == len(set(known.values())) == pairs
        assert all(1 <= key < 4096 <= value < 8192 for key, value in known.items())
        queries = np.flatnonzero(asked)
        assert len(queries) == pairs
        assert queries.min() >= 2 * pairs
        assert not (queries % 2).any()
        assert {tokens[place] for place in queries} == set(known)
        assert all(labels[place] == known[tokens[place]] for place in queries)
    assert (found.loss_mask == found.accuracy_mask).all()


def test_gaps_follow_a_power_law_and_the_rest_is_noise() -> None:
    """Gaps follow a power law: for one pair, gap g has probability g^(a−1) over their sum; a = 1 is uniform."""
    for power in (0.01, 1.0):
        found = drawn(40_000, 22, pairs=1, power=power, vocabulary=64)
        gaps = (found.loss_mask.argmax(axis=1) - 2) // 2 + 1
        expected = np.arange(1.0, 11.0) ** (power - 1)
        expected /= expected.sum()
        shares = np.bincount(gaps, minlength=11)[1:] / len(gaps)
        assert np.abs(shares - expected).max() < 5 * (expected * (1 - expected) / 40_000).max() ** 0.5
    noise = found.tokens[:, 3::2]  # between the queries
    shares = np.bincount(noise.ravel(), minlength=64) / noise.size
    assert np.abs(shares - 1 / 64).max() < 5 * (1 / 64 / noise.size) ** 0.5


def test_several_gaps_are_drawn_one_after_the_other_without_repetition() -> None:
    """Several gaps are drawn in turn without replacement.

    With three gaps, two are drawn; the remaining one is g with the probability summed over the orders of the other two.
    """
    found = drawn(40_000, 10, pairs=2, power=0.01, vocabulary=64)
    chances = np.arange(1.0, 4.0) ** (0.01 - 1)
    chances /= chances.sum()
    left = [
        sum(
            chances[one] * chances[two] / (1 - chances[one])
            for one in range(3)
            for two in range(3)
            if len({one, two, out}) == 3
        )
        for out in range(3)
    ]
    taken = found.loss_mask[:, 4::2]
    assert taken.sum(axis=1).max() == 2
    shares = (~taken).mean(axis=0)
    assert np.abs(shares - left).max() < 5 * (0.25 / 40_000) ** 0.5


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"vocabulary": 9}, "must be even"),
        ({"vocabulary": 16, "pairs": 8}, "has 7 keys"),
        ({"pairs": 0}, "task_options.pairs is 0"),
        ({"power": 0.0}, "task_options.power is 0"),
        ({"piars": 3}, "did you mean pairs"),
    ],
)
def test_impossible_options_are_rejected(options: dict[str, float], why: str) -> None:
    with pytest.raises(UserError, match=why):
        task_config.build_task("mqar", options)


def test_lengths() -> None:
    task = task_config.build_task("mqar", {"pairs": 4})
    assert [length for length in range(1, 24) if task.describe_unsupported_length(length) is None] == [16, 18, 20, 22]
    assert task.get_baseline_accuracies(64) == {"one of the sequence's values": 0.25}

"""Needles, variables and word counts in generated text, solved by programs that read tokens from left to right."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megatron.data.tasks import task_config
from megatron.data.tasks.task import TaskBatch
from megatron.utils.errors import UserError

NEEDLES = {
    "niah_single": (1, 1, 1),
    "niah_multikey": (4, 1, 1),
    "niah_multivalue": (1, 4, 1),
    "niah_multiquery": (4, 1, 4),
}


def drawn(name: str, length: int, count: int = 200, seed: int = 0, **options: object) -> TaskBatch:
    task = task_config.build_task(name, options)
    batch = task.sample_batch(np.random.default_rng([seed, length]), count, length)
    assert batch.tokens.shape == batch.labels.shape == (count, task.get_sequence_length(length))
    assert (batch.loss_mask == batch.accuracy_mask).all()
    assert batch.tokens.min() >= 0
    assert batch.tokens.max() < task.vocab_size
    assert np.isin(batch.labels, task.answer_ids).all()
    return batch


def check_reading(batch: TaskBatch) -> None:
    """Check that each answer except the last is the next input if another answer follows."""
    asked = batch.loss_mask[:, :-1]
    follows = asked & batch.loss_mask[:, 1:]
    assert (batch.labels[:, :-1][follows] == batch.tokens[:, 1:][follows]).all()


def solve_needles(tokens: list[int], first_key: int, first_value: int, mark: int) -> list[int]:
    """Return the answers from a dictionary filled from left to right."""
    haystack, questions = tokens[: tokens.index(mark)], tokens[tokens.index(mark) :]
    known: dict[int, list[int]] = {}
    for key, value in pairwise(haystack):
        if first_key <= key < first_value:
            assert first_value <= value < mark
            known.setdefault(key, []).append(value)
    return [value for place, token in enumerate(questions) if token == mark for value in known[questions[place + 1]]]


@pytest.mark.parametrize("name", NEEDLES)
@pytest.mark.parametrize("options", [{}, {"noise_words": 3, "keys": 9, "values": 20}])
def test_needles(name: str, options: dict[str, int]) -> None:
    keys, values, asked = NEEDLES[name]
    noise, key_words, value_words = (
        options.get(each, size) for each, size in (("noise_words", 32), ("keys", 64), ("values", 64))
    )
    for length in (8, 9, 40, 300):
        batch = drawn(name, length, **options)
        check_reading(batch)
        for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.loss_mask, strict=True):
            found = solve_needles(tokens.tolist(), noise, noise + key_words, noise + key_words + value_words)
            assert labels[mask].tolist() == found
            assert len(found) == len(set(found)) == values * asked
            assert (tokens[:length] < noise).sum() == length - 2 * keys * values
            assert not mask[:length].any()


def test_several_values_of_several_keys_among_needles() -> None:
    options = {"num_needle_k": 3, "num_needle_v": 2, "num_needle_q": 2, "haystack": "needles", "noise_words": 5}
    for length in (12, 13, 60, 121):
        batch = drawn("niah_multikey", length, **options)
        check_reading(batch)
        for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.loss_mask, strict=True):
            assert labels[mask].tolist() == solve_needles(tokens.tolist(), 5, 69, 133)
            assert (tokens[:length] < 5).sum() == length % 2
            counts = Counter(token for token in tokens[:length].tolist() if 5 <= token < 69)
            assert sorted(counts.values()) == [1] * (length // 2 - 6) + [2] * 3


def test_needle_positions_are_uniform() -> None:
    batch = drawn("niah_single", 12, 22_000)
    places = (batch.tokens[:, :12] >= 32).argmax(axis=1)
    shares = np.bincount(places, minlength=11) / len(places)
    assert len(shares) == 11
    assert np.abs(shares - 1 / 11).max() < 5 * (10 / 121 / len(places)) ** 0.5


@pytest.mark.parametrize("name", NEEDLES)
@pytest.mark.parametrize("options", [{}, {"haystack": "needles", "keys": 300}])
def test_needles_at_a_depth(name: str, options: dict[str, object]) -> None:
    """The first requested key is at the given depth, and all answers are correct."""
    num_values, length = NEEDLES[name][1], 60
    task = task_config.build_task(name, options)
    assert task.has_depth
    first_value, mark = task.answer_ids.start, task.answer_ids.stop
    for depth in (0.0, 0.3, 0.5, 1.0):
        batch = task.sample_batch_at_depth(np.random.default_rng(3), 50, length, depth)
        assert batch.tokens.shape == (50, task.get_sequence_length(length))
        check_reading(batch)
        expected = round(depth * (length - 2 * num_values))
        for tokens, labels, asked in zip(*(array.tolist() for array in batch[:3]), strict=True):
            answers = [label for label, counts in zip(labels, asked, strict=True) if counts]
            assert answers == solve_needles(tokens, 32, first_value, mark)
            key = tokens[tokens.index(mark) + 1]
            assert tokens.index(key) in (expected, expected + 1)
            block = tokens[tokens.index(key) :][: 2 * num_values]
            assert block[::2] == [key] * num_values


def test_the_requested_key_is_uniform() -> None:
    batch = drawn("niah_multikey", 20, 8000)
    is_key = (batch.tokens[:, :20] >= 32) & (batch.tokens[:, :20] < 96)
    asked = batch.tokens[:, :20] == batch.tokens[:, 21:22]
    order = (is_key.cumsum(axis=1) * (asked & is_key)).max(axis=1) - 1
    shares = np.bincount(order, minlength=4) / len(order)
    assert np.abs(shares - 1 / 4).max() < 5 * (3 / 16 / len(order)) ** 0.5


def test_variables() -> None:
    """Variables as text, read with a regular expression: `NAME=SOURCE`."""
    for length, options in ((18, {}), (64, {}), (200, {"num_chains": 4, "num_hops": 3}), (30, {"num_hops": 0})):
        chains, hops = options.get("num_chains", 2), options.get("num_hops", 2)
        batch = drawn("variable_tracking", length, **options)
        check_reading(batch)
        for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.loss_mask, strict=True):
            words = ["n" * (t < 32) or "x" * (t < 96) or "v" * (t < 160) for t in tokens.tolist()]
            text = " ".join({160: "=", 161: "?"}.get(t, f"{w}{t}") for w, t in zip(words, tokens.tolist(), strict=True))
            haystack, question = text.split(" ? ")
            assignments = re.findall(r"(x\d+) = ([xv]\d+)", haystack)
            assert len(assignments) == len({name for name, _ in assignments}) == chains * (hops + 1)
            assert haystack.count("n") == length - 3 * len(assignments)
            reached, wanted = [question.split()[0]], []
            for name, source in assignments:  # assignments of a chain are in order
                if source == reached[-1]:
                    reached.append(name)
                    wanted.append(int(name[1:]))
            assert labels[mask].tolist() == wanted
            assert len(wanted) == hops + 1


@pytest.mark.parametrize(
    ("length", "options"), [(18, {}), (48, {}), (300, {}), (32, {"num_cw": 2, "freq_cw": 5, "freq_ucw": 2})]
)
def test_common_words(length: int, options: dict[str, int]) -> None:
    number, often, seldom = (
        options.get(name, value) for name, value in (("num_cw", 3), ("freq_cw", 6), ("freq_ucw", 1))
    )
    batch = drawn("common_words", length, **options)
    check_reading(batch)
    for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.loss_mask, strict=True):
        counts = Counter(tokens[:length].tolist())  # in order of first occurrence
        assert sorted(set(counts.values())) == sorted({often} | ({seldom} if length > number * often else set()))
        assert labels[mask].tolist() == [word for word, times in counts.items() if times == often]
        assert mask.sum() == number


@pytest.mark.parametrize(("length", "options"), [(32, {}), (64, {}), (1000, {}), (200, {"num_words": 5, "alpha": 1.0})])
def test_frequent_words(length: int, options: dict[str, float]) -> None:
    number, alpha = options.get("num_words", 3), options.get("alpha", 2.0)
    batch = drawn("frequent_words", length, **options)
    check_reading(batch)
    total = sum(rank**-alpha for rank in range(1, 66))
    for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.loss_mask, strict=True):
        counts = Counter(token for token in tokens[:length].tolist() if token < 64).most_common(number + 1)
        assert labels[mask].tolist() == [word for word, _ in counts[:number]]
        for rank, (_, times) in enumerate(counts, start=2):
            assert times == int(length * rank**-alpha / total)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("niah_multiquery", {"num_needle_k": 2}, "num_needle_q is 4, but num_needle_k is 2"),
        ("niah_multikey", {"keys": 3}, "num_needle_k is 4, but keys is 3"),
        ("niah_multivalue", {"values": 3}, "4 needles need that many values, but there are 3"),
        ("niah_single", {"haystack": "essay"}, "task_options.haystack is 'essay'"),
        ("variable_tracking", {"variables": 5}, "6 assignments need that many variables, but there are 5"),
        ("variable_tracking", {"values": 1}, "num_chains is 2, but values is 1"),
        ("common_words", {"freq_cw": 3, "freq_ucw": 3}, "freq_ucw is 3; it must be less than freq_cw, 3"),
        ("common_words", {"vocabulary": 2}, "num_cw is 3, but vocabulary is 2"),
        ("frequent_words", {"num_words": 64}, "num_words is 64; it must be less than the vocabulary, 64"),
    ],
)
def test_impossible_options_are_rejected(name: str, options: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=why):
        task_config.build_task(name, options)


@pytest.mark.parametrize(
    ("name", "options", "lengths", "supported"),
    [
        ("niah_multikey", {}, range(12), [8, 9, 10, 11]),
        ("niah_multikey", {"haystack": "needles", "keys": 6}, range(20), [8, 9, 10, 11, 12, 13]),
        ("variable_tracking", {}, range(20), [18, 19]),
        ("common_words", {"freq_ucw": 2, "vocabulary": 5}, range(30), [18, 20, 22]),
        ("frequent_words", {}, range(34), [*range(24, 26), *range(27, 34)]),
    ],
)
def test_lengths(name: str, options: dict[str, object], lengths: range, supported: list[int]) -> None:
    task = task_config.build_task(name, options)
    found = [length for length in lengths if task.describe_unsupported_length(length) is None]
    if name == "frequent_words":  # counts of the ranks 2 … 5, from the formula
        weights = [rank**-2.0 for rank in range(1, 66)]
        counts = [[int(n * weight / sum(weights)) for weight in weights[1:5]] for n in lengths]
        supported = [n for n, each in zip(lengths, counts, strict=True) if each == sorted(set(each), reverse=True)]
    assert found == supported
    assert task.describe_unsupported_length(lengths[0]) is not None


def test_chances() -> None:
    """Chance levels, stated in words, are estimated by sampling."""
    assert task_config.build_task("niah_multivalue").get_baseline_accuracies(64) == {"one of the needles' values": 0.25}
    assert task_config.build_task("niah_single").get_baseline_accuracies(64) == {}
    generator = np.random.default_rng(0)
    for name, length in (("common_words", 60), ("frequent_words", 64)):
        batch = drawn(name, length, 4000)
        rights = []
        for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.loss_mask, strict=True):
            left = [token for token in tokens[:length].tolist() if name == "common_words" or token < 64]
            for answer in labels[mask].tolist():
                rights.append(left[generator.integers(len(left))] == answer)
                left = [token for token in left if token != answer]
        (chance,) = task_config.build_task(name).get_baseline_accuracies(length).values()
        assert abs(np.mean(rights) - chance) < 5 * (chance / len(rights)) ** 0.5

"""Flip-flop and word problems, read token by token by a state machine."""

import math

import numpy as np
import pytest

from megatron.data.tasks import task_config


@pytest.mark.parametrize("ignore", [0.0, 0.1, 0.8, 0.98, 1.0])
def test_a_memory_of_one_bit_answers_flip_flop(ignore: float) -> None:
    task = task_config.build_task("flip_flop", {"ignore": ignore})
    for length in (4, 6, 64, 512):
        batch = task.sample_batch(np.random.default_rng(length), 100, length)
        assert batch.tokens.shape == (100, task.get_sequence_length(length)) == (100, length)
        for tokens, labels, mask in zip(batch.tokens.tolist(), batch.labels.tolist(), batch.loss_mask, strict=True):
            memory = None
            assert (tokens[0], tokens[-2]) == (0, 1)
            for place in range(0, length, 2):
                instruction, bit = tokens[place : place + 2]
                assert (instruction in (0, 1, 2), bit in (3, 4)) == (True, True)
                if instruction == 0:
                    memory = bit
                assert mask[place] == (instruction == 1)
                assert not mask[place + 1]
                if instruction == 1:
                    assert labels[place] == bit == memory
    assert [n for n in range(1, 9) if task.describe_unsupported_length(n) is None] == [4, 6, 8]


def test_flip_flop_has_the_distribution_of_the_paper() -> None:
    """Instructions between the first and the last: i with probability p, w and r with half of the rest; fair bits."""
    tokens = task_config.build_task("flip_flop").sample_batch(np.random.default_rng(1), 2000, 42).tokens
    between = tokens[:, 2:-2:2]
    shares = np.bincount(between.ravel(), minlength=3) / between.size
    assert np.abs(shares - [0.1, 0.1, 0.8]).max() < 5 * (0.16 / between.size) ** 0.5
    ignored = tokens[:, 3:-2:2][between == 2]
    assert abs((ignored == 4).mean() - 0.5) < 5 * (0.25 / ignored.size) ** 0.5


def parity(permutation: tuple[int, ...]) -> int:
    """Return the parity of the number of cycles with even length."""
    seen: set[int] = set()
    odd = 0
    for start in permutation:
        size, place = 0, start
        while place not in seen:
            seen.add(place)
            place, size = permutation[place], size + 1
        odd += size > 0 and size % 2 == 0
    return odd % 2


def list_elements(name: str) -> list[tuple[int, ...]]:
    """List the elements by counting in base 5."""
    every = [tuple(code // 5**k % 5 for k in range(4, -1, -1)) for code in range(5**5)]
    every = [element for element in every if len(set(element)) == 5]
    return [element for element in every if name.startswith("s5") or parity(element) == 0]


@pytest.mark.parametrize(("name", "order"), [("s5_word_problem", 120), ("a5_word_problem", 60)])
def test_products_move_five_things(name: str, order: int) -> None:
    task, elements = task_config.build_task(name), list_elements(name)
    assert task.vocab_size == len(task.answer_ids) == len(elements) == order
    for length in (1, 2, 7, 40):
        batch = task.sample_batch(np.random.default_rng(length), 200, length)
        assert batch.loss_mask.all()
        for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
            moved = list(range(5))
            for token, label in zip(tokens, labels, strict=True):
                moved = [elements[token][place] for place in moved]
                assert elements[label] == tuple(moved)
    elements_drawn = np.bincount(task.sample_batch(np.random.default_rng(0), 1000, order).tokens.ravel()) / 1000
    assert np.abs(elements_drawn - 1).max() < 5 * math.sqrt(1 / 1000)


def test_trivial_predictors() -> None:
    flip_flop = task_config.build_task("flip_flop", {"ignore": 0.5})
    batch = flip_flop.sample_batch(np.random.default_rng(0), 50, 40)
    (guess,) = flip_flop.compute_baseline_predictions(batch).values()
    for tokens, answers, mask in zip(batch.tokens, guess, batch.accuracy_mask, strict=True):
        assert all(answers[place] == tokens[place - 1] for place in np.flatnonzero(mask))
    word_problem, elements = task_config.build_task("a5_word_problem"), list_elements("a5")
    batch = word_problem.sample_batch(np.random.default_rng(0), 50, 6)
    (guess,) = word_problem.compute_baseline_predictions(batch).values()
    for tokens, answers in zip(batch.tokens.tolist(), guess.tolist(), strict=True):
        assert answers[0] == tokens[0]
        for before, now, answer in zip(tokens, tokens[1:], answers[1:], strict=False):
            assert elements[answer] == tuple(elements[now][place] for place in elements[before])

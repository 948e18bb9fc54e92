"""Addition, compared with Python's integers, in every notation."""

import numpy as np
import pytest

from megatron.data.tasks import task_config
from megatron.data.tasks.task import TaskBatch
from megatron.utils.errors import UserError

MARKS = "0123456789+"


def drawn(length: int, count: int = 200, **options: object) -> TaskBatch:
    task = task_config.build_task("addition", options)
    batch = task.sample_batch(np.random.default_rng(length), count, length)
    assert batch.tokens.shape == (count, task.get_sequence_length(length))
    assert batch.tokens.max() < task.vocab_size
    return batch


def read(tokens: list[int], letters: int) -> str:
    return "".join({letters: "$", letters + 1: "|", letters + 2: "."}.get(token) or MARKS[token] for token in tokens)


@pytest.mark.parametrize("order", ["plain", "reversed"])
@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_sums(order: str, length: int) -> None:
    batch = drawn(length, order=order)
    assert batch.position_ids is None
    for tokens, labels, mask, counted in zip(*batch[:4], strict=True):
        question, answer = read(tokens.tolist(), 11)[1:].split("|")
        one, other = question.split("+")
        assert len(one) == len(other) == length
        total = f"{int(one) + int(other):0{length + 1}d}"
        total = total if order == "plain" else total[::-1]
        assert answer == total
        assert read(labels[mask].tolist(), 11) == total + "."
        assert read(labels[counted].tolist(), 11) == total  # the full stop does not count


@pytest.mark.parametrize("order", ["plain", "reversed"])
def test_hints_mark_the_power_of_ten(order: str) -> None:
    batch = drawn(5, 400, order=order, index_hints=True, max_digits=7)
    firsts = set()
    for tokens, labels, mask, counted in zip(*batch[:4], strict=True):
        row = tokens.tolist()
        plus, bar = row.index(10), row.index(20)  # letters: 11 hints and 8 hints
        numbers = [row[1:plus], row[plus + 1 : bar], row[bar + 1 :]]
        units = numbers[0][-2]  # the hint of the last digit
        digits = [{hint - units: digit for hint, digit in zip(n[::2], n[1::2], strict=True)} for n in numbers]
        assert [sorted(each) for each in digits] == [[*range(5)], [*range(5)], [*range(6)]]
        one, other, total = (sum(digit * 10**power for power, digit in each.items()) for each in digits)
        assert one + other == total
        powers = [hint - units for hint in numbers[2][::2]]
        assert powers == (sorted(powers) if order == "reversed" else sorted(powers, reverse=True))
        assert labels[mask].tolist() == [*numbers[2], 21]
        assert labels[counted].tolist() == numbers[2][1::2]
        firsts.add(units)
    assert firsts == {11, 12, 13}  # 11 … 18 are the hints, of which six consecutive ones are needed


@pytest.mark.parametrize("order", ["plain", "reversed"])
def test_coupled_positions_mark_the_power_of_ten(order: str) -> None:
    """Coupled positions by Cho et al. (2024): $ at 0, the digits of 10^k at u − k, + and | at u + 1, u from n + 1
    on.
    """
    batch = drawn(3, 300, order=order, positions="coupled", max_digits=5)
    plain = drawn(3, 300, order=order)
    assert batch.position_ids is not None
    assert batch.position_ids.shape == batch.tokens.shape
    limit = task_config.build_task("addition", {"positions": "coupled", "max_digits": 5}).position_limit
    starts = set()
    for places, tokens in zip(batch.position_ids.tolist(), batch.tokens.tolist(), strict=True):
        u = places[3]
        assert places[:9] == [0, u - 2, u - 1, u, u + 1, u - 2, u - 1, u, u + 1]
        total = {u - place: digit for place, digit in zip(places[9:], tokens[9:], strict=True)}
        numbers = [int("".join(map(str, tokens[first : first + 3]))) for first in (1, 5)]
        assert sum(numbers) == sum(digit * 10**power for power, digit in total.items())
        assert sorted(total) == [0, 1, 2, 3]
        assert min(places[1:]) >= 1
        starts.add(u)
    assert starts == {4, 5, 6}
    assert limit == max(starts) + 2
    assert plain.tokens.shape == batch.tokens.shape


def test_the_floor_forgets_carries() -> None:
    for options in ({}, {"order": "reversed"}, {"order": "reversed", "index_hints": True}):
        batch = drawn(4, **options)
        (guess,) = task_config.build_task("addition", options).compute_baseline_predictions(batch).values()
        plus = int((batch.tokens[0] == 10).argmax())
        step = 2 if "index_hints" in options else 1
        for tokens, answers, counted in zip(batch.tokens, guess, batch.accuracy_mask, strict=True):
            one, other = tokens[step:plus:step], tokens[plus + step : 2 * plus : step]
            sums = [0, *((int(a) + int(b)) % 10 for a, b in zip(one, other, strict=True))]
            assert answers[counted].tolist() == (sums[::-1] if options else sums)


def test_rejected_options() -> None:
    with pytest.raises(UserError, match="are redundant"):
        task_config.build_task("addition", {"index_hints": True, "positions": "coupled"})
    task = task_config.build_task("addition", {"index_hints": True, "max_digits": 9})
    assert task.describe_unsupported_length(9) is None
    assert task.describe_unsupported_length(10) == "numbers have at most 9 digits (task_options.max_digits)"
    assert task_config.build_task("addition").describe_unsupported_length(1000) is None

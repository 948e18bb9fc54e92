"""Copying, reversing and n-gram lookup, read as strings."""

import numpy as np
import pytest

from megatron.data.tasks import task_config
from megatron.data.tasks.task import StringTask
from megatron.utils.errors import UserError

SYMBOLS = "abcdefghijklmnopqrstuvwxyz$|."


def written(name: str, count: int, length: int, **options: object) -> list[tuple[str, str]]:
    """Return the input of each sequence, and its expected answers by position."""
    task = task_config.build_task(name, options)
    assert isinstance(task, StringTask)
    drawn = task.sample_batch(np.random.default_rng(length), count, length)
    assert drawn.tokens.shape == (count, task.get_sequence_length(length))
    assert (drawn.loss_mask == drawn.accuracy_mask).all()
    lines = []
    for tokens, labels, asked in zip(drawn.tokens, drawn.labels, drawn.loss_mask, strict=True):
        read, wanted = ("".join(SYMBOLS[token] for token in row) for row in (tokens, labels[asked]))
        # Every answer except the last occurs one position later as input, as in language modeling.
        assert read[np.flatnonzero(asked)[0] + 1 :] + "." == wanted
        lines.append((read, wanted))
    return lines


@pytest.mark.parametrize("length", [1, 2, 26, 100])
def test_copying(length: int) -> None:
    for read, wanted in written("copy_string", 200, length):
        begin, string, copy = read[0], *read[1:].split("|")
        assert (begin, len(string)) == ("$", length)
        assert (string, wanted) == (copy, copy + ".")


@pytest.mark.parametrize("length", [11, 12, 40, 200])
def test_lookup(length: int) -> None:
    for read, wanted in written("ngram_lookup", 200, length):
        string, given = read[1:].split("|")
        given = given[:3]
        assert len(string) == length
        assert string.count(given) == 1
        assert wanted == string[string.index(given) + 3 :][:8] + "."
    for read, wanted in written("ngram_lookup", 200, length, query="prefix", ngram=2, answer=4):
        given, string, _ = read[1:].split("|")
        assert len(string) == length
        assert len(given) == 2
        places = [place for place in range(length) if string.startswith(given, place)]
        assert len(places) == 1
        assert wanted == string[places[0] + 2 :][:4] + "."


def test_all_positions_are_requested_equally_often() -> None:
    starts = [read[1:13].index(read[14:17]) for read, _ in written("ngram_lookup", 4000, 12, answer=6)]
    shares = np.bincount(starts, minlength=4) / len(starts)
    assert len(shares) == 4
    assert np.abs(shares - 1 / 4).max() < 5 * (3 / 16 / len(starts)) ** 0.5


def test_lengths_without_an_input() -> None:
    lookup = task_config.build_task("ngram_lookup", {"letters": 2, "ngram": 2, "answer": 1})
    assert [length for length in range(40) if lookup.describe_unsupported_length(length) is None] == list(range(3, 17))
    assert task_config.build_task("copy_string").describe_unsupported_length(0) is not None


@pytest.mark.parametrize("length", [1, 2, 12, 61])
def test_strings_that_repeat_themselves(length: int) -> None:
    for name, order in (("copy_repeats", 1), ("reverse_repeats", -1)):
        for read, wanted in written(name, 200, length):
            string, copy = read[1:].split("|")
            assert wanted == string[::order] + "."
            assert copy == string[::order]
            pieces = {string[start : start + 3] for start in range(0, length - 2, 3)}
            assert len(pieces) <= 4
            if length == 61:  # with probability 0.013 one of twenty misses one of four pieces
                assert len(pieces) >= 3


def test_a_lookup_is_not_a_copy_of_repetitive_text() -> None:
    """A lookup is not a copy of repetitive text.

    Python's search finds the first successor of the last letters, and the answers hardly ever form a whole copy.
    """
    for name in ("copy_repeats", "reverse_repeats"):
        task = task_config.build_task(name)
        drawn = task.sample_batch(np.random.default_rng(3), 200, 40)
        (guesses,) = task.compute_baseline_predictions(drawn).values()
        whole = 0
        for tokens, labels, guess, counted in zip(*drawn[:2], guesses, drawn.accuracy_mask, strict=True):
            read = "".join(SYMBOLS[token] for token in tokens)
            source = read[1:41] if name == "copy_repeats" else read[40:0:-1]
            for place in np.flatnonzero(counted)[1:-1]:
                last = read[max(42, place - 2) : place + 1]
                assert SYMBOLS[guess[place]] == source[source.index(last) + len(last)]
            whole += (guess == labels)[counted].all()
        assert whole <= 4
    with pytest.raises(UserError, match="4 pieces are more than half of the 4 possible pieces"):
        task_config.build_task("copy_repeats", {"letters": 2, "piece_length": 2})

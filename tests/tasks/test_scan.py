"""SCAN's commands, interpreted by a parser of its grammar, and sizes of its published length split."""

import numpy as np
import pytest

from megatron.data.tasks import task_config
from megatron.data.tasks.catalog.scan import derive_commands, list_commands

WORDS = ["·", "walk", "look", "run", "jump", "turn", "left", "right"]
WORDS += ["opposite", "around", "twice", "thrice", "and", "after"]
ACTIONS = ["WALK", "LOOK", "RUN", "JUMP", "LTURN", "RTURN"]
TEST_LENGTHS = [24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48]


def interpret(command: str) -> list[str]:
    """Interpret a command from the outermost word inwards, like the paper's interpretation functions."""
    for word in ("and", "after"):
        if f" {word} " in command:
            one, other = command.split(f" {word} ")
            return interpret(one) + interpret(other) if word == "and" else interpret(other) + interpret(one)
    for word, times in (("twice", 2), ("thrice", 3)):
        if command.endswith(f" {word}"):
            return interpret(command.removesuffix(f" {word}")) * times
    verb, *rest = command.split()
    does = [] if verb == "turn" else [verb.upper()]
    if not rest:
        return does
    turn = ["LTURN" if rest[-1] == "left" else "RTURN"]
    return {1: turn + does, 2: turn * 2 + does if rest[0] == "opposite" else (turn + does) * 4}[len(rest)]


def test_published_sizes() -> None:
    """SCAN has 20,910 commands; 16,990 have at most 22 actions, and 3,920 have 24 to 48 (Lake and Baroni 2018)."""
    commands = derive_commands()
    assert len(commands) == len({words for words, _ in commands}) == 20_910
    sizes = {length: len(rows) for length, (rows, _) in list_commands().items()}
    assert sum(size for length, size in sizes.items() if length <= 22) == 16_990
    assert sum(size for length, size in sizes.items() if length > 22) == 3_920
    assert sorted(length for length in sizes if length > 22) == TEST_LENGTHS
    for words, actions in commands:
        assert actions.split() == interpret(words)


@pytest.mark.parametrize(
    ("command", "actions"),
    [
        ("jump", "JUMP"),
        ("jump left", "LTURN JUMP"),
        ("jump around right", "RTURN JUMP RTURN JUMP RTURN JUMP RTURN JUMP"),
        ("turn left twice", "LTURN LTURN"),
        ("jump thrice", "JUMP JUMP JUMP"),
        ("jump opposite left and walk thrice", "LTURN LTURN JUMP WALK WALK WALK"),
        ("jump opposite left after walk around left", "LTURN WALK LTURN WALK LTURN WALK LTURN WALK LTURN LTURN JUMP"),
    ],
)
def test_published_examples(command: str, actions: str) -> None:
    assert interpret(command) == actions.split()
    assert (command, actions) in {(words, " ".join(meaning.split())) for words, meaning in derive_commands()}


@pytest.mark.parametrize("length", [1, 2, 22, 24, 48])
def test_sequences(length: int) -> None:
    task = task_config.build_task("scan")
    batch = task.sample_batch(np.random.default_rng(0), 300, length)
    symbols = [*WORDS, *ACTIONS, "$", "|", "."]
    assert batch.tokens.shape == (300, task.get_sequence_length(length))
    for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.loss_mask, strict=True):
        read, wanted = ([symbols[token] for token in row] for row in (tokens, labels[mask]))
        command = [word for word in read[1:10] if word != "·"]
        assert (read[0], read[10], read[10 - len(command) : 10]) == ("$", "|", command)
        actions = interpret(" ".join(command))
        assert (read[11:], wanted) == (actions, [*actions, "."])
        assert len(actions) == length


def test_training_draws_every_command_as_often() -> None:
    assert task_config.build_task("scan").describe_unsupported_length(23) is not None
    config = task_config.TaskConfig("scan", task_config.build_task("scan"), 1, 22)
    assert config.lengths == tuple(range(1, 23))
    assert config.length_weights is not None
    shares = [len(list_commands()[length][0]) / 16_990 for length in config.lengths]
    assert config.length_weights == pytest.approx(shares)

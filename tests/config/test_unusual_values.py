"""Values of the wrong type, very long values and unprintable characters: errors and notes stay short and printable."""

import pickle

import pytest

from megatron.cli.arguments import split_arguments
from megatron.config.load import load_config
from megatron.config.schema import list_config_keys
from megatron.options.optimizer import OptimizerParams
from megatron.utils.errors import MAX_PROBLEMS, UserError

BASE = ["num_layers=2", "hidden_size=24", "num_attention_heads=3", "seq_length=17", "train_iters=5"]
MAX_LENGTH = 1200
"""Largest number of characters of a line."""


def list_messages(overrides: list[str]) -> list[str]:
    """Return the lines of the error, or else the notes and replacements."""
    try:
        loaded = load_config([], [*BASE, *overrides])
    except UserError as error:
        return str(error).split("\n")
    return [*loaded.notes, *loaded.layers.replacements]


@pytest.mark.parametrize(
    "value",
    [
        "x" * 5000,
        f"'{'é' * 2000}'",
        "9" * 4000,
        r'"\e[31mred\u202E\uFEFF\x07"',
        r'"a\nb\rc\td\u2028e\x85f"',
        r'"\uD800"',
        r'["\e[0m", "\n"]',
        r'{"\e[0m": "\n"}',
        f"[{', '.join(['x' * 100] * 20)}]",
        f"{{{', '.join(f'{i}{chr(107) * 100}: 1' for i in range(20))}}}",
        f"{{{'k' * 3000}: 1}}",
        "!!bool x",
    ],
)
def test_messages_about_unusual_values_are_short_and_printable(value):
    names = [key.name for key in list_config_keys().values()]
    for start in range(0, len(names), MAX_PROBLEMS):
        overrides = [f"{name}={value}" for name in names[start : start + MAX_PROBLEMS]]
        for line in list_messages(overrides):
            assert line.isprintable(), repr(line)
            assert len(line) <= MAX_LENGTH, line


@pytest.mark.parametrize("name", ["x" * 5000, "\x1b[31m", "a\nb", "optimizer.\u202e", "seed:" + "1" * 5000])
def test_messages_about_unusual_keys_are_short_and_printable(name):
    for line in list_messages([f"{name}=1"]):
        assert line.isprintable(), repr(line)
        assert len(line) <= MAX_LENGTH, line


@pytest.mark.parametrize(
    "words", [["a\nb"], ["\x1b[31m.yml"], ["x" * 250], ["a\n="], ["=\n", "b"], ["a\n=", "b"], ["a\n=&"]], ids=repr
)
def test_messages_about_unusual_arguments_are_one_line(words):
    with pytest.raises(UserError) as caught:
        load_config(*split_arguments(words))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= MAX_LENGTH


def test_an_error_lists_a_limited_number_of_problems():
    lines = list_messages([f"unknown{i}=1" for i in range(MAX_PROBLEMS + 7)])
    assert len(lines) == MAX_PROBLEMS + 1
    assert lines[-1] == "and 7 more problems"


def test_an_unknown_nested_key_lists_those_of_its_section():
    (line,) = list_messages(["optimizer.params.k0=1"])
    known = ", ".join(OptimizerParams.model_fields)
    assert line == f"command line: unknown key 'optimizer.params.k0'; optimizer.params has {known}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("zero_optimization.stage=true", "is true; choose from 0, 1, 2, 3"),
        ("zero_optimization.stage=1.0", "is 1.0; choose from 0, 1, 2, 3"),
        ("checkpoint_activations=1", "is 1; choose from false, true, selective"),
        ("attention_output_gate=0.0", "is 0.0; choose from false, true, headwise"),
    ],
)
def test_a_choice_has_its_own_type(text, problem):
    """Python's 1, 1.0 and True are equal, so pydantic would accept each for the others."""
    (line,) = list_messages([text])
    assert line == f"command line: {text.partition('=')[0]} {problem}"


def test_escaped_errors_can_be_pickled():
    error = pickle.loads(pickle.dumps(UserError("a\x1b[0m\nb", key="seed")))
    assert (str(error), error.key) == (r"a\x1b[0m" + "\nb", "seed")

"""Help pages of the commands in the terminal."""

import io
import re
import shlex

import pytest
import typer
from rich.console import Console

from megatron.cli.app import COMMANDS, app, get_command_name
from megatron.cli.help_page import list_shown_flags, print_command_help, wrap_command

NAMES = [get_command_name(function) for function, _ in COMMANDS]


def render(name: str, width: int) -> str:
    command = typer.main.get_command(app).commands[name]
    file = io.StringIO()
    context = command.make_context(f"./deepy.py {name}", [], resilient_parsing=True)
    print_command_help(command, context, Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_whole_at_80_columns(name):
    text = render(name, 80)
    for line in text.splitlines():
        assert line == line.rstrip()
        assert len(line) <= 80
        assert not re.search(r"<\w+( range)?>|\[/?bold|\[default|\w\[\d", line), line  # typer's notation and markup
    for parameter in typer.main.get_command(app).commands[name].params:
        for flag in list_shown_flags(parameter) if parameter.param_type_name == "option" else ():
            assert re.search(rf"^  (\S+, )?{flag}( |,|$)", text, re.MULTILINE), flag


def test_the_program_has_a_page_in_the_same_style():
    """The program's page has a summary of each command, no frames, and no line longer than the terminal."""
    program, file = typer.main.get_command(app), io.StringIO()
    context = program.make_context("./deepy.py", [], resilient_parsing=True)
    print_command_help(program, context, Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert all(len(line) <= 80 and not re.search("[─│╭╰]", line) for line in lines)
    assert [match[1] for line in lines if (match := re.match(r"  ([a-z][\w-]*) +[A-Z]", line))] == NAMES
    assert {"Commands", "Options", "  -h, --help"} <= set(lines)


def test_help_shows_no_older_spelling():
    text = render("generate", 80)
    assert "--max-new-tokens N" in text
    assert "--maximum-tokens" not in text


@pytest.mark.parametrize(("name", "option"), [("generate", "top-p"), ("evaluate", "score-threshold")])
def test_help_states_exclusive_bounds(name, option):
    page = " ".join(render(name, 80).split())
    assert re.search(rf"--{option} X \(at most 1[^)]*\) [^-]*; it must be greater than 0\.", page)


def test_help_names_options_instead_of_keys():
    text = " ".join(render("evaluate", 80).split())
    assert "For --find-key-tokens: a key token gains" in text
    assert "at least --min-context tokens before them" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_wrapped_example_is_the_same_command(name):
    commands = re.findall(r"^ +(\./deepy\.py .*)$", typer.main.get_command(app).commands[name].help, re.MULTILINE)
    for command in commands:
        lines = wrap_command(command, 50)
        assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)
        assert all(line.endswith(" \\") for line in lines[:-1])
        assert not lines[-1].endswith("\\")
    assert wrap_command("a --b 'c'", 50) == ["a --b 'c'"]
    assert wrap_command('run --text "a b c" --size 3 last', 18) == [
        "run \\",
        '    --text "a b c" \\',
        "    --size 3 \\",
        "    last",
    ]

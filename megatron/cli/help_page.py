"""Help page of a command in the terminal: usage, description, examples, subcommands, arguments and options.

Each option has a line of its own with its meaning below, so that no name is shortened on a narrow terminal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

MAX_WIDTH = 100
"""Maximum width of a page in columns; longer lines are hard to read."""
PLACEHOLDERS = {
    "<str>": ("TEXT", "text"),
    "<int>": ("N", "integer"),
    "<int range>": ("N", "integer"),
    "<float>": ("X", "number"),
    "<float range>": ("X", "number"),
    "<path>": ("PATH", "path"),
    "<list[str]>": ("TEXT", "text, repeatable"),
    "<list[Path]>": ("PATH", "path, repeatable"),
}
"""Typer's notations of value types, with a placeholder in the terminal and a name in the documentation."""


@dataclass(frozen=True)
class ParameterHelp:
    """Help of an argument or an option."""

    names: str
    """Names without the value, for example `-o, --output`; the placeholder of an argument."""
    placeholder: str
    """Placeholder of the value, or an empty string for flags and arguments."""
    kind: str
    """Type of the value in words, or an empty string if the names show it."""
    meaning: str
    """Description in rich's markup."""
    facts: tuple[str, ...]
    """Bounds, default, or `required`; values are between backquotes."""


def list_shown_flags(parameter: Any) -> list[str]:
    """Return the spellings of an option that help shows: short ones and the first long one, the others being older."""
    flags = [flag for flag in parameter.opts if flag.startswith("-")]
    long = [flag for flag in flags if flag.startswith("--")]
    return [flag for flag in flags if flag not in long[1:]]


def describe_parameter(parameter: Any, context: Any) -> ParameterHelp:
    """Return the help of a parameter of a typer command."""
    names, meaning = parameter.get_help_record(context)
    for flag in set(parameter.opts).difference(list_shown_flags(parameter)) - {parameter.name}:
        names = re.sub(rf", {flag}(?=[ ,/]|$)", "", names)
    if parameter.param_type_name == "argument":
        names = parameter.metavar or names
    found = [PLACEHOLDERS[each] for each in re.findall(r"<[^>]*>", names) if each in PLACEHOLDERS]
    placeholder, kind = found[0] if found else ("", "")
    names = " ".join(re.sub(r"<[^>]*>", "", names).split())
    facts: tuple[str, ...] = ()
    if match := re.search(r"\s*\[((?:default: |required|[\d.]*<?=?x[<>]=)[^\]]*)\]$", meaning):
        meaning = meaning[: match.start()]
        facts = tuple(map(_describe_fact, reversed(match[1].split("; "))))  # limits before the default
    return ParameterHelp(names, placeholder, kind, " ".join(meaning.split()), facts)


def _describe_fact(fact: str) -> str:
    """Describe a bracketed fact at the end of typer's help: `x>=1`, `0<=x<=1`, `default: 64`, `required`."""
    if fact.startswith("default: "):
        return f"default `{fact.removeprefix('default: ')}`"
    fact = re.sub(r"\d{5,}", lambda number: f"{int(number[0]):,}", fact)
    fact = re.sub(r"(.+)<=x<=(.+)", r"\1 to \2", fact)
    return fact.replace("x>=", "at least ").replace("x<=", "at most ")


def describe_usage(name: str, command: Any, context: Any) -> str:
    """Return the usage of a command: its name, its arguments without typer's braces, and its required options."""
    pieces = [
        re.sub(r"^\{(.+)\}$", r"\1", piece.removesuffix("...")) for piece in command.collect_usage_pieces(context)
    ]
    for parameter in command.get_params(context):
        if parameter.param_type_name == "option" and parameter.required:
            placeholder = describe_parameter(parameter, context).placeholder or parameter.metavar
            pieces += [list_shown_flags(parameter)[0], placeholder]
    return " ".join([name, *pieces])


def print_command_help(command: Any, context: Any, console: Console) -> None:
    """Print the help page of a command, or of a group of commands with a summary of each."""
    width = min(MAX_WIDTH, console.width)

    def show(text: Text, indent: int = 0) -> None:
        for line in text.wrap(console, width - indent):
            line.rstrip()
            console.print(Text(" " * indent) + line, soft_wrap=True, highlight=False)

    show(Text.assemble(("Usage: ", "bold"), describe_usage(context.command_path, command, context)))
    for block in (command.help or "").split("\n\n"):
        console.print()
        if block.startswith(" "):
            for line in wrap_command(block.strip(), width - 2):
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        else:
            show(Text.from_markup(block))
    if commands := getattr(command, "commands", {}):
        indent = 4 + max(map(len, commands))
        console.print("\n[bold]Commands[/]")
        for name, each in commands.items():
            summary = Text.from_markup(each.help.partition("\n\n")[0])
            for number, line_text in enumerate(summary.wrap(console, width - indent)):
                line_text.rstrip()
                start = Text(f"  {name if number == 0 else '':{indent - 2}}", "cyan")
                console.print(start + line_text, soft_wrap=True, highlight=False)
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        parameters = [each for each in command.get_params(context) if each.param_type_name == kind]
        if not parameters:
            continue
        console.print(f"\n[bold]{title}[/]")
        for parameter in parameters:
            record = describe_parameter(parameter, context)
            facts = ", ".join(record.facts).replace("`", "")
            placeholder = record.placeholder if kind == "option" else ""
            show(
                Text.assemble(
                    (record.names, "cyan"),
                    f" {placeholder}" if placeholder else "",
                    (f"  ({facts})" if facts else "", "dim"),
                ),
                2,
            )
            show(Text.from_markup(record.meaning), 6)


def wrap_command(command: str, width: int) -> list[str]:
    r"""Wrap a shell command between words, with a backslash at the end of each line but the last.

    Quoted words stay whole, and an option stays with its value.
    """
    words = re.findall(r"(?:--?[a-z][\w-]* )?(?!-)(?:\"[^\"]*\"|[^\s\"])+|\S+", command)
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:] if len(command) > width else [command]

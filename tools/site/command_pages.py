"""Page for each command of deepy.py, generated from its `--help`."""

import re
from typing import Any

import typer

from megatron.cli.app import COMMANDS, app, get_command_name
from megatron.cli.help_page import describe_parameter, describe_usage
from megatron.options.section import read_docstring
from tools.site.markdown import escape, link_docs

FOLDER = "commands"
EXAMPLES = "[bold]Examples[/]"


def list_commands() -> dict[str, str]:
    """Return the commands in the order of the help, each with a page that explains more."""
    return {get_command_name(function): page for function, page in COMMANDS}


def write_command_pages() -> dict[str, str]:
    """Return the pages by path in the site's docs/, starting with the index."""
    group: Any = typer.main.get_command(app)
    docstrings = {get_command_name(function): read_docstring(function) for function, _ in COMMANDS}
    rows = []
    for name, page in list_commands().items():
        summary = " ".join(docstrings[name].partition("\n\n")[0].split())
        rows.append(f"| [`{name}`]({name}.md) | {escape(summary)} | {page} |")
    index = (
        "# Commands\n\nEach is `./deepy.py COMMAND`. `./deepy.py COMMAND --help` shows the text of its page in the "
        "terminal.\n\n| command | description | more |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )
    pages = {f"{FOLDER}/index.md": link_docs(index, f"{FOLDER}/index.md")}
    for name, page in list_commands().items():
        pages[f"{FOLDER}/{name}.md"] = render_command(name, group.commands[name], docstrings[name], page)
    return pages


def render_command(name: str, command: Any, docstring: str, more: str) -> str:
    """Render one page: description, usage, examples, arguments and options of a command.

    Args:
        name: name of the command.
        command: command object built by typer.
        docstring: docstring of its function.
        more: page that explains more, as docs/NAME.md.
    """
    path = f"{FOLDER}/{name}.md"
    context = command.make_context(name, [], resilient_parsing=True)
    usage = describe_usage(f"./deepy.py {name}", command, context)
    summary, _, rest = docstring.partition("\n\n")
    parts = [f"# {name}", _format_help(summary), f"``` text\n{usage}\n```", _format_help(rest), f"More: {more}"]
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        records = [_format_parameter(each, context) for each in command.params if each.param_type_name == kind]
        if records:
            parts += [f"## {title}", "\n\n".join(records)]
    return link_docs("\n\n".join(part for part in parts if part), path) + "\n"


def _format_help(text: str) -> str:
    """Convert a docstring to Markdown; indented examples become code blocks."""
    blocks = [block for block in text.split("\n\n") if block.strip()]
    parts: list[str] = []
    for block in blocks:
        if block.startswith(" ") and parts and parts[-1].startswith("```"):
            parts[-1] = parts[-1].removesuffix("```") + f"{_join_lines(block)}\n```"
        elif block.startswith(" "):
            parts.append(f"``` console\n{_join_lines(block)}\n```")
        elif block.strip() == EXAMPLES:
            parts.append("## Examples")
        else:
            parts.append(_escape_help(block))
    return "\n\n".join(parts)


def _escape_help(text: str) -> str:
    """Escape terminal help for Markdown, including [bold] and [/]."""
    return re.sub(r"\\\[(/?)(?:bold|italic)?\\\]", "**", escape(text))


def _join_lines(block: str) -> str:
    return "\n".join(line.strip() for line in block.splitlines())


def _format_parameter(parameter: Any, context: Any) -> str:
    """Format an argument or option with its type, limits and default, as an entry of a definition list."""
    record = describe_parameter(parameter, context)
    facts = [*filter(None, [record.kind]), *record.facts]
    return f"{' · '.join([f'`{record.names}`', *facts])}\n:   {_escape_help(record.meaning)}"

"""Arguments and output of the commands: configurations, options generated from keys, notes and facts."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from megatron.options.section import CommaSeparated, ConfigSection
from megatron.utils.errors import UserError, escape_control_characters, shorten_text

if TYPE_CHECKING:
    from rich.console import Console

    from megatron.config.load import LoadedConfig


def print_to_stderr(message: str) -> None:
    """Print a line that is not part of the results to standard error."""
    print(message, file=sys.stderr, flush=True)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes to standard error."""
    for note in notes:
        print_to_stderr(escape_control_characters(f"note: {note}"))


def print_facts(console: Console, facts: dict[str, str]) -> None:
    """Print one indented paragraph per named fact; empty facts are omitted."""
    from rich.text import Text

    for name, fact in facts.items():
        for line in Text.assemble((name, "dim"), f" {fact}").wrap(console, console.width - 4) if fact else ():
            line.rstrip()
            console.print(Text("    ") + line, soft_wrap=True)


@contextmanager
def open_clean_console() -> Iterator[Console]:
    """Open a console that shows only Farfield's output.

    Output of libraries goes to a log, which is kept only after an unexpected error. Signals are acknowledged
    immediately.
    """
    from megatron.utils.console import log_traceback, run_console, temporary_log
    from megatron.utils.signals import acknowledge_signals

    with (
        temporary_log() as log,
        run_console(log) as console,
        log_traceback(log),
        acknowledge_signals(console.print, "stopping"),
    ):
        yield console


Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG… [KEY=VALUE …]", help="Configuration files, followed by single keys.", show_default=False
    ),
]
ConfigFolder = Annotated[
    Path | None,
    typer.Option(
        "-d", "--conf-dir", metavar="FOLDER", help="Folder to search first for configuration names.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON array instead of a table.")]


def add_section_options(
    section: type[ConfigSection], set_by: Mapping[str, str] = MappingProxyType({})
) -> Callable[..., Any]:
    """Add one option per key of a section to a command that takes `**options`, with type, bounds, default and help.

    set_by: keys without an option, and the keys whose options set them too.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        names = {parameter.name for parameter in own}
        fields = {name: field for name, field in section.model_fields.items() if name not in {*set_by, *names}}
        flags = {name: list_flags(name, field)[0] for name, field in fields.items()}
        flags |= {name: flags[other] for name, other in set_by.items()}
        parameters = [*own, *(build_option(name, field, flags) for name, field in fields.items())]

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            except UserError as error:
                paths = list_path_roots([*arguments, *options.values()])
                keys = {key: flag for key, flag in flags.items() if key not in paths or key == error.key}
                lines = [replace_key_by_option(line, keys) for line in str(error).splitlines()]
                raise UserError("\n".join(lines), error.key) from error

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return add


OPTION_NAME = re.compile(r"(?:command line: )?(item \d+ of |)(\w+)(?=[ :])")
"""Pattern for the key at the start of an error line."""


def replace_key_by_option(line: str, flags: Mapping[str, str]) -> str:
    """Replace the key at the start of an error line by its option: `windows is 0; …` becomes `--num-windows is 0; …`.

    The original line also occurs for keys in sweep files and scripts.

    flags: options by key.
    """
    if (found := OPTION_NAME.match(line)) is None or found[2] not in flags:
        return line
    return f"{found[1]}{flags[found[2]]}{_name_options(line[found.end() :], flags)}"


def list_path_roots(values: Iterable[Any]) -> set[str]:
    """Return the first components of all relative paths that may be among a command's values.

    An error about such a path begins like one about a key if a run's folder is named, for example, `data`.
    """
    texts = itertools.chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
    return {part for text in texts if isinstance(text, str | Path) for part in Path(text).parts[:1]}


def list_flags(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the option names of a key, the older one last."""
    return tuple(f"--{each.replace('_', '-')}" for each in (name, field.alias) if each is not None)


def build_option(name: str, field: FieldInfo, options: Mapping[str, str]) -> inspect.Parameter:
    """Build a command option for a key of a section.

    options: options by key, with which the help names other keys.

    The section validates choices, with better messages.

    A list becomes an option that may be repeated, or a single option if the section accepts comma-separated text.
    """
    kinds = (field.annotation, *get_args(field.annotation))
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    flags: Any = list_flags(name, field)
    metavar: Any = extra.get("metavar")
    names = ("ge", "gt", "le")
    bounds = {name: getattr(item, name) for item in field.metadata for name in names if hasattr(item, name)}
    is_list = any(get_origin(kind) is list for kind in kinds)
    kind: Any = str
    if CommaSeparated in field.metadata:
        bounds = {}
        default = ",".join(map(str, default)) if isinstance(default, list) else default
    elif is_list:
        kind, bounds, default = list[str], {}, default or None
    else:
        kind = next((kind for kind in (bool, int, float) if kind in kinds), str)
    if kind is bool and default is not False:
        flags = [f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags]
    # typer has no exclusive bounds, so the help states them.
    lower_bound = f"; it must be greater than {bounds['gt']}" if "gt" in bounds else ""
    option = typer.Option(
        *flags,
        help=format_sentence(_name_options(field.description or "", options) + lower_bound),
        min=bounds.get("ge"),
        max=bounds.get("le"),
        metavar=metavar,
        show_default=default is not None and default is not False,
    )
    annotation: Any = Annotated[kind if default is not None else kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _name_options(text: str, options: Mapping[str, str]) -> str:
    """Replace keys in a text by their options, for keys of several words, which mean nothing else; paths stay."""
    return re.sub(r"(?<![\w/.-])[a-z]+(?:_[a-z]+)+(?![\w/=-]|\.\w)", lambda key: options.get(key[0], key[0]), text)


def format_sentence(text: str) -> str:
    """Format a key's description as help text: capitalized and ending in a period. File names are not capitalized."""
    first = text.partition(" ")[0]
    text = text[:1].upper() + text[1:] if "." not in first.rstrip(".,") else text
    return text if text.endswith(("…", ".")) else f"{text}."


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into files and `key=value` pairs. A pair contains an equals sign and is not an existing file.

    Raises UserError for a pair with spaces around its equals sign.
    """
    for index, text in enumerate(arguments):
        is_open = text.endswith("=") and index + 1 < len(arguments) and not _is_config_or_pair(arguments[index + 1])
        before = arguments[index - 1] if index else None
        if text.startswith("=") and (before is None or before.endswith(".yml") or _is_config_or_pair(before)):
            given = shorten_text(text)
            raise UserError(f"{given}: there is no key before the equals sign; write KEY=VALUE, such as train_iters=3")
        if is_open or text.startswith("="):
            words = arguments[max(0, index - text.startswith("=")) : index + 1 + (is_open or text == "=")]
            given, joined = shorten_text(" ".join(words)), shorten_text("".join(words))
            raise UserError(f"{given}: write key=value without spaces: {joined}")
    pairs = [text for text in arguments if "=" in text and not os.path.isfile(text)]
    return [text for text in arguments if text not in pairs], pairs


def _is_config_or_pair(text: str) -> bool:
    from megatron.config.load import find_config

    try:
        return "=" in text or bool(find_config(text))
    except UserError:
        return False


def load_config_arguments(arguments: Sequence[str], conf_dir: Path | None, *, silent: bool = False) -> LoadedConfig:
    """Load the configuration and print its notes, unless another rank prints them (`silent`)."""
    from megatron.config.load import load_config

    files, overrides = split_arguments(arguments)
    loaded = load_config(files, overrides, search=[conf_dir] if conf_dir else None)
    print_notes(() if silent else loaded.notes)
    return loaded

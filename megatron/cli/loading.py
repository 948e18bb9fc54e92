"""What several commands do: read a configuration, print notes beside the results, and print facts as paragraphs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from megatron.config.load import LoadedConfig


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and `key=value` pairs. A pair is what has an equals sign and names no file."""
    pairs = [text for text in arguments if "=" in text and not os.path.isfile(text)]
    return [text for text in arguments if text not in pairs], pairs


def load_config(arguments: Sequence[str], conf_dir: Path | None, *, silent: bool = False) -> LoadedConfig:
    """Read the configuration and say what there is to say about it, unless another rank does."""
    from megatron.config.load import load_config

    files, overrides = split_arguments(arguments)
    loaded = load_config(files, overrides, search=[conf_dir] if conf_dir else None)
    print_notes(() if silent else loaded.notes)
    return loaded


def print_aside(message: str) -> None:
    """Print a line that is no result: on standard error."""
    print(message, file=sys.stderr, flush=True)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes beside the results."""
    for note in notes:
        print_aside(f"note: {note}")


def print_facts(console: Console, facts: dict[str, str]) -> None:
    """Print one indented paragraph per fact, named; facts without text are left out."""
    from rich.markup import escape
    from rich.padding import Padding

    for name, fact in facts.items():
        if fact:
            console.print(Padding(f"[dim]{name}[/] {escape(fact)}", (0, 0, 0, 4), expand=False))


@contextmanager
def open_work_console() -> Iterator[Console]:
    """A clean console for work that third parties write about: what they say goes to a log, which stays only if
    something unexpected happened. A signal is answered at once."""
    from megatron.launch.console import log_traceback, run_console, temporary_log
    from megatron.utils.signals import acknowledge_signals

    with (
        temporary_log() as log,
        run_console(log) as console,
        log_traceback(log),
        acknowledge_signals(console.print, "stopping"),
    ):
        yield console

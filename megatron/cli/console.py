"""Output of commands: a clean console for work, notes on standard error, and facts as paragraphs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_to_stderr(message: str) -> None:
    """Print a line that is not part of the results to standard error."""
    print(message, file=sys.stderr, flush=True)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes to standard error."""
    for note in notes:
        print_to_stderr(f"note: {note}")


def print_facts(console: Console, facts: dict[str, str]) -> None:
    """Print one indented paragraph per named fact; empty facts are omitted."""
    from rich.markup import escape
    from rich.padding import Padding

    for name, fact in facts.items():
        if fact:
            console.print(Padding(f"[dim]{name}[/] {escape(fact)}", (0, 0, 0, 4), expand=False))


@contextmanager
def open_clean_console() -> Iterator[Console]:
    """Open a console that shows only this project's output.

    Output of libraries goes to a log, which is kept only after an unexpected error. Signals are acknowledged
    immediately.
    """
    from megatron.launch.console import log_traceback, run_console, temporary_log
    from megatron.utils.signals import acknowledge_signals

    with (
        temporary_log() as log,
        run_console(log) as console,
        log_traceback(log),
        acknowledge_signals(console.print, "stopping"),
    ):
        yield console

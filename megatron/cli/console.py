"""What commands print on: a clean console for work, notes beside the results, and facts as paragraphs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_to_stderr(message: str) -> None:
    """Print a line that is no result: on standard error."""
    print(message, file=sys.stderr, flush=True)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes beside the results."""
    for note in notes:
        print_to_stderr(f"note: {note}")


def print_facts(console: Console, facts: dict[str, str]) -> None:
    """Print one indented paragraph per fact, named; facts without text are left out."""
    from rich.markup import escape
    from rich.padding import Padding

    for name, fact in facts.items():
        if fact:
            console.print(Padding(f"[dim]{name}[/] {escape(fact)}", (0, 0, 0, 4), expand=False))


@contextmanager
def open_clean_console() -> Iterator[Console]:
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

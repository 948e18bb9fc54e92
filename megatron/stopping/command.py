"""How a command ends: a line on standard error for whatever went wrong, and an exit code.

0: done. 1: something failed while running. 2: what the user wrote cannot be done. 128 + n: signal n ended it, which is
130 after Ctrl-C and 141 where nobody read on what it printed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megatron.errors import FarfieldError, describe, unusable_path
from megatron.stopping.output import make_readable, write_nowhere
from megatron.stopping.signals import Stopped, leave, told, unwinding

UNREAD = 128 + signal.SIGPIPE


class Untouched(Exception):
    """Carries what ended a command through a library that has its own ideas of it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def untouched() -> Iterator[None]:
    """For the body of a command: typer makes silent exit codes of these, and an interrupt of a file's early end."""
    try:
        yield
    except (KeyboardInterrupt, EOFError, OSError) as error:
        raise Untouched(error) from error


def run(app: Any, name: str) -> int:
    """Run the command that the arguments of this process name.

    Args:
        app: of typer; its commands run inside `untouched`.
        name: of the program, for its help.

    Returns:
        The exit code. What went wrong has been told.
    """
    _settle_streams()
    _settle_size()
    with unwinding(instead=(leave,)):
        try:
            return _run(app, name)
        except (KeyboardInterrupt, Stopped) as ended:
            sys.unraisablehook = lambda _: None  # what was being made when it came may not know how to end
            with suppress(OSError):  # the terminal may be gone
                print(told(ended), file=sys.stderr)
            return 128 + ended.number if isinstance(ended, Stopped) else 130


def _run(app: Any, name: str) -> int:
    try:
        try:
            result = app(standalone_mode=False, prog_name=name)
            sys.stdout.flush()
        except Untouched as kept:
            raise kept.error from None
        return result if isinstance(result, int) else 0
    except FarfieldError as error:
        _say(str(error))
        return error.exit_code
    except BrokenPipeError:  # `./deepy.py positions | head -1`: nobody reads on, and nothing is wrong
        write_nowhere(1)
        return UNREAD
    except OSError as error:
        if (unusable := unusable_path(error)) is not None:
            _say(str(unusable))
            return unusable.exit_code
        # What fails with a file is told by whoever opened it; this is standard output on a disk that is full.
        if error.errno != errno.ENOSPC or error.filename is not None:
            _say(_unexpected(error))
            return 1
        write_nowhere(1)
        _say(f"standard output: {error.strerror}")
        return 1
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # rich, whose help nobody reads to its end
            return UNREAD
        raise
    except Exception as error:
        # The base of the command line's own errors, wherever typer keeps it.
        if any(kind.__name__ == "ClickException" for kind in type(error).__mro__):
            if words := _usage(error):
                _say(f"{words} (see {_help_of(error, name)})")
            return 2
        _say(_unexpected(error))
        return 1


def _say(message: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        for line in message.splitlines() or [""]:
            print(f"error: {line}", file=sys.stderr)


def _unexpected(error: BaseException) -> str:
    """Write the traceback to a file; returns the line that says so."""
    with tempfile.NamedTemporaryFile("w", prefix="farfield-", suffix=".log", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return f"{describe(error)}; the traceback is in {file.name}"


def _settle_streams() -> None:
    """Streams that were closed (`>&-`) go nowhere: a file opened later must not take their numbers, here or in a child.

    A shell that finds standard error closed may leave the script itself there, to be read.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            unusable = number > 0 and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            os.fstat(number)
        except OSError:
            unusable = True
        if unusable:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
        if number > 0:
            make_readable(getattr(sys, name))


def _settle_size() -> None:
    """A width or height that is none (`COLUMNS=0`, as some terminals in containers say) is unknown: by their own rules
    libraries would write nothing at all."""
    for name in ("COLUMNS", "LINES"):
        size = os.environ.get(name, "1")
        if not (size.isascii() and size.isdigit() and int(size[:9]) > 0):
            del os.environ[name]


def _usage(error: Any) -> str:
    """What is wrong with the command line: the library's words, with the value, or the command that has the option."""
    text = error.format_message().rstrip(".")
    given = error.__cause__.errors()[0]["input"] if hasattr(error.__cause__, "errors") else None
    if given is not None and repr(given) not in text:
        text = text.replace("Invalid value for", f"Invalid value {str(given)!r} for")
    option = getattr(error, "option_name", None)
    commands = getattr(getattr(error.ctx, "command", None), "commands", {})  # of an error before any command
    have = [name for name, each in commands.items() if any(option in parameter.opts for parameter in each.params)]
    if have:
        rest = shlex.join(word for word in sys.argv[1:] if word not in commands)
        text += f"; write it after its command: ./deepy.py {have[0]} … {rest}"
    return text


def _help_of(error: Any, name: str) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else name} --help"

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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import ValidationError

from megatron.position.catalog import MethodFileError
from megatron.utils.errors import (
    FarfieldError,
    FarfieldWarning,
    UserError,
    describe_error,
    describe_file_limit,
    is_out_of_files,
    to_path_error,
)
from megatron.utils.output import redirect_to_null, set_ascii_fallback
from megatron.utils.signals import StoppedBySignal, describe_signal, exit_on_signal, raising_on_signals

BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE


class PassThroughError(Exception):
    """Carries what ended a command through a library that has its own ideas of it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def pass_errors_through() -> Iterator[None]:
    """For the body of a command: typer makes silent exit codes of these, and an interrupt of a file's early end."""
    try:
        yield
    except (KeyboardInterrupt, EOFError, OSError) as error:
        raise PassThroughError(error) from error


def run_command(app: Any, name: str) -> int:
    """Run the command that the arguments of this process name.

    Args:
        app: of typer; its commands run inside `pass_errors_through`.
        name: of the program, for its help.

    Returns:
        The exit code. What went wrong has been printed.
    """
    _prepare_streams()
    _prepare_terminal_size()
    _print_own_warnings()
    with raising_on_signals(replacing=(exit_on_signal,)):
        try:
            return _run_app(app, name)
        except (KeyboardInterrupt, StoppedBySignal) as error:
            sys.unraisablehook = lambda _: None  # what was being made when it came may not know how to end
            with suppress(OSError):  # the terminal may be gone
                print(describe_signal(error), file=sys.stderr)
            return 128 + error.signum if isinstance(error, StoppedBySignal) else 130


def _run_app(app: Any, name: str) -> int:
    try:
        try:
            result = app(standalone_mode=False, prog_name=name)
            sys.stdout.flush()
        except PassThroughError as carrier:
            raise carrier.error from None
        return result if isinstance(result, int) else 0
    except FarfieldError as error:
        _print_error(str(error))
        return error.exit_code
    except MethodFileError as error:  # of a user's own, which any command may meet first
        _print_error(str(error))
        return UserError.exit_code
    except BrokenPipeError:  # `./deepy.py positions | head -1`: nobody reads on, and nothing is wrong
        redirect_to_null(1)
        return BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        if (path_error := to_path_error(error)) is not None:
            _print_error(str(path_error))
            return path_error.exit_code
        # What fails with a file is reported by whoever opened it; this is standard output on a disk that is full.
        if error.errno != errno.ENOSPC or error.filename is not None:
            _print_error(describe_file_limit() if is_out_of_files(error) else _write_traceback(error))
            return 1
        redirect_to_null(1)
        _print_error(f"standard output: {error.strerror}")
        return 1
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich, whose help nobody reads to its end
            return BROKEN_PIPE_EXIT_CODE
        raise
    except Exception as error:
        # The base of the command line's own errors, wherever typer keeps it.
        if any(kind.__name__ == "ClickException" for kind in type(error).__mro__):
            if isinstance(error.__cause__, ValidationError):  # of an option's value, which our words say better
                from megatron.config.validation_errors import describe_option_error

                option = getattr(error, "param", None)
                _print_error(describe_option_error(error.__cause__, option.opts[0] if option else "a value"))
                return 2
            if message := _describe_usage_error(error):
                _print_error(f"{message} (see {_get_help_hint(error, name)})")
            return 2
        _print_error(describe_file_limit() if is_out_of_files(error) else _write_traceback(error))
        return 1


def _print_error(message: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        for line in message.splitlines() or [""]:
            print(f"error: {line}", file=sys.stderr)


def _write_traceback(error: BaseException) -> str:
    """Write the traceback to a file; returns the line that says so."""
    with tempfile.NamedTemporaryFile("w", prefix="farfield-", suffix=".log", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return f"{describe_error(error)}; the traceback is in {file.name}"


def _prepare_streams() -> None:
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
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
        if number > 0:
            set_ascii_fallback(getattr(sys, name))


def _print_own_warnings() -> None:
    """Our warnings become notes; those of libraries stay what they are."""
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, FarfieldWarning):
            print(f"note: {message}", file=sys.stderr, flush=True)
        else:
            show_others(message, category, *rest)

    warnings.showwarning = show  # type: ignore[assignment]
    warnings.simplefilter("always", FarfieldWarning)


def _prepare_terminal_size() -> None:
    """A width or height that is none (`COLUMNS=0`, as some terminals in containers say) is unknown: by their own rules
    libraries would write nothing at all."""
    for name in ("COLUMNS", "LINES"):
        size = os.environ.get(name, "1")
        if not (size.isascii() and size.isdigit() and int(size[:9]) > 0):
            del os.environ[name]


def _describe_usage_error(error: Any) -> str:
    """What is wrong with the command line: the library's message, or a command with the option."""
    text = error.format_message().rstrip(".")
    option = getattr(error, "option_name", None)
    commands = getattr(getattr(error.ctx, "command", None), "commands", {})  # of an error before any command
    commands_with_option = [
        name for name, candidate in commands.items() if any(option in parameter.opts for parameter in candidate.params)
    ]
    if commands_with_option:
        rest = shlex.join(word for word in sys.argv[1:] if word not in commands)
        text += f"; write it after its command: ./deepy.py {commands_with_option[0]} … {rest}"
    return text


def _get_help_hint(error: Any, name: str) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else name} --help"

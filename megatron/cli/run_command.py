"""Exit of a command: error lines on standard error, and the exit code.

0: success. 1: error while running. 2: user error. 128 + n: ended by signal n, which is 130 after Ctrl-C and 141 if the
reader of its output stopped.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import ValidationError

from megatron.cli.help_page import describe_usage, list_shown_flags
from megatron.position.catalog import MethodFileError
from megatron.utils.console import redirect_to_null, set_ascii_fallback
from megatron.utils.errors import (
    FULL_DISK_ERRNOS,
    FarfieldError,
    FarfieldWarning,
    UserError,
    describe_cause,
    describe_error,
    describe_exhausted_resource,
    escape_lines,
    forbid_exits,
    to_path_error,
)
from megatron.utils.formatting import suggest_names
from megatron.utils.project import replace_program_name
from megatron.utils.signals import (
    StoppedBySignal,
    convert_signals_to_exceptions,
    describe_signal,
    exit_on_signal,
    raise_deferred_signal,
)

BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE


class PassThroughError(Exception):
    """Wrapper that carries an error through a library that would handle it differently."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def pass_errors_through() -> Iterator[None]:
    """Wrap errors of a command's body, which typer would turn into silent exit codes or an end-of-file error.

    Raises RunError if the body calls sys.exit().
    """
    try:
        with forbid_exits():
            yield
    except (KeyboardInterrupt, EOFError, OSError) as error:
        raise PassThroughError(error) from error


def run_command(app: Any, name: str) -> int:
    """Run the command given by this process's arguments.

    Args:
        app: typer application; its commands run inside `pass_errors_through`.
        name: name of the program, for its help.

    Returns:
        The exit code. Errors have already been printed.
    """
    _prepare_streams()
    _prepare_terminal_size()
    _print_own_warnings()
    with convert_signals_to_exceptions(replacing=(exit_on_signal,)):
        try:
            code = _run_app(app, name)
            raise_deferred_signal()
            return code
        except (KeyboardInterrupt, StoppedBySignal) as error:
            sys.unraisablehook = lambda _: None  # objects under construction may fail to finalize
            with suppress(OSError):  # the terminal may be closed
                print(describe_signal(error), file=sys.stderr)
            return 128 + error.signum if isinstance(error, StoppedBySignal) else 130


def _run_app(app: Any, name: str) -> int:
    try:
        try:
            result = app(standalone_mode=False, prog_name=name)
            sys.stdout.flush()
        except PassThroughError as carrier:
            raise carrier.error from carrier.error.__cause__
        return result if isinstance(result, int) else 0
    except FarfieldError as error:
        _print_error(str(error))
        return error.exit_code
    except MethodFileError as error:  # error in a user's own method, which any command may raise
        _print_error(str(error))
        return UserError.exit_code
    except BrokenPipeError:  # `./deepy.py positions | head -1`: the reader stopped, which is not an error
        redirect_to_null(1)
        return BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        if (path_error := to_path_error(error)) is not None:
            _print_error(str(path_error))
            return path_error.exit_code
        if error.errno not in FULL_DISK_ERRNOS or error.filename is not None:
            _print_error(describe_exhausted_resource(error) or _write_traceback(error))
            return 1
        redirect_to_null(1)  # files have names; this is standard output on a full disk
        _print_error(f"standard output: {error.strerror}")
        return 1
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # raised by rich if the reader of its help stops
            return BROKEN_PIPE_EXIT_CODE
        raise
    except Exception as error:
        # The base class of typer's own errors, wherever typer defines it.
        if any(kind.__name__ == "ClickException" for kind in type(error).__mro__):
            if message := describe_usage_error(error):
                _print_error(message)
            return 2
        _print_error(describe_exhausted_resource(error) or _write_traceback(error))
        return 1


def _print_error(message: str) -> None:
    with suppress(OSError):  # the terminal may be closed
        for line in escape_lines(replace_program_name(message)).split("\n"):
            print(f"error: {line}", file=sys.stderr)


def _write_traceback(error: BaseException) -> str:
    """Write the traceback to a file and return a message that names it."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="farfield-", suffix=".log", delete=False, encoding="utf-8") as log:
            traceback.print_exception(error, file=log)
    except OSError as problem:
        return f"{describe_error(error)}; the traceback cannot be written ({describe_cause(problem)})"
    return f"{describe_error(error)}; the traceback is in {log.name}"


def _prepare_streams() -> None:
    """Redirect closed streams (`>&-`) to the null device, so that files opened later do not reuse their numbers.

    If a shell closes standard error, the interpreter may open the script itself there, for reading.
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
    """Print our warnings as notes; warnings of libraries are unchanged."""
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, FarfieldWarning):
            print(f"note: {message}", file=sys.stderr, flush=True)
        else:
            show_others(message, category, *rest)

    warnings.showwarning = show  # type: ignore[assignment]
    warnings.simplefilter("always", FarfieldWarning)


def _prepare_terminal_size() -> None:
    """Ignore an invalid terminal size (`COLUMNS=0` in some containers), with which libraries would print nothing."""
    for name in ("COLUMNS", "LINES"):
        size = os.environ.get(name, "1")
        if not (size.isascii() and size.isdigit() and int(size[:9]) > 0):
            del os.environ[name]


def describe_usage_error(error: Any) -> str:
    """Describe an error of the command-line parser in the form of our errors: the problem, then the remedy.

    Args:
        error: usage error of typer, or of the click that older versions of typer use.

    Returns:
        One line, or an empty string if the error has already shown the help.
    """
    text, kind = error.format_message().rstrip("."), type(error).__name__
    context: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    option: str = getattr(error, "option_name", "")
    usage = f"; usage: {describe_usage(context.command_path, context.command, context)}" if context else ""
    if kind == "NoSuchOption":
        return f"unknown option {option}; {_suggest_option(option, context)}"
    if kind == "BadOptionUsage":
        return f"{option} has no value; give one" if "requires" in text else f"{option} takes no value; omit the value"
    if kind == "MissingParameter" and parameter is not None:
        option = max(parameter.opts, key=len)
        return f"missing {option if option.startswith('-') else parameter.metavar}{usage}"
    if kind == "BadParameter" and parameter is not None:
        option = find_typed_option(parameter.opts)
        if isinstance(error.__cause__, ValidationError):
            from megatron.config.schema import describe_option_error

            return describe_option_error(error.__cause__, option)
        return f"{option}: {error.message.rstrip('.')}"
    if match := re.match(r"No such command '(.*?)'", text):
        names = context.command.commands
        return f"unknown command {match[1]!r}; {suggest_names(match[1], names) or 'choose from ' + ', '.join(names)}"
    if match := re.match(r"Got unexpected extra argument\(?s?\)? \((.*)\)", text):
        return f"unexpected argument {match[1]}{usage}"
    return f"{text}{usage}" if text else ""


def _suggest_option(option: str, context: Any) -> str:
    """Return the remedy for an unknown option: the nearest one, the command that has it, or the key of this name."""
    commands = getattr(context.command, "commands", {})  # set for options before any command
    for name, candidate in commands.items():
        if any(option in parameter.opts for parameter in candidate.params):
            rest = shlex.join(word for word in sys.argv[1:] if word not in commands)
            return f"place it after its command: ./deepy.py {name} … {rest}"
    if any("KEY=VALUE" in (parameter.metavar or "") for parameter in context.command.params):
        from megatron.config.schema import list_config_keys

        key = option.lstrip("-").replace("-", "_")
        if tuple(key.split(".")) in list_config_keys():
            return f"keys have no dashes before them: {key}=VALUE"
    known = [flag for parameter in context.command.get_params(context) for flag in list_shown_flags(parameter)]
    return suggest_names(option, known) or f"{context.command_path} --help lists the options"


def find_typed_option(flags: Sequence[str]) -> str:
    """Return the long spelling of an option that the user typed, or the first one."""
    typed = {word.partition("=")[0] for word in sys.argv[1:]}
    return next((flag for flag in flags if flag in typed and flag.startswith("--")), flags[0])


@contextmanager
def name_typed_options(parameters: Sequence[Any]) -> Iterator[None]:
    """Make errors of a command name its options by the spelling that the user typed, such as an older one."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for parameter in parameters:
            shown, typed = parameter.opts[0], find_typed_option(parameter.opts)
            if typed != shown and shown.startswith("--"):
                message = re.sub(rf"(?<![\w-]){shown}(?![\w-])", typed, message)
        raise UserError(message, error.key) from error

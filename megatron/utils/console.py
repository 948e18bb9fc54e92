"""Output of commands: a clean console for the user, a log file for everything else, and streams that cannot be written.

DeepSpeed, megatron-core and the C++ below them write to file descriptors 1 and 2 at any time. During a run, both are
redirected to its log.txt, and the user's console writes to a copy of the real standard output. Console output is also
written to the log, so that the log is complete.

Streams may become unwritable (`./deepy.py train … | head`, a closed terminal, a full disk), or may lack characters.
"""

import codecs
import errno
import os
import sys
import tempfile
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleDimensions
from rich.control import Control
from rich.table import Table
from rich.text import Text

from megatron.utils.errors import (
    FarfieldError,
    RunError,
    describe_cause,
    describe_error,
    describe_exhausted_resource,
    forbid_exits,
    to_path_error,
)
from megatron.utils.signals import StoppedBySignal, clean_up_on_signal, describe_signal, request_stop

DEFAULT_WIDTH = 120  # for files and pipes
ASCII_FALLBACK = "farfield.readable"
"""Error handler (`errors` of `open`) for characters that a stream's encoding lacks; it never raises."""

_ASCII_TWINS = {
    "–": "-", "—": "-", "−": "-", "‐": "-", "·": ".", "•": "*", "×": "x", "÷": "/", "±": "+-", "√": "sqrt ",
    "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "→": "->", "←": "<-", "∞": "inf", "∈": "in", "∂": "d", "⌊": "floor(",
    "⌋": ")", "⌈": "ceil(", "⌉": ")", "“": '"', "”": '"', "„": '"', "‘": "'", "’": "'",
}  # fmt: skip
"""Characters used by this program, and their ASCII replacements."""


def _replace_unencodable(error: UnicodeError) -> tuple[bytes, int]:
    """Replace unencodable characters by their nearest ASCII text, or by the raw bytes of an undecodable file name."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return b"".join(map(_find_ascii, error.object[error.start : error.end])), error.end


def _find_ascii(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":  # PEP 383: an undecodable byte
        return bytes([ord(character) - 0xDC00])
    if character in _ASCII_TWINS:
        return _ASCII_TWINS[character].encode()
    words = unicodedata.name(character, "").split()  # GREEK SMALL LETTER THETA
    if words[:1] == ["GREEK"] and "LETTER" in words[:-1]:
        name = words[words.index("LETTER") + 1].lower()
        return (name.capitalize() if "CAPITAL" in words else name).encode()
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore")  # é is e and an accent
    raised = {"<super>": b"^", "<sub>": b"_"}.get(unicodedata.decomposition(character).split(" ")[0], b"")
    return raised + plain if plain else character.encode("ascii", "backslashreplace")


codecs.register_error(ASCII_FALLBACK, _replace_unencodable)


def set_ascii_fallback(stream: Any) -> None:
    """Make a text stream accept every character, unless the user chose another error handler."""
    if getattr(stream, "errors", None) in ("strict", "surrogateescape", "backslashreplace"):
        with suppress(AttributeError):  # an in-memory stream
            stream.reconfigure(errors=ASCII_FALLBACK)


def redirect_to_null(descriptor: int) -> None:
    """Discard everything written to a descriptor from now on, including buffered data."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class LogStream:
    """Text stream of a log that discards further output if it can no longer be written.

    The log is a copy of what commands print, so a full disk must not end their work.

    Args:
        stream: stream of the log.
        on_error: called with the reason at the first failed write.
    """

    def __init__(self, stream: IO[str], on_error: Callable[[str], object] = lambda reason: None) -> None:
        self._stream = stream
        self._on_error = on_error
        self._error: OSError | None = None

    @property
    def problem(self) -> str | None:
        """Reason why the stream cannot be written, or None."""
        return None if self._error is None else describe_cause(self._error)

    def write(self, text: str) -> int:
        return self._guard(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._guard(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _guard(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            self._error = error
            redirect_to_null(self._stream.fileno())
            self._on_error(describe_cause(error))
            return None


class GuardedStream(LogStream):
    """Text stream that asks the run to stop if it can no longer be written, and discards further output.

    An exception would end the run in the middle of a step without saving. If no training is in progress, it raises
    RunError.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self._is_stop_requested = False

    @property
    def problem(self) -> str | None:
        """Reason why the stream cannot be written, or None.

        It is None while the stream works, and if only the reader is gone: a closed pipe or terminal.
        """
        unread = (errno.EPIPE, errno.EIO)
        return None if self._error is None or self._error.errno in unread else describe_cause(self._error)

    def _guard(self, work: Callable[[], Any]) -> Any:
        result = super()._guard(work)
        # The first error may have been raised in another thread, before there was a training to stop.
        if self._error is not None and not self._is_stop_requested:
            self._is_stop_requested = request_stop()
            if not self._is_stop_requested:
                raise RunError(f"standard output: {describe_cause(self._error)}; no step was taken") from self._error
        return result


class UnexpectedError(RunError):
    """Unexpected exception; the log contains its traceback."""


class PlainConsole(Console):
    """Rich console for tables.

    It uses a default width if no terminal sets one. It raises BrokenPipeError if the reader stops, where rich would
    exit the process with code 1.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = max(DEFAULT_WIDTH, self.width)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_table(console: Console, table: Table) -> None:
    """Print a table without shortening or wrapping a cell: if it is too wide, with narrower gaps, then beyond the edge.

    The terminal wraps lines beyond its edge, so that every number can be read and copied at any width.
    """
    options = console.options.update(width=sys.maxsize)
    for gap in (2, 1):
        table.padding = (0, gap, 0, 0)
        width = console.measure(table, options=options).maximum
        if width <= console.width:
            break
    lines = console.render_lines(table, console.options.update(width=width), pad=False)
    for line in lines:
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()
        console.print(text, soft_wrap=True, highlight=False)


class RunConsole(Console):
    """Rich console that also writes its output, except for live progress, to the log as plain text.

    Its size is that of the terminal behind `file`, queried each time. Rich would query descriptors 0, 1 and 2, which
    are redirected during a run.
    """

    def __init__(self, *, log: Console, **options: Any) -> None:
        super().__init__(**options)
        self._log = log

    @property
    def size(self) -> ConsoleDimensions:
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except OSError:  # a file or a pipe
            columns = lines = 0
        # An explicit width, including COLUMNS, takes precedence; a pseudo-terminal may report none.
        return ConsoleDimensions(self._width or columns or 80, self._height or lines or 25)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if not any(isinstance(value, Control) for value in objects):  # a live display moves the cursor with these
            self._log.print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Discard further output if the reader stops (`./deepy.py evaluate … | head`).

        The command continues to its end.
        """
        self.quiet = True
        redirect_to_null(self.file.fileno())

    def set_live(self, live: Any) -> bool:
        # A live display would show redirected output on the console; it belongs only in the log.
        live._redirect_stdout = live._redirect_stderr = False
        return super().set_live(live)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


@contextmanager
def temporary_log() -> Iterator[Path]:
    """Create a log file that is deleted at the end unless an unexpected error wrote its traceback to it."""
    descriptor, name = tempfile.mkstemp(prefix="farfield-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    try:
        with clean_up_on_signal(lambda: log.unlink(missing_ok=True)):
            yield log
    except UnexpectedError:
        raise
    except BaseException:
        log.unlink(missing_ok=True)
        raise
    log.unlink(missing_ok=True)


@contextmanager
def log_traceback(log: Path) -> Iterator[None]:
    """Write errors to the log (inside `run_console`, standard error is redirected there).

    Raises:
        UserError: a path cannot be used.
        RunError: sys.exit() was called, or too many files are open.
        UnexpectedError: any other exception, with one line that names the log containing the traceback.
    """
    try:
        with forbid_exits():
            yield
    except FarfieldError as error:
        if isinstance(error.__cause__, SystemExit):
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        raise
    except (KeyboardInterrupt, StoppedBySignal) as ended:
        print(describe_signal(ended), file=sys.stderr)
        raise
    except Exception as error:
        traceback.print_exc()
        if (unusable := to_path_error(error)) is not None:
            raise unusable from error
        if (line := describe_exhausted_resource(error)) is not None:
            raise RunError(line) from error
        problem = getattr(sys.stderr, "problem", None)
        where = f"is in {log}" if problem is None else f"cannot be written to {log} ({problem})"
        raise UnexpectedError(f"{describe_error(error)}; the traceback {where}") from error


@contextmanager
def run_console(log: Path, *, silent: bool = False) -> Iterator[Console]:
    """Redirect this process's output to `log` and yield the console for the user.

    Args:
        log: file to append to; its folder must exist.
        silent: show the user nothing from this process (ranks other than 0); the log still receives everything.
    """
    _flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # of the terminal
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        with (
            open(os.dup(target), "w", buffering=1, encoding="utf-8", errors="replace") as log_file,
            open(
                os.devnull if silent else os.dup(saved[0]), "w", encoding=encoding, errors=ASCII_FALLBACK
            ) as user_file,
        ):

            def show_problem(reason: str) -> None:
                with suppress(OSError):
                    print(f"note: {log} is incomplete from here: {reason}", file=user_file, flush=True)

            stream: Any = LogStream(log_file, show_problem)
            # Python's streams may not be descriptors 1 and 2: notebooks, pytest.
            with redirect_stdout(stream), redirect_stderr(stream):
                width = None if user_file.isatty() else DEFAULT_WIDTH
                plain = Console(file=stream, width=DEFAULT_WIDTH, color_system=None, force_terminal=False)
                yield RunConsole(log=plain, file=user_file, width=width)
    finally:
        _flush()
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        os.close(target)

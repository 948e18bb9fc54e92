"""Errors that end Farfield early. Each is one line on the console and an exit code, never a traceback."""

import errno
import os
import re
import resource
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.utils.formatting import format_quantity


def escape_control_characters(text: str) -> str:
    r"""Return a text with every unprintable character as an escape such as \n, so that it cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def escape_lines(text: str) -> str:
    """Escape unprintable characters in lines that are separated by line feeds, which stay."""
    return "\n".join(map(escape_control_characters, text.split("\n")))


class FarfieldError(Exception):
    """Error that is reported to the user in one line. `exit_code` is the exit code of the process.

    Unprintable characters of the message, which files and arguments may contain, are escaped.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(escape_lines(message))


class UserError(FarfieldError):
    """Error in the user's input. The message names the file, key and value, and the valid choices.

    `key` is the dotted configuration key at fault, for callers that know which file set it.
    """

    exit_code = 2

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class RunError(FarfieldError):
    """Failure at run time (a full disk, a NaN loss, a truncated file). The message says what is kept and where."""

    exit_code = 1


class HangError(RunError):
    """Error if a rank hangs. The user's input is valid, and the run may resume if it is restarted."""

    exit_code = os.EX_TEMPFAIL


@contextmanager
def forbid_exits() -> Iterator[None]:
    """Raise RunError if code that must not end the process calls sys.exit(), such as a method's file or a library.

    Exceptions of signals are subclasses of SystemExit, and are passed on.
    """
    try:
        yield
    except SystemExit as error:
        if type(error) is not SystemExit:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        call = "sys.exit()" if error.code is None else f"sys.exit({error.code!r})"
        raise RunError(f"{frame.filename}:{frame.lineno}: {call} was called while a command ran; remove it") from error


class FarfieldWarning(UserWarning):
    """Warning of one line about a result; commands print it as a note."""


UNUSABLE_PATH_ERRNOS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR,
)  # fmt: skip
"""System errors that are caused by the path itself, not by the state of the system."""


def to_path_error(error: BaseException) -> UserError | None:
    """Return a UserError for an error caused by an unusable path, or None for other errors.

    The user specified such a path: without permission, with a name that is too long, or a file instead of a folder.
    """
    if not isinstance(error, OSError) or error.errno not in UNUSABLE_PATH_ERRNOS or error.filename is None:
        return None
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    return UserError(f"{shorten_text(path)}: cannot be used ({error.strerror})")


def check_reachable(path: str | os.PathLike[str]) -> None:
    """Raise the system's error if a path cannot be looked up, for example for lack of permission.

    Call it before reporting that a path does not exist: from Python 3.14 on, `Path.exists` and its siblings return
    False for such paths instead of raising the error. It does nothing if the lookup succeeds, whether or not the path
    exists.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise


def shorten_text(text: str, max_length: int = 200) -> str:
    """Shorten and escape an arbitrary text for use in one line."""
    line = escape_control_characters(text)
    return line if len(line) <= max_length else f"{line[: max_length // 2]}…{line[-max_length // 2 :]}"


MAX_PROBLEMS = 20
"""Maximum number of problems that one error lists."""


def join_problems(problems: Sequence[str]) -> str:
    """Join problems with one file, one line each; of very many, only the first."""
    left_out = len(problems) - MAX_PROBLEMS
    lines = [*problems[:MAX_PROBLEMS], f"and {format_quantity(left_out, 'more problem')}"] if left_out > 0 else problems
    return "\n".join(lines)


def quote_text(text: str, max_length: int = 200) -> str:
    """Quote, escape and shorten an arbitrary text for use in one line."""
    return shorten_text(repr(text), max_length)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of Python, numpy or torch.

    On a CPU, torch raises RuntimeError, also if a file is too large to be mapped.
    """
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (
            isinstance(error, RuntimeError)
            and ("can't allocate memory" in str(error) or "Cannot allocate" in str(error))
        )
    )


MIN_OPEN_FILES = 4096
"""Minimum limit of open files that errors recommend."""


def is_out_of_files(error: BaseException) -> bool:
    """Return True if this process reached its limit of open files, as reported by Python, torch or gloo."""
    words = os.strerror(errno.EMFILE)
    return any(
        (isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)) or words in str(cause)
        for cause in _iter_causes(error)
    )


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, each once, because an error can be part of its own chain."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is each for each in seen):
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


def describe_file_limit() -> str:
    """Describe the limit of open files that this process reached, and how to raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(MIN_OPEN_FILES, 2 * soft)
    line = f"too many open files: a process may open {soft:,} here; raise the limit first: ulimit -n {needed}"
    if hard != resource.RLIM_INFINITY and hard < needed:
        line += f"; only an administrator can exceed the hard limit of {hard:,}"
    return line


FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""System errors of a full disk, an exhausted quota, and a file above the maximum size."""


def describe_exhausted_resource(error: BaseException) -> str | None:
    """Describe in one line what ran out: open files, folders for temporary files, or the space for a named file.

    Returns None for other errors. Python reports that no folder for temporary files can be written to as a missing
    file without a name.
    """
    if is_out_of_files(error):
        return describe_file_limit()
    for cause in _iter_causes(error):
        _, found, folders = str(getattr(cause, "strerror", "")).partition("No usable temporary directory found in ")
        if found:
            names = folders.strip("[]").replace("'", "")
            return f"temporary files cannot be written to {names}; set TMPDIR to a writable folder with free space"
    if isinstance(error, OSError) and error.errno in FULL_DISK_ERRNOS and error.filename is not None:
        return f"{shorten_text(os.fsdecode(error.filename))}: cannot be written ({error.strerror})"
    return None


def check_file_limit(needed: int) -> None:
    """Raise RunError if this process may open fewer files than it needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise RunError(describe_file_limit())


def is_near_file_limit() -> bool:
    """Return True if this process can open only a few more files."""
    try:
        return len(os.listdir("/proc/self/fd")) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 8
    except OSError as error:
        return is_out_of_files(error)


def describe_cause(error: BaseException) -> str:
    """Describe the cause of an error in one line.

    torch, safetensors and numpy report a full disk with their own errors. torch's has the system error as its cause,
    safetensors' contains the number ("os error 28"), and numpy's (`array.tofile`) only counts: "2500 requested and 480
    written".
    """
    for cause in _iter_causes(error):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    if number := re.search(r"\(os error (\d+)\)", words):
        return os.strerror(int(number[1]))
    if number := re.fullmatch(r"(\d+) requested and (\d+) written", words):
        return f"the disk is full or failed: {int(number[2]):,} of {int(number[1]):,} array elements were written"
    return words


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'…' if len(text) > 300 else ''}" if text else type(error).__name__

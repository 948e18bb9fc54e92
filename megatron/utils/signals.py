"""Signals: Ctrl-C sends SIGINT, a terminal that closes SIGHUP, schedulers SIGTERM some time before they kill.

From a command's first line to its last one of three handlers answers them:

1. `exit_on_signal` before anything has begun: the process ends with a line.
2. `raise_on_signal` while a command runs (inside `raising_on_signals`): an exception ends it, so that children are
   ended and temporary files removed.
3. `GracefulStop` while a model is trained: the first signal lets the step end and be saved, a second one is answered by
   the handler before it. A second SIGHUP is not, for what hangs up (a terminal, a parent that was killed) may send
   several.

Python runs a handler between two of its own instructions, so an import, or work in C, may keep it waiting for long. If
handler 2 has not raised its exception within `MAX_EXCEPTION_DELAY`, a thread calls what was registered by
`cleanup_on_signal` and ends the process. `acknowledge_signals` has a thread print a line at once.

A signal that is ignored when we come (SIGHUP under nohup) stays ignored.

Some processes must not outlive the one that started them, however it went: the ranks of a run, a sweep's trainings. The
parent passes `get_parent_variable()` in the environment; the child calls `end_with_parent` first of all and is then
sent SIGHUP when the parent is gone, also by SIGKILL. A training answers by saving after its step. The system hands a
child from one of its parent's dying threads to the next, and sends the signal each time. So it must be one of which the
second means nothing new: SIGHUP, not SIGTERM, whose second ends a run at once.
"""

from __future__ import annotations  # deepy.py imports this also where only an old Python is found, to hand on to ours

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_EXCEPTION_DELAY = 1.5
"""Seconds from a signal to the exception that `raise_on_signal` makes of it; then the process is ended without one."""
Log = Callable[[str], None]


def list_handled_signals() -> tuple[signal.Signals, ...]:
    """Those of `HANDLED_SIGNALS` that this process does not ignore."""
    return tuple(number for number in HANDLED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


class StoppedBySignal(SystemExit):
    """SIGTERM or SIGHUP ended what was under way, as KeyboardInterrupt does for SIGINT.

    Like it no `Exception`, so that nobody takes it for a failure. Uncaught, it ends a process silently with 128 + its
    number, as shells have it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"stopped by signal {self.signum}"


def build_signal_exception(signum: int) -> BaseException:
    """The exception for a signal."""
    return KeyboardInterrupt() if signum == signal.SIGINT else StoppedBySignal(signum)


def describe_signal(error: BaseException) -> str:
    """The line that a user reads of an exception of `build_signal_exception`."""
    return str(error) if isinstance(error, StoppedBySignal) else "interrupted"


def exit_on_signal(signum: int, frame: FrameType | None) -> None:
    """A handler: end at once, with a line."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{describe_signal(build_signal_exception(signum))}\n".encode())
    os._exit(128 + signum)


def install_exit_handlers() -> None:
    """Have signals answered by `exit_on_signal`, until `raising_on_signals` replaces it."""
    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_on_signal)


def raise_on_signal(signum: int, frame: FrameType | None) -> None:
    """A handler: an exception ends what is under way; an import is waited for: torch and numpy would abort, or go on
    half imported."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _acknowledge_signal()
            timer = threading.Timer(0.02, os.kill, (os.getpid(), signum))
            timer.daemon = True
            timer.start()
            return
        frame = frame.f_back
    if signum == signal.SIGHUP:
        signal.signal(signum, signal.SIG_IGN)  # what hangs up may say so again, while files are removed
    _exception_raised.set()
    raise build_signal_exception(signum)


_exception_raised = threading.Event()
"""Has `raise_on_signal` made an exception of a signal?"""
_cleanups: list[Callable[[], object]] = []


@contextmanager
def cleanup_on_signal(clean_up: Callable[[], object]) -> Iterator[None]:
    """Have `clean_up` called, from a thread, if the process must be ended inside this context without an exception."""
    _cleanups.append(clean_up)
    try:
        yield
    finally:
        _cleanups.remove(clean_up)


def _end_process(signum: int, standard_error: int) -> NoReturn:
    """Clean up and end the process from a thread, with a line."""
    for clean_up in reversed(_cleanups):
        with suppress(Exception):
            clean_up()
    with suppress(OSError):
        os.write(standard_error, f"{describe_signal(build_signal_exception(signum))}\n".encode())
    os._exit(128 + signum)


@contextmanager
def _forcing_exit(standard_error: int) -> Iterator[None]:
    """End the process `MAX_EXCEPTION_DELAY` after a signal of which no exception has come until then.

    A thread reads the signals from a socket that the system writes their numbers to at once, whatever the main thread
    does (`signal.set_wakeup_fd`). There is one such descriptor: inside `acknowledge_signals`, where there is something
    to save, it is that function's.
    """
    global _forced_exit_descriptor
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    is_over = threading.Event()

    def wait() -> None:
        while signals := reader.recv(64):
            # A signal with another handler is left alone: there is something to save.
            signum = next((signum for signum in signals if signal.getsignal(signum) is raise_on_signal), None)
            if signum is None or _exception_raised.wait(MAX_EXCEPTION_DELAY) or is_over.is_set():
                continue
            _end_process(signum, standard_error)
        reader.close()

    _exception_raised.clear()
    threading.Thread(target=wait, name="forced-exit", daemon=True).start()
    previous_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _forced_exit_descriptor = writer.fileno()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(previous_descriptor)
        _forced_exit_descriptor = -1
        writer.close()


_forced_exit_descriptor = -1
"""The descriptor that the system writes signals to for `_forcing_exit`, while that is entered."""


_standard_error: int | None = None
"""A copy of descriptor 2 as it was at the start, until a signal is acknowledged there: while a model is computed with,
2 points to a log."""


@contextmanager
def raising_on_signals(replacing: tuple[Any, ...] = ()) -> Iterator[None]:
    """Answer signals with exceptions: KeyboardInterrupt for SIGINT, StoppedBySignal for the others.

    replacing: handlers that are replaced, besides Python's own. A signal with another handler keeps it. Outside the
    main thread nothing changes.
    """
    global _standard_error
    if not _is_main_thread():
        yield
        return
    replaced = (signal.SIG_DFL, signal.default_int_handler, *replacing)
    handlers = {signum: handler for signum in HANDLED_SIGNALS if (handler := signal.getsignal(signum)) in replaced}
    standard_error = os.dup(2)
    _standard_error = standard_error
    for signum in handlers:
        signal.signal(signum, raise_on_signal)
    try:
        with _forcing_exit(standard_error):
            yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        _standard_error = None
        os.close(standard_error)


def _acknowledge_signal() -> None:
    """Print once that a signal came, unless `acknowledge_signals` does."""
    global _standard_error
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if _standard_error is not None and descriptor in (-1, _forced_exit_descriptor):
        with suppress(OSError):
            os.write(_standard_error, b"stopping\n")
    _standard_error = None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()  # only it may install handlers


@contextmanager
def acknowledge_signals(log: Log, message: str, *, second_answered: threading.Event | None = None) -> Iterator[None]:
    """Log a message as soon as the first of `HANDLED_SIGNALS` comes, also while the main thread is busy in C.

    With `second_answered`, a second SIGTERM or SIGINT ends the process unless its handler sets that event within
    `MAX_EXCEPTION_DELAY`: a step on a slow machine may keep the main thread in C for minutes.

    Python runs handlers between two of its own instructions, which may be seconds away: a step's products, a wait for
    other processes. The thread hears at once of every signal that has a handler in Python, as SIGINT has.
    """
    if not _is_main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def wait() -> None:
        num_heard = 0
        while signals := reader.recv(64):
            for signum in signals:
                if signum not in HANDLED_SIGNALS:
                    continue
                num_heard += 1
                if num_heard == 1:
                    log(message)
                elif second_answered is None:
                    return
                elif signum != signal.SIGHUP and not second_answered.wait(MAX_EXCEPTION_DELAY):
                    _end_process(signum, 2)

    thread = threading.Thread(target=wait, name="acknowledge", daemon=True)
    thread.start()
    previous_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        if second_answered is not None:
            second_answered.set()
        signal.set_wakeup_fd(previous_descriptor)
        writer.close()
        thread.join(1.0)
        reader.close()


_active_stops: list[GracefulStop] = []  # those that are entered


def request_stop() -> bool:
    """Ask the training under way to end after its step, as SIGTERM does. False if there is none."""
    if _active_stops:
        os.kill(os.getpid(), signal.SIGTERM)
    return bool(_active_stops)


class GracefulStop:
    """Use as a context: inside it `signal` is the number of the first signal that came, or None.

    log: where the first signal is acknowledged at once; None is silent.
    """

    def __init__(self, log: Log | None = None) -> None:
        self.signal: int | None = None
        self._log = log
        self._handlers: dict[int, Any] = {}
        self._process = os.getpid()
        self._acknowledgement = ExitStack()
        self._second_answered = threading.Event()

    def __enter__(self) -> GracefulStop:
        if _is_main_thread():
            if self._log is not None:
                message = "stopping after this step; again to end at once"
                self._acknowledgement.enter_context(
                    acknowledge_signals(self._log, message, second_answered=self._second_answered)
                )
            self._handlers = {signum: signal.signal(signum, self._record_signal) for signum in list_handled_signals()}
            _active_stops.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _active_stops:
            _active_stops.remove(self)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}
        self._acknowledgement.close()

    def _record_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A data-loading process that inherited the handler: what the terminal sends reaches it too, but the run
            # still needs it.
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        if self.signal is None:
            self.signal = signum
            return
        if signum == signal.SIGHUP:
            return
        self._second_answered.set()
        signal.signal(signum, self._handlers.get(signum, signal.SIG_DFL))
        os.kill(os.getpid(), signum)


PARENT_VARIABLE = "FARFIELD_PARENT"


def get_parent_variable() -> dict[str, str]:
    """The environment that binds a child to this process."""
    return {PARENT_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """Linux: ask for SIGHUP when the process that bound this one ends. Without such a process nothing happens.

    It is heard also where the parent ignores it (nohup): bound processes have sessions of their own, so it comes from
    no terminal.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)  # not for children of ours
    if parent is None or not sys.platform.startswith("linux"):
        return
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    import ctypes  # a child of ours alone needs it

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGHUP)  # PR_SET_PDEATHSIG
    if parent != str(os.getppid()):  # it was gone before the call
        sys.exit(1)

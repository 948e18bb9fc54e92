"""Signal handling: Ctrl-C sends SIGINT, a closing terminal SIGHUP, and schedulers SIGTERM some time before they kill.

From the start of a command to its end, one of three handlers is active:

1. `exit_on_signal` before any work has started: the process exits with a message.

2. `raise_on_signal` while a command runs (inside `convert_signals_to_exceptions`): an exception ends it, so that child
processes are stopped and temporary files removed.

3. `GracefulStop` during training: the first signal lets the step finish and be saved. A second one is passed to the
previous handler. A second SIGHUP is ignored, because a hang-up (a closed terminal, a killed parent) may send several.

Python runs a handler between two of its own instructions, so an import, or work in C, may delay it for long. If handler
2 has not raised its exception within `MAX_EXCEPTION_DELAY`, a thread calls the functions registered by
`clean_up_on_signal` and ends the process. `acknowledge_signals` makes a thread print a line immediately.

A signal that is ignored at the start (SIGHUP under nohup) stays ignored.

Some processes must not outlive the one that started them, however it ended: the ranks of a run, and the training runs
of a sweep. The parent passes `get_parent_variable()` in the environment. The child calls `exit_with_parent` first, and
then receives SIGHUP when the parent ends, even by SIGKILL. Training responds by saving after its step. Rehearsed ranks
have nothing to save, and request SIGKILL. The system passes a child from one of its parent's dying threads to the next,
and sends the signal each time. So the signal must be one whose repetition has no effect: SIGHUP, not SIGTERM, which
ends a run immediately if repeated.
"""

from __future__ import annotations  # deepy.py imports this with old Python versions too, to re-execute with ours

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
"""Maximum seconds from a signal to the exception of `raise_on_signal`; then the process is ended without one."""
Log = Callable[[str], None]


def list_handled_signals() -> tuple[signal.Signals, ...]:
    """Return the signals of `HANDLED_SIGNALS` that this process does not ignore."""
    return tuple(number for number in HANDLED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


class StoppedBySignal(SystemExit):
    """Exception for SIGTERM and SIGHUP, like KeyboardInterrupt for SIGINT.

    It is not an `Exception` either, so that it is not mistaken for a failure. Uncaught, it ends a process silently with
    exit code 128 + signal number, as shells do.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}"


def build_signal_exception(signum: int) -> BaseException:
    """Return the exception for a signal."""
    return KeyboardInterrupt() if signum == signal.SIGINT else StoppedBySignal(signum)


def describe_signal(error: BaseException) -> str:
    """Return the message for an exception of `build_signal_exception`, with its notes, such as how to resume."""
    ending = str(error) if isinstance(error, StoppedBySignal) else "interrupted"
    return "; ".join([ending, *getattr(error, "__notes__", ())])


BEFORE_WORK = "before any work; nothing was changed"
"""End of the message of a process that a signal ends while it starts."""


def exit_on_signal(signum: int, frame: FrameType | None) -> None:
    """Handle a signal by exiting immediately with a message."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{describe_signal(build_signal_exception(signum))} {BEFORE_WORK}\n".encode())
    os._exit(128 + signum)


def install_exit_handlers() -> None:
    """Install `exit_on_signal` as the handler, until `convert_signals_to_exceptions` replaces it."""
    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_on_signal)


def raise_on_signal(signum: int, frame: FrameType | None) -> None:
    """Handle a signal by raising an exception.

    Waits for an import to finish, because torch and numpy would abort or stay half imported.
    """
    global _deferred_signal
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _acknowledge_signal()
            _deferred_signal = signum
            timer = threading.Timer(0.02, os.kill, (os.getpid(), signum))
            timer.daemon = True
            timer.start()
            return
        frame = frame.f_back
    _deferred_signal = None
    if signum == signal.SIGHUP:
        signal.signal(signum, signal.SIG_IGN)  # a hang-up may repeat while files are being removed
    _exception_raised.set()
    raise build_signal_exception(signum)


_deferred_signal: int | None = None
"""Signal that waits for an import to finish."""


def raise_deferred_signal() -> None:
    """Raise the exception of a signal that arrived during the last import of a command.

    On a busy machine the command may end before the timer of `raise_on_signal` repeats the signal.
    """
    if _deferred_signal is not None:
        raise_on_signal(_deferred_signal, None)


_exception_raised = threading.Event()
"""Event that is set when `raise_on_signal` raises an exception."""
_cleanups: list[Callable[[], object]] = []


@contextmanager
def clean_up_on_signal(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` from a thread if the process must be ended inside this context without an exception."""
    _cleanups.append(clean_up)
    try:
        yield
    finally:
        _cleanups.remove(clean_up)


def _end_process(signum: int, standard_error: int) -> NoReturn:
    """Clean up and end the process from a thread, with a message."""
    for clean_up in reversed(_cleanups):
        with suppress(Exception):
            clean_up()
    with suppress(OSError):
        os.write(standard_error, f"{describe_signal(build_signal_exception(signum))}\n".encode())
    os._exit(128 + signum)


@contextmanager
def _force_exit(standard_error: int) -> Iterator[None]:
    """End the process `MAX_EXCEPTION_DELAY` after a signal whose exception has not been raised by then.

    A thread reads signal numbers from a socket that the system writes to immediately, whatever the main thread does
    (`signal.set_wakeup_fd`). There is only one such descriptor. Inside `acknowledge_signals`, when there is something
    to save, that function uses it.
    """
    global _forced_exit_descriptor
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    is_over = threading.Event()

    def wait() -> None:
        while signals := reader.recv(64):
            # Leave signals with another handler alone: there is something to save.
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
"""Descriptor to which the system writes signals for `_force_exit` while it is active."""


_standard_error: int | None = None
"""Copy of descriptor 2 at the start, until a signal is acknowledged there. While a model runs, descriptor 2 is a log
file."""


@contextmanager
def convert_signals_to_exceptions(replacing: tuple[Any, ...] = ()) -> Iterator[None]:
    """Convert signals to exceptions: KeyboardInterrupt for SIGINT, StoppedBySignal for the others.

    Args:
        replacing: handlers to replace, besides Python's own. A signal with another handler keeps it. Outside the main
            thread nothing changes.
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
        with _force_exit(standard_error):
            yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        _standard_error = None
        os.close(standard_error)


def _acknowledge_signal() -> None:
    """Print once that a signal has arrived, unless `acknowledge_signals` does."""
    global _standard_error
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if _standard_error is not None and descriptor in (-1, _forced_exit_descriptor):
        with suppress(OSError):
            os.write(_standard_error, b"stopping\n")
    _standard_error = None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()  # only the main thread may install handlers


@contextmanager
def acknowledge_signals(log: Log, message: str, *, second_answered: threading.Event | None = None) -> Iterator[None]:
    """Log a message as soon as the first of `HANDLED_SIGNALS` arrives, even while the main thread is busy in C.

    With `second_answered`, a second SIGTERM or SIGINT ends the process unless its handler sets that event within
    `MAX_EXCEPTION_DELAY`. A step on a slow machine may keep the main thread in C for minutes.

    Python runs handlers between two of its own instructions, which may be seconds away: during matrix products, or a
    wait for other processes. The thread is notified immediately of every signal that has a Python handler, such as
    SIGINT.
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


_active_stops: list[GracefulStop] = []  # active contexts


def request_stop() -> bool:
    """Ask a training run in progress to stop after its step, as SIGTERM does. Returns False if there is none."""
    if _active_stops:
        os.kill(os.getpid(), signal.SIGTERM)
    return bool(_active_stops)


class GracefulStop:
    """Context in which `signal` is the number of the first signal received, or None.

    Args:
        log: receives the immediate acknowledgement of the first signal; None is silent.
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
                message = "stopping after this step; repeat to stop immediately"
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
        global _deferred_signal
        if os.getpid() != self._process:
            # A data-loading process that inherited the handler: signals from the terminal reach it too, but the run
            # still needs it.
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        _deferred_signal = None
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
    """Return the environment variable that binds a child to this process."""
    return {PARENT_VARIABLE: str(os.getpid())}


def exit_with_parent(signum: signal.Signals = signal.SIGHUP) -> None:
    """Request a signal on Linux when the process that bound this one ends. Does nothing without such a process.

    The signal is received even if the parent ignores it (nohup): bound processes have their own sessions, so it does
    not come from a terminal.

    Args:
        signum: SIGHUP, which lets training save, or SIGKILL for a process that has nothing to save.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)  # not inherited by our children
    if parent is None or not sys.platform.startswith("linux"):
        return
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, signal.SIG_DFL)
    import ctypes  # only needed in a child of ours

    ctypes.CDLL(None, use_errno=True).prctl(1, signum)  # PR_SET_PDEATHSIG
    if parent != str(os.getppid()):  # the parent ended before the call
        sys.exit(1)

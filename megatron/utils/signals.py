"""Signals: Ctrl-C sends SIGINT, a terminal that closes SIGHUP, schedulers SIGTERM some time before they kill.

From a command's first line to its last one of three things answers them:

- `leave` while nothing is under way: the process ends with a line;
- `unwinding` while something is: an exception ends it, so that children are ended and temporary files removed;
- `GracefulStop` while a model is trained: the first signal lets the step end and be saved, a second one is answered as
  if nothing were installed. A second SIGHUP is not, for what hangs up (a terminal, a parent that was killed) may send
  several.

Python answers a signal between two of its own instructions, so an import, or work in C, may keep it waiting for long.
What is unwinding is therefore given `PATIENCE`; then a thread of ours removes what would be left (`cleanup_on_signal`)
and ends the process.

A signal that is ignored when we come (SIGHUP under nohup) stays ignored.

Some processes must not outlive the one that started them, however it went: the ranks of a run, a sweep's trainings. The
parent passes `get_parent_variable()` in the environment; the child calls `end_with_parent` first of all and is then
sent SIGHUP when the parent is gone, also by SIGKILL. A training answers by saving after its step. The system hands a
child from one of its parent's dying threads to the next, and sends the signal each time. So it must be one of which the
second means nothing new: SIGHUP, not SIGTERM, whose second ends a run at once.
"""

from __future__ import annotations  # deepy.py imports this also where only an old Python is found, to hand on to ours

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

PARENT = "FARFIELD_PARENT"


def get_parent_variable() -> dict[str, str]:
    """The environment that binds a child to this process."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Linux: ask for SIGHUP when the process that bound this one ends. Without such a process nothing happens.

    It is heard also where the parent ignores it (nohup): bound processes have sessions of their own, so it comes from
    no terminal.
    """
    parent = os.environ.pop(PARENT, None)  # not for children of ours
    if parent is None or not sys.platform.startswith("linux"):
        return
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGHUP)  # PR_SET_PDEATHSIG
    if parent != str(os.getppid()):  # it was gone before the call
        sys.exit(1)


SECOND_SIGNAL_DELAY = 1.5
"""Seconds from a signal to the exception that it becomes, where nothing is there yet that would be saved."""
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Log = Callable[[str], None]


def list_handled_signals() -> tuple[signal.Signals, ...]:
    """Those of SIGNALS that this process does not ignore."""
    return tuple(number for number in HANDLED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


class StoppedBySignal(SystemExit):
    """SIGTERM or SIGHUP ended what was under way, as KeyboardInterrupt does for SIGINT.

    Like it no `Exception`, so that nobody takes it for a failure; a process that knows nothing of it exits silently
    with 128 + its number, as shells have it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"stopped by signal {self.signum}"


def build_signal_exception(signum: int) -> BaseException:
    """The exception for a signal."""
    return KeyboardInterrupt() if signum == signal.SIGINT else StoppedBySignal(signum)


def describe_signal(ended: BaseException) -> str:
    """What a user reads of such an exception."""
    return str(ended) if isinstance(ended, StoppedBySignal) else "interrupted"


def exit_on_signal(signum: int, frame: FrameType | None) -> None:
    """A handler: end at once, with a line."""
    ended = build_signal_exception(signum)
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{describe_signal(ended)}\n".encode())
    os._exit(128 + signum)


def install_exit_handlers() -> None:
    """Have signals answered by `leave`, until `unwinding` replaces it."""
    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_on_signal)


def raise_on_signal(signum: int, frame: FrameType | None) -> None:
    """A handler: an exception ends what is under way, after an import: torch and numpy abort, or go on in ruins,
    otherwise."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _acknowledge_signal()
            again = threading.Timer(0.02, os.kill, (os.getpid(), signum))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    if signum == signal.SIGHUP:
        signal.signal(signum, signal.SIG_IGN)  # what hangs up may say so again, while files are removed
    _handlers_installed.set()
    raise build_signal_exception(signum)


_handlers_installed = threading.Event()
"""Has a signal become an exception?"""
_cleanups: list[Callable[[], object]] = []


@contextmanager
def cleanup_on_signal(clean: Callable[[], object]) -> Iterator[None]:
    """Have `clean` called, from a thread, if the process must be ended inside this context without an exception."""
    _cleanups.append(clean)
    try:
        yield
    finally:
        _cleanups.remove(clean)


@contextmanager
def _exit_on_second_signal(standard_error: int) -> Iterator[None]:
    """End the process `PATIENCE` after a signal that no exception has answered until then.

    The system tells a thread of ours of a signal at once, whatever the main thread does; `acknowledged`, inside which
    there is something to save, has it told itself instead.
    """
    global _second_signal_handlers
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    over = threading.Event()

    def wait() -> None:
        while signals := ours.recv(64):
            # Whoever else answers a signal has something to save.
            signum = next((signum for signum in signals if signal.getsignal(signum) is raise_on_signal), None)
            if signum is None or _handlers_installed.wait(SECOND_SIGNAL_DELAY) or over.is_set():
                continue
            for clean in reversed(_cleanups):
                with suppress(Exception):
                    clean()
            with suppress(OSError):
                os.write(standard_error, f"{describe_signal(build_signal_exception(signum))}\n".encode())
            os._exit(128 + signum)
        ours.close()

    _handlers_installed.clear()
    threading.Thread(target=wait, name="impatience", daemon=True).start()
    before, _second_signal_handlers = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False), theirs.fileno()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        _second_signal_handlers = -1
        theirs.close()


_second_signal_handlers = -1
"""The descriptor by which the system tells `_exit_on_second_signal` of signals, while it is entered."""


_standard_error: int | None = None
"""A copy of it as it was at the start, until a signal is acknowledged there: descriptor 2 points to a log while a model
is computed with."""


@contextmanager
def raising_on_signals(instead: tuple[Any, ...] = ()) -> Iterator[None]:
    """Answer signals with exceptions: KeyboardInterrupt for SIGINT, Stopped for the others.

    instead: handlers that are replaced. A signal that something else answers keeps its answer; as does a process
    outside its main thread.
    """
    global _standard_error
    if not _is_main_thread():
        yield
        return
    replaced = (signal.SIG_DFL, signal.default_int_handler, *instead)
    before = {signum: handler for signum in HANDLED_SIGNALS if (handler := signal.getsignal(signum)) in replaced}
    held = os.dup(2)
    _standard_error = held
    for signum in before:
        signal.signal(signum, raise_on_signal)
    try:
        with _exit_on_second_signal(held):
            yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _standard_error = None
        os.close(held)


def _acknowledge_signal() -> None:
    """Say once that a signal was heard, unless `acknowledged` says it."""
    global _standard_error
    wakened = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
    if _standard_error is not None and wakened in (-1, _second_signal_handlers):
        with suppress(OSError):
            os.write(_standard_error, b"stopping\n")
    _standard_error = None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()  # only it may install handlers


@contextmanager
def acknowledge_signals(say: Log, what: str) -> Iterator[None]:
    """Say `what` as soon as the first of SIGNALS comes, also while the main thread is busy in C.

    Python runs handlers between two of its own instructions, which may be seconds away: a step's products, a wait for
    other processes. The system tells a thread of ours at once, of every signal that has a handler in Python, as SIGINT
    has.
    """
    if not _is_main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def wait() -> None:
        while signals := ours.recv(64):
            if any(signum in HANDLED_SIGNALS for signum in signals):
                say(what)
                return

    thread = threading.Thread(target=wait, name="acknowledge", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()
        thread.join(1.0)
        ours.close()


_active_request: list[GracefulStop] = []  # those that are entered


def request_stop() -> bool:
    """Ask the training under way to end after its step, as SIGTERM does. False if there is none."""
    if _active_request:
        os.kill(os.getpid(), signal.SIGTERM)
    return bool(_active_request)


class GracefulStop:
    """Use as a context: inside it `signal` is the number of the first signal that came, or None.

    say: where the first signal is acknowledged at once; None is silent.
    """

    def __init__(self, say: Log | None = None) -> None:
        self.signal: int | None = None
        self._say = say
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._acknowledged = ExitStack()

    def __enter__(self) -> GracefulStop:
        if _is_main_thread():
            if self._say is not None:
                what = "stopping after this step; again to end at once"
                self._acknowledged.enter_context(acknowledge_signals(self._say, what))
            self._before = {signum: signal.signal(signum, self._record_signal) for signum in list_handled_signals()}
            _active_request.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _active_request:
            _active_request.remove(self)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
        self._acknowledged.close()

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
        signal.signal(signum, self._before.get(signum, signal.SIG_DFL))
        os.kill(os.getpid(), signum)

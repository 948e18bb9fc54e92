"""Signals: Ctrl-C sends SIGINT, a terminal that closes SIGHUP, schedulers SIGTERM some time before they kill.

From a command's first line to its last one of three things answers them:

- `leave` while nothing is under way: the process ends with a line;
- `unwinding` while something is: an exception ends it, so that children are ended and temporary files removed;
- `StopRequest` while a model is trained: the first signal lets the step end and be saved, a second one is answered as
  if nothing were installed. A second SIGHUP is not, for what hangs up (a terminal, a parent that was killed) may send
  several.

Python answers a signal between two of its own instructions, so an import, or work in C, may keep it waiting for long.
What is unwinding is therefore given `PATIENCE`; then a thread of ours removes what would be left (`cleaned_up`) and
ends the process.

A signal that is ignored when we come (SIGHUP under nohup) stays ignored.
"""

from __future__ import annotations  # deepy.py imports this also where only an old Python is found, to hand on to ours

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

PATIENCE = 1.5
"""Seconds from a signal to the exception that it becomes, where nothing is there yet that would be saved."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Say = Callable[[str], None]


def heard() -> tuple[signal.Signals, ...]:
    """Those of SIGNALS that this process does not ignore."""
    return tuple(number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


class Stopped(SystemExit):
    """SIGTERM or SIGHUP ended what was under way, as KeyboardInterrupt does for SIGINT.

    Like it no `Exception`, so that nobody takes it for a failure; a process that knows nothing of it exits silently
    with 128 + its number, as shells have it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by signal {self.number}"


def ending(number: int) -> BaseException:
    """The exception for a signal."""
    return KeyboardInterrupt() if number == signal.SIGINT else Stopped(number)


def told(ended: BaseException) -> str:
    """What a user reads of such an exception."""
    return str(ended) if isinstance(ended, Stopped) else "interrupted"


def leave(number: int, frame: FrameType | None) -> None:
    """A handler: end at once, with a line."""
    ended = ending(number)
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{told(ended)}\n".encode())
    os._exit(128 + number)


def leave_at_once() -> None:
    """Have signals answered by `leave`, until `unwinding` replaces it."""
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, leave)


def unwind(number: int, frame: FrameType | None) -> None:
    """A handler: an exception ends what is under way, after an import: torch and numpy abort, or go on in ruins,
    otherwise."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _acknowledge()
            again = threading.Timer(0.02, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # what hangs up may say so again, while files are removed
    _answered.set()
    raise ending(number)


_answered = threading.Event()
"""Has a signal become an exception?"""
_cleanups: list[Callable[[], object]] = []


@contextmanager
def cleaned_up(clean: Callable[[], object]) -> Iterator[None]:
    """Have `clean` called, from a thread, if the process must be ended inside this context without an exception."""
    _cleanups.append(clean)
    try:
        yield
    finally:
        _cleanups.remove(clean)


@contextmanager
def _impatient(standard_error: int) -> Iterator[None]:
    """End the process `PATIENCE` after a signal that no exception has answered until then.

    The system tells a thread of ours of a signal at once, whatever the main thread does; `acknowledged`, inside which
    there is something to save, has it told itself instead.
    """
    global _impatience
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    over = threading.Event()

    def wait() -> None:
        while numbers := ours.recv(64):
            # Whoever else answers a signal has something to save.
            number = next((number for number in numbers if signal.getsignal(number) is unwind), None)
            if number is None or _answered.wait(PATIENCE) or over.is_set():
                continue
            for clean in reversed(_cleanups):
                with suppress(Exception):
                    clean()
            with suppress(OSError):
                os.write(standard_error, f"{told(ending(number))}\n".encode())
            os._exit(128 + number)
        ours.close()

    _answered.clear()
    threading.Thread(target=wait, name="impatience", daemon=True).start()
    before, _impatience = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False), theirs.fileno()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        _impatience = -1
        theirs.close()


_impatience = -1
"""The descriptor by which the system tells `_impatient` of signals, while it is entered."""


_standard_error: int | None = None
"""A copy of it as it was at the start, until a signal is acknowledged there: descriptor 2 points to a log while a model
is computed with."""


@contextmanager
def unwinding(instead: tuple[Any, ...] = ()) -> Iterator[None]:
    """Answer signals with exceptions: KeyboardInterrupt for SIGINT, Stopped for the others.

    instead: handlers that are replaced. A signal that something else answers keeps its answer; as does a process
    outside its main thread.
    """
    global _standard_error
    if not _in_main_thread():
        yield
        return
    replaced = (signal.SIG_DFL, signal.default_int_handler, *instead)
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) in replaced}
    held = os.dup(2)
    _standard_error = held
    for number in before:
        signal.signal(number, unwind)
    try:
        with _impatient(held):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _standard_error = None
        os.close(held)


def _acknowledge() -> None:
    """Say once that a signal was heard, unless `acknowledged` says it."""
    global _standard_error
    wakened = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
    if _standard_error is not None and wakened in (-1, _impatience):
        with suppress(OSError):
            os.write(_standard_error, b"stopping\n")
    _standard_error = None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()  # only it may install handlers


@contextmanager
def acknowledged(say: Say, what: str) -> Iterator[None]:
    """Say `what` as soon as the first of SIGNALS comes, also while the main thread is busy in C.

    Python runs handlers between two of its own instructions, which may be seconds away: a step's products, a wait for
    other processes. The system tells a thread of ours at once, of every signal that has a handler in Python, as SIGINT
    has.
    """
    if not _in_main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def wait() -> None:
        while numbers := ours.recv(64):
            if any(number in SIGNALS for number in numbers):
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


_listening: list[StopRequest] = []  # those that are entered


def ask_to_stop() -> bool:
    """Ask the training under way to end after its step, as SIGTERM does. False if there is none."""
    if _listening:
        os.kill(os.getpid(), signal.SIGTERM)
    return bool(_listening)


class StopRequest:
    """Use as a context: inside it `signal` is the number of the first signal that came, or None.

    say: where the first signal is acknowledged at once; None is silent.
    """

    def __init__(self, say: Say | None = None) -> None:
        self.signal: int | None = None
        self._say = say
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._acknowledged = ExitStack()

    def __enter__(self) -> StopRequest:
        if _in_main_thread():
            if self._say is not None:
                what = "stopping after this step; again to end at once"
                self._acknowledged.enter_context(acknowledged(self._say, what))
            self._before = {number: signal.signal(number, self._note) for number in heard()}
            _listening.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _listening:
            _listening.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        self._acknowledged.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A data-loading process that inherited the handler: what the terminal sends reaches it too, but the run
            # still needs it.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.signal is None:
            self.signal = number
            return
        if number == signal.SIGHUP:
            return
        signal.signal(number, self._before.get(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)

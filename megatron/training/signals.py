"""Stopping in good order: a first signal asks the run to end after the current step and save.

Schedulers send SIGTERM some time before they kill, Ctrl-C sends SIGINT, a terminal that closes SIGHUP. A second signal
ends the process at once, as if nothing were installed; a second SIGHUP does not, for what hangs up (a terminal, a
parent that was killed) may send several. A signal that is ignored when we come (SIGHUP under nohup) stays
ignored.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Say = Callable[[str], None]


def heard() -> tuple[signal.Signals, ...]:
    """Those of SIGNALS that this process does not ignore."""
    return tuple(number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


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

    def __enter__(self) -> "StopRequest":
        if _in_main_thread():
            if self._say is not None:
                what = "stopping after this step; again to end at once"
                self._acknowledged.enter_context(acknowledged(self._say, what))
            self._before = {number: signal.signal(number, self._note) for number in heard()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

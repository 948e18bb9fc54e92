"""Stopping in good order: a first SIGTERM or SIGINT asks the run to end after the current step and save.

Schedulers send SIGTERM some time before they kill; Ctrl-C sends SIGINT. A second signal ends the process at once, as
if nothing were installed.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Use as a context: inside it `signal` is the number of the first signal that came, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only it may install handlers
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A data-loading process that inherited the handler: Ctrl-C reaches it too, but the run still needs it.
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.signal is None:
            self.signal = number
            return
        signal.signal(number, self._before.get(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)

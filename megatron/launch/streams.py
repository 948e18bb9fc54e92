"""A run's output when nobody reads it any more: `./deepy.py train … | head`, a terminal that is closed."""

import os
import signal
from collections.abc import Callable
from typing import IO, Any


class StoppingStream:
    """A text stream that, once it can no longer be written to, asks the run to stop (SIGTERM) and swallows the rest.

    An exception in its place would end the run in the middle of a step, with nothing saved.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._guarded(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # what is still in buffers goes there too
            os.close(nowhere)
            os.kill(os.getpid(), signal.SIGTERM)
            return None

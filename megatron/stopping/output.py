"""A run's output that can no longer be written: `./deepy.py train … | head`, a terminal that is closed, a full disk."""

import errno
import os
from collections.abc import Callable
from typing import IO, Any

from megatron.errors import RunError, reason
from megatron.stopping.signals import ask_to_stop


def write_nowhere(descriptor: int) -> None:
    """What is written to a descriptor from here on goes nowhere; so does what is still in buffers."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class StoppingStream:
    """A text stream that, once it can no longer be written to, asks the run to stop and swallows the rest.

    An exception in its place would end the run in the middle of a step, with nothing saved. Where no run is under way
    yet, or any more, it is a RunError.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._error: OSError | None = None

    @property
    def problem(self) -> str | None:
        """Why it cannot be written to, in words. None while it can, and when there is only nobody who reads: the other
        end of a pipe, or a terminal, is closed."""
        unread = (errno.EPIPE, errno.EIO)
        return None if self._error is None or self._error.errno in unread else reason(self._error)

    def write(self, text: str) -> int:
        return self._guarded(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            self._error = error
            write_nowhere(self._stream.fileno())
            if not ask_to_stop():
                raise RunError(f"standard output: {reason(error)}; no step was taken") from error
            return None

"""A run's output that can no longer be written: `./deepy.py train … | head`, a terminal that is closed, a full disk.
And what a terminal's encoding does not have."""

import codecs
import errno
import os
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from megatron.utils.errors import RunError, describe_cause
from megatron.utils.signals import request_stop

ASCII_FALLBACK = "farfield.readable"
"""How streams for people treat characters that their encoding lacks (`errors` of `open`): never an exception."""

_ASCII_TWINS = {
    "–": "-", "—": "-", "−": "-", "‐": "-", "·": ".", "•": "*", "×": "x", "÷": "/", "±": "+-", "√": "sqrt ",
    "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "→": "->", "←": "<-", "∞": "inf", "∈": "in", "∂": "d", "⌊": "floor(",
    "⌋": ")", "⌈": "ceil(", "⌉": ")", "“": '"', "”": '"', "„": '"', "‘": "'", "’": "'",
}  # fmt: skip
"""Characters that this program writes, and what stands for them in ASCII."""


def _replace_unencodable(error: UnicodeError) -> tuple[bytes, int]:
    """A codec's error handler: what comes nearest in ASCII, and of a file's name that is no text its own bytes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return b"".join(map(_find_ascii, error.object[error.start : error.end])), error.end


def _find_ascii(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":  # PEP 383: a byte that was not decoded
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
    """Let a text stream take every character, unless somebody chose what becomes of those that it lacks."""
    if getattr(stream, "errors", None) in ("strict", "surrogateescape", "backslashreplace"):
        with suppress(AttributeError):  # a stream in memory
            stream.reconfigure(errors=ASCII_FALLBACK)


def redirect_to_null(descriptor: int) -> None:
    """What is written to a descriptor from here on goes nowhere; so does what is still in buffers."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class GuardedStream:
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
        return None if self._error is None or self._error.errno in unread else describe_cause(self._error)

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
            if not request_stop():
                raise RunError(f"standard output: {describe_cause(error)}; no step was taken") from error
            return None

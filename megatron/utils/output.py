"""Output streams that can no longer be written, and ASCII fallbacks.

Examples are `./deepy.py train … | head`, a closed terminal, and a full disk.
"""

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
"""Error handler (`errors` of `open`) for characters that a stream's encoding lacks; it never raises."""

_ASCII_TWINS = {
    "–": "-", "—": "-", "−": "-", "‐": "-", "·": ".", "•": "*", "×": "x", "÷": "/", "±": "+-", "√": "sqrt ",
    "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "→": "->", "←": "<-", "∞": "inf", "∈": "in", "∂": "d", "⌊": "floor(",
    "⌋": ")", "⌈": "ceil(", "⌉": ")", "“": '"', "”": '"', "„": '"', "‘": "'", "’": "'",
}  # fmt: skip
"""Characters used by this program, and their ASCII replacements."""


def _replace_unencodable(error: UnicodeError) -> tuple[bytes, int]:
    """Replace unencodable characters by their nearest ASCII text, or by the raw bytes of an undecodable file name."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return b"".join(map(_find_ascii, error.object[error.start : error.end])), error.end


def _find_ascii(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":  # PEP 383: an undecodable byte
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
    """Make a text stream accept every character, unless the user chose another error handler."""
    if getattr(stream, "errors", None) in ("strict", "surrogateescape", "backslashreplace"):
        with suppress(AttributeError):  # an in-memory stream
            stream.reconfigure(errors=ASCII_FALLBACK)


def redirect_to_null(descriptor: int) -> None:
    """Discard everything written to a descriptor from now on, including buffered data."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class GuardedStream:
    """Text stream that asks the run to stop if it can no longer be written, and discards further output.

    An exception would end the run in the middle of a step without saving. If no training is in progress, it raises
    RunError.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._error: OSError | None = None
        self._is_stop_requested = False

    @property
    def problem(self) -> str | None:
        """Reason why the stream cannot be written, or None.

        It is None while the stream works, and if only the reader is gone: a closed pipe or terminal.
        """
        unread = (errno.EPIPE, errno.EIO)
        return None if self._error is None or self._error.errno in unread else describe_cause(self._error)

    def write(self, text: str) -> int:
        return self._guard(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._guard(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _guard(self, work: Callable[[], Any]) -> Any:
        result = None
        try:
            result = work()
        except OSError as error:
            self._error = error
            redirect_to_null(self._stream.fileno())
        # The first error may have been raised in another thread, before there was a training to stop.
        if self._error is not None and not self._is_stop_requested:
            self._is_stop_requested = request_stop()
            if not self._is_stop_requested:
                raise RunError(f"standard output: {describe_cause(self._error)}; no step was taken") from self._error
        return result

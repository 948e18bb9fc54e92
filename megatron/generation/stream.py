"""Tokens into text that can be shown at once: nothing is shown that a later token would change."""

from collections.abc import Callable, Sequence

CONTEXT = 16
"""Tokens before the first one that decoding is shown: SentencePiece drops a blank at the beginning, and only there."""


class IncrementalDetokenizer:
    """The text of tokens that come one by one. What it returned, joined, is what decoding all of them at once gives.

    A token may end in the middle of a character, whose bytes decode to U+FFFD until the rest has come.
    Such text is held back.

    Args:
        decode: a tokenizer's.
        before: the tokens of the text that is gone on with.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._shown = list(before[-CONTEXT:])
        """Tokens whose text was returned; the last few are decoded again, so that the next have their context."""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Take a token; returns the text that is certain now and was not returned yet."""
        self._held.append(token)
        text = self._new()
        if not text or text.endswith("\ufffd"):
            return ""
        # A blank at the beginning would be dropped, so that what is shown first for context must be more than blanks.
        self._shown, self._held = self._held if text.strip() else self._shown + self._held, []
        return text

    def flush(self) -> str:
        """The text that is still held back, when no more tokens will come."""
        text = self._new()
        self._shown, self._held = self._shown + self._held, []
        return text

    def _new(self) -> str:
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]


class StopStrings:
    """Ends a text where one of some others occurs in it: before the one that is complete first, and of those that are
    at once, before the longest. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False
        """Has one occurred? Nothing is returned any more then."""

    def push(self, text: str) -> str:
        """Take text; returns what is certainly before any of the stops."""
        if self.found:
            return ""
        text = self._held + text
        occurring = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if occurring:
            self.found, self._held = True, ""
            return text[: min(occurring)[1]]
        keep = max((self._beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is held back, when no more text will come."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

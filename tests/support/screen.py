"""Pseudo-terminal of a given width on this process's descriptor 1, its visible contents, and a clock."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


class Screen:
    """Contents of a terminal with `width` columns; understands the control sequences of rich's live displays."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[str] = [""]
        self.row = self.column = 0
        self.sent = ""

    def write(self, text: str) -> None:
        self.sent += text
        at = 0
        while at < len(text):
            if match := CONTROL.match(text, at):
                self._control(match[1], match[2])
                at = match.end()
                continue
            self._put(text[at])
            at += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        else:
            if self.column == self.width:  # a full line wraps at the next character
                self._down()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _control(self, argument: str, kind: str) -> None:
        if kind == "A":
            self.row = max(0, self.row - int(argument or 1))
        elif kind == "K":
            assert argument == "2"
            self.lines[self.row] = ""
        else:
            assert kind in "mhl", f"unknown control sequence {argument}{kind}"

    @property
    def shown(self) -> list[str]:
        """Return the visible lines, without blank lines at the end."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip().split("\n")


@contextmanager
def terminal(width: int) -> Iterator[Screen]:
    """Make descriptor 1 a terminal of `width` columns; the screen is complete afterwards."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    screen = Screen(width)

    def read() -> None:
        pending = b""
        while True:
            try:
                chunk = os.read(main, 4096)
            except OSError:  # the other end is closed
                chunk = b""
            pending += chunk
            # Never process a partial character or control sequence.
            complete = pending.rfind(b"\n") + 1 if chunk else len(pending)
            screen.write(pending[:complete].decode())
            pending = pending[complete:]
            if not chunk:
                return

    reader = threading.Thread(target=read)
    reader.start()
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(side, 1)
    os.close(side)
    try:
        yield screen
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        reader.join(10)
        os.close(main)


class Clock:
    """Clock controlled by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

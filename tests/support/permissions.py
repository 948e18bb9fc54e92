"""Unreadable files, also for tests that run as root, which ignores permissions."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION = 0x20080522  # version of the structures of capget(2)
_IGNORE_PERMISSIONS = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def unprivileged() -> Iterator[None]:
    """Enforce file permissions for this thread, even as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("Ii", _VERSION, 0))
    held = ctypes.create_string_buffer(24)  # twice: effective, permitted, inheritable, 32 bits each

    def check(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), "capabilities")

    check(libc.capget(header, held))
    effective, *others = struct.unpack("6I", held.raw)
    check(libc.capset(header, struct.pack("6I", effective & ~_IGNORE_PERMISSIONS, *others)))
    try:
        yield
    finally:
        check(libc.capset(header, held.raw))


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Make a file or folder unreadable for everybody."""
    mode = path.stat().st_mode
    os.chmod(path, 0)
    try:
        yield
    finally:
        os.chmod(path, mode)

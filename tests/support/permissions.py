"""Files that may not be read, also where the tests run as root, to whom the system denies nothing."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION = 0x20080522  # of the structures of capget(2)
_IGNORE_PERMISSIONS = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def unprivileged() -> Iterator[None]:
    """Inside it, permissions hold for this thread as for anybody."""
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
    """Inside it, nobody may read a file, or look into a folder."""
    mode = path.stat().st_mode
    os.chmod(path, 0)
    try:
        yield
    finally:
        os.chmod(path, mode)

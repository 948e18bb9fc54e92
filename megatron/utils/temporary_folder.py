"""Temporary folders that are removed with the process that created them, however it ends.

A killed process (SIGKILL, out of memory) removes nothing. So each folder contains a file that its creator keeps locked.
The system releases the lock when the process ends, even if its process ID is reused. The next process that creates a
folder first removes unlocked folders of the same user and machine.
"""

import fcntl
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.utils.signals import cleanup_on_signal

PREFIX = "farfield-"
OWNER_FILE = ".owner"
"""Lock file in the folder, locked by its creator. It contains the name of the machine."""


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Create a folder of this process for the duration of the context.

    Args:
        purpose: a word of its name, `farfield-PURPOSE-…`, in the folder given by TMPDIR.

    Raises:
        OSError: the folder cannot be created.
    """
    remove_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
    descriptor, maker = _take_folder(folder), os.getpid()

    def remove() -> None:
        if os.getpid() == maker:  # a forked child runs the same code on exit
            shutil.rmtree(folder, ignore_errors=True)

    try:
        with cleanup_on_signal(remove):
            yield folder
    finally:
        remove()
        if descriptor is not None:
            os.close(descriptor)


def _take_folder(folder: Path) -> int | None:
    """Lock the file of a folder; returns None if the file system has no locks.

    The file gets its name after it is locked, so that no process finds it unlocked before.
    """
    new, descriptor = folder / f"{OWNER_FILE}.new", None
    try:
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, platform.node().encode())
        new.rename(folder / OWNER_FILE)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def remove_stale_folders() -> None:
    """Remove this user's temporary folders whose creator on this machine has ended. Unclear cases are kept."""
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.read(descriptor, 256) != platform.node().encode():  # the parent folder may be shared with other machines
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its creator is alive
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)

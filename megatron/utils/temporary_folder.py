"""Temporary folders that go away with the process that made them, however it ends.

A process that is killed (SIGKILL, too little memory) removes nothing. So each folder holds a file that its maker has
locked for as long as it lives: the system unlocks it when the process is gone, whoever else has its number by then. Who
makes a folder first removes those of the same user and machine that nobody holds any more.
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
"""In the folder: locked by its maker, with the name of the machine."""


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A folder of this process, for as long as the context lasts.

    Args:
        purpose: a word of its name, `farfield-PURPOSE-…`, in the folder that TMPDIR names.

    Raises:
        OSError: none can be made there.
    """
    remove_abandoned_folders()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
    descriptor, maker = _take_folder(folder), os.getpid()

    def remove() -> None:
        if os.getpid() == maker:  # a child that was forked has the same code to leave
            shutil.rmtree(folder, ignore_errors=True)

    try:
        with cleanup_on_signal(remove):
            yield folder
    finally:
        remove()
        if descriptor is not None:
            os.close(descriptor)


def _take_folder(folder: Path) -> int | None:
    """Lock its file; None where the file system has no locks. The file gets its name when it is locked, so that nobody
    finds it free before."""
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


def remove_abandoned_folders() -> None:
    """Remove this user's temporary folders whose maker on this machine is gone. What cannot be judged stays."""
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.read(descriptor, 256) != platform.node().encode():  # the folder may be shared with other machines
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its maker lives
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)

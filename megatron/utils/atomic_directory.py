"""Folders that appear completely or not at all, and temporary folders that are removed with their process.

A folder is written inside a working folder next to its target and then renamed:

    data/.python.k3x9_a7q.tmp/new    the folder being written
    data/.python.k3x9_a7q.tmp/old    the earlier folder, between two renames

The writing process holds a lock on the working folder, which the system releases however the process ends. The next
process can therefore detect abandoned working folders. It restores `old` if the target is missing, and removes the
rest. On file systems without locks such folders are kept, because it is unknown whether their owner is alive.

Long work can be resumed. Its working folder is named by a key that identifies the work, `data/.python.0f3a9c21.tmp`, so
that a later process finds the unfinished work. Processes with other work remove it like any other folder.

A folder that another process created or changed in the meantime is never replaced. The new folder is then kept next to
it, or discarded if both must have the same contents.

The package filelock is not used: its locks are files next to the target, while a lock on the working folder itself
leaves no files behind.

Temporary folders are removed when their process ends. A killed process (SIGKILL, out of memory) removes nothing. So
each temporary folder contains a file that its creator keeps locked.
The system releases the lock when the process ends, even if its process ID is reused. The next process that creates a
folder first removes unlocked folders of the same user and machine.
"""

import contextlib
import errno
import fcntl
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from megatron.utils.errors import FULL_DISK_ERRNOS, RunError, describe_cause
from megatron.utils.signals import clean_up_on_signal

FULL_DISK_MESSAGES = set(map(os.strerror, FULL_DISK_ERRNOS))
"""System error messages for a full disk. Errors of libraries may contain only the message (`errors.describe_cause`)."""

PROGRESS_FILES = ("read", "progress.json", "lengths")
"""Names that resumable work may keep next to its new folder."""


class FolderVersion(NamedTuple):
    """Version of a folder. A different number or time means a different folder, or different files."""

    device: int
    inode: int
    changed_ns: int


def read_folder_version(target: Path) -> FolderVersion | None:
    """Return the version of a folder that may be replaced, or None if there is nothing, or an empty folder."""
    try:
        status = target.stat()
        if not any(target.iterdir()):
            return None
    except OSError:
        return None
    return FolderVersion(status.st_dev, status.st_ino, status.st_mtime_ns)


class FolderConflictError(RunError):
    """Error if another process created or changed a folder while this one was writing it.

    `kept` is the path of this process's folder.
    """

    def __init__(self, target: Path, kept: Path) -> None:
        super().__init__(
            f"{target}: another command wrote it at the same time; it was not replaced, and the new result is in {kept}"
        )
        self.kept = kept


@contextlib.contextmanager
def atomic_directory(
    target: Path,
    *,
    replaces: FolderVersion | None = None,
    on_conflict: Literal["refuse", "discard"] = "refuse",
    key: str | None = None,
    should_keep_after: Callable[[BaseException], bool] | None = None,
) -> Iterator[Path]:
    """Create a folder that becomes `target` when the block ends without an exception.

    After an exception `target` is unchanged. Raises OSError if the disk cannot be written.

    Args:
        replaces: version of the folder that may be replaced; None if there was none.
        on_conflict: what to do if `target` is another folder by then. "refuse" keeps the new folder under another name
            and raises FolderConflictError; "discard" removes it, because the other folder has the same contents.
        key: eight digits or lowercase letters that identify the work. The folder and its parent then contain the
            unfinished files of an earlier process with the same work that was killed, or ended by an exception for
            which `should_keep_after` returns True. If another process is doing the same work, this one starts anew.
        should_keep_after: returns True for exceptions after which the work is kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    recover_stale_work(target, key)
    work, lock = _lock_work_folder(target, key)
    keep = False
    try:
        (work / "new").mkdir(exist_ok=True)  # mkdir sets default permissions; mkdtemp's are for the owner only
        with clean_up_on_signal(
            lambda: _clean_work_folder(
                work, target, keep=should_keep_after is not None and should_keep_after(KeyboardInterrupt())
            )
        ):
            yield work / "new"
        if not _publish(work, target, replaces) and on_conflict == "refuse":
            raise FolderConflictError(target, _move_to_free_name(work / "new", target))
    except BaseException as error:
        if key is not None and should_keep_after is not None:
            keep = work == _keyed_work_folder(target, key) and should_keep_after(error)
        raise
    finally:
        _clean_work_folder(work, target, keep=keep)
        if lock is not None:
            os.close(lock)


def _publish(work: Path, target: Path, replaces: FolderVersion | None) -> bool:
    """Rename the new folder to its target. Returns False if the target is a folder that must not be replaced."""
    old = work / "old"
    if replaces is not None and (found := read_folder_version(target)) is not None:
        if found != replaces:
            return False
        target.rename(old)
        if (status := old.stat()) and (status.st_dev, status.st_ino) != replaces[:2]:
            return False  # replaced by another process just before, and restored by `_clean_work_folder`
    try:
        (work / "new").rename(target)  # this fails unless the target is missing or an empty folder
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _move_to_free_name(new: Path, target: Path) -> Path:
    """Move a folder to a free name next to its target, such as books-2."""
    for number in count(2):
        path = target.with_name(f"{target.name}-{number}")
        if not path.exists():
            with contextlib.suppress(FileExistsError, NotADirectoryError):
                return new.rename(path)
    raise AssertionError


@contextlib.contextmanager
def describe_write_errors(target: Path, existing: str = "folder") -> Iterator[None]:
    """Convert write errors of `atomic_directory` to RunError, whose message says if the `existing` folder remains."""
    existed = target.exists()
    try:
        yield
    except OSError as error:
        cause = "the disk is full" if describe_cause(error) in FULL_DISK_MESSAGES else describe_cause(error)
        outcome = f"the existing {existing} is unchanged" if existed else "nothing was saved"
        raise RunError(f"{target}: cannot be written: {cause}; {outcome}") from error


def recover_stale_work(target: Path, key: str | None = None) -> None:
    """Clean up the working folders that killed processes left next to `target`, except for that of the work `key`."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}\.tmp")
    work_folders: list[Path] = []
    with contextlib.suppress(OSError):  # a folder that cannot be listed contains nothing of ours
        work_folders = [path for path in target.parent.iterdir() if name.fullmatch(path.name)]
    for work in work_folders:
        with contextlib.suppress(OSError):  # not a folder, or not readable; the next one may be ours
            if {path.name for path in work.iterdir()} <= {"new", "old", *PROGRESS_FILES}:
                keep = key is not None and work == _keyed_work_folder(target, key)
                _clean_if_stale(work, target, keep=keep)


def _keyed_work_folder(target: Path, key: str) -> Path:
    return target.with_name(f".{target.name}.{key}.tmp")


def _clean_if_stale(work: Path, target: Path, *, keep: bool) -> None:
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use by another process, or no locks on this file system
        return
    else:
        _clean_work_folder(work, target, keep=keep)
    finally:
        os.close(descriptor)


def _lock_work_folder(target: Path, key: str | None) -> tuple[Path, int | None]:
    """Lock a working folder: that of the key if it is free, else a new one. Returns its path and lock descriptor.

    The descriptor is None if the file system has no locks.
    """
    while key is not None:
        work = _keyed_work_folder(target, key)
        work.mkdir(exist_ok=True)
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            break
        if work.exists():  # it may have been removed before it was locked
            return work, descriptor
        os.close(descriptor)
    while True:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        try:
            descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # removed by `recover_stale_work` in another process before it was locked
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            os.close(descriptor)
            return work, None
        if work.exists():
            return work, descriptor
        os.close(descriptor)


def _clean_work_folder(work: Path, target: Path, *, keep: bool) -> None:
    """Clean up a working folder, however its work ended. Restores an earlier folder if the target is missing."""
    old = work / "old"
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old if keep else work, ignore_errors=True)


PREFIX = "farfield-"
OWNER_FILE = ".owner"
"""Lock file in the folder, locked by its creator, with the name of the machine."""


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
    descriptor, maker = _lock_folder(folder), os.getpid()

    def remove() -> None:
        if os.getpid() == maker:  # a forked child runs the same code on exit
            shutil.rmtree(folder, ignore_errors=True)

    try:
        with clean_up_on_signal(remove):
            yield folder
    finally:
        remove()
        if descriptor is not None:
            os.close(descriptor)


def _lock_folder(folder: Path) -> int | None:
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
    """Remove this user's temporary folders whose creator on this machine has ended. Folders in doubt are kept."""
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

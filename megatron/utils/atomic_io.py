"""Results on disk: folders and their locks, files that are written atomically, and safe JSON parsing.

A file gets a temporary name and is renamed when it is complete.

`FolderLock` is held while a command works in a folder: training, a sweep or an analysis. A second command raises an
error. `folder_lock` is held only while a result is read, merged with a new one and written again. A second command
waits.

Both are the system's advisory locks (flock), which the system releases however a process ends, so no stale lock
remains. Some network file systems do not support them. A `FolderLock` is then not acquired, because nobody could tell
whether its owner is alive. `folder_lock` then creates a lock file, and takes over a lock file that has not changed for
longer than any write takes. filelock is not used, because it raises an error without flock.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.utils.errors import RunError, UserError
from megatron.utils.project import INSTALLED_FOLDERS, PACKAGES_FOLDER


def make_folder(key: str, folder: Path) -> list[Path]:
    """Create a folder with its parents, and check that it is writable. Returns the new folders, innermost first.

    Raises:
        UserError: the path is a file, is inside a file, or is not writable, and nothing was created. The message begins
            with `key`, the option that set the path.
    """
    created: list[Path] = []
    try:
        check_no_file_in_path(key, folder)
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(exist_ok=True)
                created.insert(0, path)
        _create_temporary_file(folder)
    except OSError as error:
        remove_empty_folders(created)
        raise _build_write_error(key, folder, error) from error
    return created


NAME_ANOTHER = "name another folder"
"""Advice for an output folder that cannot be written to."""


def check_writable(key: str, folder: Path, advice: str = NAME_ANOTHER) -> None:
    """Check that files can be created in a folder, which may not exist yet, without creating anything.

    Commands call it before they begin, so that an unusable output is an error in the input, not a failure later.

    Args:
        key: option that set the folder; the message begins with it.
        folder: folder to write to.
        advice: end of the message.

    Raises:
        UserError: the path is a file, is inside a file, or is not writable.
    """
    with _name_path(key, folder, advice):
        check_no_file_in_path(key, folder)
        _create_temporary_file(folder)


def check_new_folder(key: str, folder: Path) -> None:
    """Check that a folder can be created, or replaced, by `atomic_directory`. For errors see `check_writable`.

    Also raises UserError if `..` follows a folder that does not exist: `atomic_directory` writes to the resolved path,
    and the system does not find the folder by the given one.
    """
    with _name_path(key, folder, NAME_ANOTHER):
        for missing in (part.parent for part in (folder, *folder.parents) if part.name == ".."):
            if not missing.exists():
                raise UserError(f"{key} is {folder}, but {missing} does not exist; leave out {missing}/..")
        check_no_file_in_path(key, folder)
        target = folder.resolve()
        _create_temporary_file(target.parent, target.name)


def check_new_file(key: str, file: Path) -> None:
    """Check that a file can be created or replaced. Raises UserError as `check_writable`, or if it is a folder."""
    with _name_path(key, file, "name another file"):
        if file.is_dir():
            raise UserError(f"{key} is {file}, which is a folder; name a file")
        check_no_file_in_path(key, file.parent, file)
        target = _follow_link(file)
        _create_temporary_file(target.parent, target.name)


@contextmanager
def _name_path(key: str, path: Path, advice: str) -> Iterator[None]:
    """Convert a system error to a UserError that names the option and its value."""
    try:
        yield
    except OSError as error:
        raise _build_write_error(key, path, error, advice) from error


def _create_temporary_file(folder: Path, name: str = "") -> None:
    """Create and remove a file in the innermost folder of a path that exists.

    Permissions are not sufficient: /proc has write permission, but is not writable.

    Args:
        folder: folder to write to.
        name: name of the file or folder to be written. It may be too long for the temporary name that contains it.
    """
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    temporary = _build_temporary_path(parent / (name or "farfield"))
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    temporary.unlink()


def _build_temporary_path(path: Path) -> Path:
    """Return the path of a new temporary file. A process ID is not unique, because hosts may share the folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _build_write_error(key: str, path: Path, error: OSError, advice: str = NAME_ANOTHER) -> UserError:
    return UserError(f"{key} is {path}, which cannot be written to ({error.strerror}); {advice}")


def check_no_file_in_path(key: str, folder: Path, value: Path | None = None) -> None:
    """Raise UserError if a path is a file, or inside a file or Farfield's own code.

    Raises OSError if it cannot be checked.

    Args:
        key: option that set the path; the message begins with it.
        folder: path to check.
        value: value of the option, if it is not the folder.
    """
    kind, value = ("folder", folder) if value is None else ("file", value)
    for path in (*reversed(folder.parents), folder):
        if path.exists() and not path.is_dir():
            subject = "which" if path == value else f"but {path}"
            raise UserError(f"{key} is {value}, {subject} is a file; name a {kind}")
    if any(folder.resolve().is_relative_to(PACKAGES_FOLDER / name) for name in INSTALLED_FOLDERS):
        raise UserError(f"{key} is {value}, among Farfield's own code; name another {kind}")


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Remove folders created by `make_folder` if they are empty."""
    with contextlib.suppress(OSError):
        for path in folders:
            path.rmdir()


def check_no_foreign_files(key: str, files: Iterable[Path], is_ours: Callable[[Path], bool]) -> None:
    """Check that no existing file of another origin would be overwritten.

    Args:
        key: configuration key or option that set their folder.
        files: files to be written.
        is_ours: returns True if an existing file was written by an earlier command.

    Raises:
        UserError: names the first other file.
    """
    for path in files:
        if path.exists() and not is_ours(path):
            raise UserError(
                f"{key}: {path} exists and is not an earlier result of this command; "
                "choose another folder, or move the file"
            )


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from an arbitrary file. Raises ValueError, also for JSON that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_bytes_atomically(path: str | Path, content: bytes, *, must_be_new: bool = False) -> Path:
    """Write `content` to `path`, creating its folders. Readers see the old or the new file, never a partial one.

    A symbolic link stays, and the file that it names is written.

    Args:
        must_be_new: never replace a file, not even one written by another process in the meantime.

    Raises:
        UserError: `path` cannot be written (a folder, no permission, or a file that must not be replaced).
        RunError: the disk is full or failed; an older file of that name is intact.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; it must be the path of a file")
    target = _follow_link(path)
    temporary = _build_temporary_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if must_be_new:
            _link_new(temporary, target)
        else:
            os.replace(temporary, target)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return path


def _follow_link(path: Path) -> Path:
    """Return the path that a symbolic link names, whether or not it exists; other paths are returned unchanged."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _link_new(temporary: Path, path: Path) -> None:
    """Rename a file. Raises FileExistsError if another file has that name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)


def write_text_atomically(path: str | Path, content: str, *, must_be_new: bool = False) -> Path:
    """Write UTF-8 text with `write_bytes_atomically`."""
    return write_bytes_atomically(path, content.encode("utf-8"), must_be_new=must_be_new)


def write_page_atomically(path: str | Path, content: str) -> Path:
    """Write text for people with `write_bytes_atomically`. Bytes of file names that are not UTF-8 become `?`."""
    return write_bytes_atomically(path, content.encode("utf-8", errors="replace"))


UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
"""Errors of flock on file systems without locks. NFS returns EBADF for folders, which cannot be opened for writing."""
WRITE_LOCK_FILE = ".writing.lock"
"""Lock file of `folder_lock` on a file system without flock."""
STALE_SECONDS = 120.0
"""Time in seconds after which an unchanged lock file is taken over. Writing results takes seconds."""
WAIT_SECONDS = 600.0
"""Time in seconds that `folder_lock` waits for another process."""
POLL_SECONDS = 0.05


LOCK = ".lock"
"""Lock file in the folder of a run."""


class FolderLock:
    """Lock on a folder, held until `release` or the end of the process.

    Args:
        folder: created if it does not exist.
        name: name of the lock file in the folder.
        key: option or key that set the folder; errors begin with it.
        busy_message: error message if another process holds the lock.
        lock_timeout: seconds to wait for another process.

    Raises:
        UserError: the folder is not writable, or another process still holds the lock after `lock_timeout` seconds.
        RunError: the folder cannot be locked.
    """

    def __init__(self, folder: str | Path, *, name: str, key: str, busy_message: str, lock_timeout: float) -> None:
        self._key, self._folder, self._path = key, folder, Path(folder) / name
        check_writable(key, Path(folder))
        deadline = time.monotonic() + lock_timeout
        while not self._try_lock():
            if time.monotonic() > deadline:
                raise UserError(f"{key}: {folder}: {busy_message}")
            time.sleep(POLL_SECONDS)

    def _try_lock(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunError(f"{self._key}: {self._folder}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            return False
        except OSError as error:
            if error.errno not in UNSUPPORTED_ERRNOS:
                os.close(self._descriptor)
                raise RunError(f"{self._key}: {self._folder}: cannot be locked: {error.strerror}") from error
        if _is_same_file(self._path, self._descriptor):
            return True
        os.close(self._descriptor)  # its owner removed the file before this process locked it
        return False

    @property
    def is_in_place(self) -> bool:
        """True if the folder has neither been moved nor removed since it was locked."""
        return _is_same_file(self._path, self._descriptor)

    def release(self, *, remove_file: bool = False) -> None:
        """Release the lock. With `remove_file`, also remove the lock file."""
        if remove_file:
            with suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)


def is_lock_held(path: Path) -> bool | None:
    """Return True if a process has locked a lock file (`FolderLock`), or None if unknown."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None  # file system without locks
    finally:
        os.close(descriptor)
    return False


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock the results of a folder for the duration of the block.

    The block must not enter another `folder_lock` of the same folder.

    Args:
        folder: created if it does not exist. No lock file stays in it.

    Raises:
        UserError: the folder cannot be written.
        RunError: another process held the lock for `WAIT_SECONDS`.
    """
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
        lock_file: Path | None = None
        try:
            if not _wait_for_flock(descriptor, folder):
                lock_file = folder / WRITE_LOCK_FILE
                _create_lock_file(lock_file)
            elif not _is_same_file(folder, descriptor):
                continue  # removed or replaced before this process locked it
            yield
            return
        finally:
            if lock_file is not None:
                lock_file.unlink(missing_ok=True)
            os.close(descriptor)


def _wait_for_flock(descriptor: int, folder: Path) -> bool:
    """Lock a descriptor. Returns False if the file system has no locks."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _wait_until(deadline, folder)
        except OSError as error:
            if error.errno not in UNSUPPORTED_ERRNOS:
                raise RunError(f"{folder}: cannot be locked: {error.strerror}") from error
            return False
        else:
            return True


def _create_lock_file(path: Path) -> None:
    """Create a lock file as soon as no other process has one."""
    deadline = time.monotonic() + WAIT_SECONDS
    seen: tuple[int, int] | None = None
    seen_since = time.monotonic()
    while True:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            pass
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written ({error.strerror})") from error
        else:
            return
        with suppress(FileNotFoundError):
            status = path.stat()
            if seen != (status.st_ino, status.st_mtime_ns):  # clocks of hosts differ, so only changes count
                seen, seen_since = (status.st_ino, status.st_mtime_ns), time.monotonic()
            elif time.monotonic() - seen_since > STALE_SECONDS:
                path.unlink()
        _wait_until(deadline, path.parent)


def _wait_until(deadline: float, folder: Path) -> None:
    if time.monotonic() > deadline:
        raise RunError(f"{folder}: another process has been writing there for {WAIT_SECONDS / 60:.0f} minutes")
    time.sleep(POLL_SECONDS)

"""Folders for results, files that are written atomically (temporary name, then rename), and safe JSON parsing."""

import contextlib
import errno
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron.utils.errors import RunError, UserError


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
        tempfile.TemporaryFile(dir=folder).close()  # permissions do not tell: /proc denies nothing, but is not writable
    except OSError as error:
        remove_empty_folders(created)
        raise _build_write_error(key, folder, error) from error
    return created


def check_writable(key: str, folder: Path) -> None:
    """Check that `make_folder` would succeed, without creating anything. Raises UserError as it does."""
    try:
        check_no_file_in_path(key, folder)
        tempfile.TemporaryFile(dir=next(path for path in (folder, *folder.parents) if path.exists())).close()
    except OSError as error:
        raise _build_write_error(key, folder, error) from error


def _build_write_error(key: str, folder: Path, error: OSError) -> UserError:
    return UserError(f"{key} is {folder}, which cannot be written to ({error.strerror}); name another folder")


def check_no_file_in_path(key: str, folder: Path) -> None:
    """Raise UserError, beginning with `key`, if a path is a file or inside a file.

    Raises OSError if it cannot be checked.
    """
    for path in (*reversed(folder.parents), folder):
        if path.exists() and not path.is_dir():
            subject = "which" if path == folder else f"but {path}"
            raise UserError(f"{key} is {folder}, {subject} is a file; name a folder")


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Remove folders created by `make_folder` if they are empty."""
    with contextlib.suppress(OSError):
        for path in folders:
            path.rmdir()


def check_folder(key: str, folder: Path) -> None:
    """Check that a folder can be created and written, without leaving it behind (`make_folder`)."""
    remove_empty_folders(make_folder(key, folder))


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

    Args:
        must_be_new: never replace a file, not even one written by another process in the meantime.

    Raises:
        UserError: `path` cannot be written (a folder, no permission, or a file that must not be replaced).
        RunError: the disk is full or failed; an older file of that name is intact.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; expected the path of a file")
    # A process ID is not unique, because hosts may share the folder.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if must_be_new:
            _link_new(temporary, path)
        else:
            os.replace(temporary, path)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return path


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

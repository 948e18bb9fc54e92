"""Folders for results, and files that are written whole or not at all: a temporary name, then a rename. And JSON that
may be anything."""

import contextlib
import errno
import json
import os
import secrets
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron.utils.errors import RunError, UserError


def get_farfield_version() -> str:
    """Of this project; `?` where it lies without its pyproject.toml."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"] if project.is_file() else "?"


def make_folder(key: str, folder: Path) -> list[Path]:
    """Make a folder with its parents, and see that files can be made in it. Returns the new ones, the innermost first.

    Raises:
        UserError: it is a file, lies in one, or takes no files, and nothing was made; the line begins with `key`, which
            named it.
    """
    created: list[Path] = []
    try:
        refuse_file_in_path(key, folder)
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(exist_ok=True)
                created.insert(0, path)
        tempfile.TemporaryFile(dir=folder).close()  # permissions do not tell: /proc denies nothing and takes nothing
    except OSError as error:
        remove_empty_folders(created)
        raise UserError(
            f"{key} is {folder}, which cannot be written to ({error.strerror}); name another folder"
        ) from error
    return created


def refuse_file_in_path(key: str, folder: Path) -> None:
    """Refuse what cannot become a folder, since it is a file or lies in one. Raises UserError, which begins with `key`,
    and OSError where that cannot be seen."""
    for path in (*reversed(folder.parents), folder):
        if path.exists() and not path.is_dir():
            subject = "which" if path == folder else f"but {path}"
            raise UserError(f"{key} is {folder}, {subject} is a file; name a folder")


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Take back folders that `make_folder` made, as far as they are empty."""
    with contextlib.suppress(OSError):
        for path in folders:
            path.rmdir()


def check_folder(key: str, folder: Path) -> None:
    """`make_folder`, with nothing left of it."""
    remove_empty_folders(make_folder(key, folder))


def refuse_foreign_files(key: str, files: Iterable[Path], is_ours: Callable[[Path], bool]) -> None:
    """Refuse to write where a file lies that this program did not write.

    Args:
        key: the configuration key, or option, that named their folder.
        files: that are to be written.
        is_ours: was this existing file written by an earlier command?

    Raises:
        UserError: naming the first that is not.
    """
    for path in files:
        if path.exists() and not is_ours(path):
            raise UserError(
                f"{key}: {path} is there, and is none of this command's earlier results, which alone it replaces; "
                "name another place, or move it away"
            )


def parse_json(text: str | bytes) -> Any:
    """`json.loads` for files, which may hold anything. Raises ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_bytes_atomically(path: str | Path, content: bytes, *, must_be_new: bool = False) -> Path:
    """Write `content` to `path`, making its folders.

    A reader sees the old file or the new one, never a part.

    must_be_new: never replace a file, also not one that another process has written meanwhile.

    Raises:
        UserError: `path` cannot be written to (a folder, no permission, or a file that must not be replaced).
        RunError: the disk is full or failed; an older file of that name is still whole.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, a file is to be written there")
    # Not the process ID: processes of other hosts, which share the folder, may have the same.
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
    """Give a file its name. Raises FileExistsError if another file has that name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)


def write_text_atomically(path: str | Path, content: str, *, must_be_new: bool = False) -> Path:
    """`write_bytes_atomically` of UTF-8 text."""
    return write_bytes_atomically(path, content.encode("utf-8"), must_be_new=must_be_new)


def write_page_atomically(path: str | Path, content: str) -> Path:
    """`write_bytes_atomically` of text for people, in which bytes of a file name that are not UTF-8 become `?`."""
    return write_bytes_atomically(path, content.encode("utf-8", errors="replace"))

"""Writing result files whole or not at all: a temporary name beside the target, then a rename."""

import contextlib
import os
from pathlib import Path

from megatron.errors import RunError, UserError


def check_folder(key: str, folder: Path) -> None:
    """See whether a folder can be written to, or made, without making it.

    Raises:
        UserError: it is a file, or lies in one, or may not be written to; the line begins with `key`, which named it.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        what = "which" if there == folder else str(there)
        raise UserError(f"{key} is {folder}, {'but ' * (there != folder)}{what} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key} is {folder}, but {there} may not be written to; name another folder")


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write `content` to `path`, making its folders.

    A reader sees the old file or the new one, never a part.

    Raises:
        UserError: `path` cannot be written to (a folder, or no permission).
        RunError: the disk is full or failed; an older file of that name is still whole.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, a file is to be written there")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return path


def write_text(path: str | Path, content: str) -> Path:
    """`write_bytes` of UTF-8 text."""
    return write_bytes(path, content.encode("utf-8"))

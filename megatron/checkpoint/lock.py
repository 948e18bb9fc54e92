"""One run at a time in a run's folder.

Two runs in one folder would mix their metrics, and the second would find "its" checkpoints written by the first. The
lock belongs to the process: however it ends, the system releases it, so no stale lock is ever left to remove.
"""

import errno
import fcntl
import os
from pathlib import Path

from megatron.errors import RunError, UserError

LOCK = ".lock"


class RunLock:
    """Holds a run's folder until `release`.

    Raises:
        UserError: another process holds it.
        RunError: the folder cannot be written.
    """

    def __init__(self, run: str | Path) -> None:
        path = Path(run) / LOCK
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunError(f"save: {run}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise UserError(f"save: {run}: another run is writing there; choose another folder or wait") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # file systems that have no locks
                raise RunError(f"save: {run}: cannot be locked: {error.strerror}") from error

    def release(self) -> None:
        """Let others have the folder."""
        os.close(self._descriptor)

"""One run at a time in a run's folder.

Two runs in one folder would mix their metrics, and the second would find "its" checkpoints written by the first. The
lock belongs to the process: however it ends, the system releases it, so no stale lock is ever left to remove. What a
killed process leaves for a moment (its other ranks, the processes that read its data) may still hold it, so a run that
begins right after waits a little.
"""

import errno
import fcntl
import os
import time
from pathlib import Path

from megatron.utils.errors import RunError, UserError

LOCK = ".lock"
SWEEP_LOCK = ".sweep.lock"
"""In a sweep's folder, which is no run's: by `LOCK` runs are known."""
LOCK_TIMEOUT = 10.0
"""Seconds to wait for whoever holds the folder; a process that reads data sees within five that its run is gone."""


class RunLock:
    """Holds a run's folder, or a sweep's, until `release`.

    Args:
        run: the folder.
        name: of the file that is locked there.
        key: that names the folder.
        busy: what to say of a folder that somebody else holds.
        patience: seconds to wait for them.

    Raises:
        UserError: another process holds it, and went on to for `patience` seconds.
        RunError: the folder cannot be written.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        name: str = LOCK,
        key: str = "save",
        busy: str = "another run is writing there; choose another folder or wait",
        patience: float | None = None,
    ) -> None:
        self._key, path = key, Path(run) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunError(f"{key}: {run}: cannot be written: {error.strerror}") from error
        deadline = time.monotonic() + (LOCK_TIMEOUT if patience is None else patience)
        while not self._describe_holder(run):
            if time.monotonic() > deadline:
                os.close(self._descriptor)
                raise UserError(f"{key}: {run}: {busy}") from None
            time.sleep(0.05)

    def _describe_holder(self, run: str | Path) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # file systems that have no locks
                os.close(self._descriptor)
                raise RunError(f"{self._key}: {run}: cannot be locked: {error.strerror}") from error
        return True

    def release(self) -> None:
        """Let others have the folder."""
        os.close(self._descriptor)

"""Two writers of one folder: one waits or fails, also on file systems without locks."""

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from megatron.utils import atomic_io
from megatron.utils.atomic_io import WRITE_LOCK_FILE, FolderLock, folder_lock
from megatron.utils.errors import RunError, UserError

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)


def forbid_flock(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(atomic_io.fcntl, "flock", no_locks)


@pytest.mark.parametrize("number", [None, *NO_LOCKS])
def test_writers_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    if number is not None:
        forbid_flock(monkeypatch, number)
    monkeypatch.setattr(atomic_io, "POLL_SECONDS", 0.001)
    folder, sums = tmp_path / "new" / "folder", tmp_path / "sum"
    sums.write_text("0")

    def add() -> None:
        for _ in range(5):
            with folder_lock(folder):
                total = int(sums.read_text())
                time.sleep(0.002)
                sums.write_text(str(total + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums.read_text() == "20"
    assert list(folder.iterdir()) == []


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_flock(monkeypatch, errno.EOPNOTSUPP)
    monkeypatch.setattr(atomic_io, "POLL_SECONDS", 0.01)
    (tmp_path / WRITE_LOCK_FILE).touch()
    monkeypatch.setattr(atomic_io, "WAIT_SECONDS", 0.1)
    with pytest.raises(RunError, match="another process has been writing there"), folder_lock(tmp_path):
        pass
    monkeypatch.setattr(atomic_io, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(atomic_io, "STALE_SECONDS", 0.1)
    with folder_lock(tmp_path):
        assert (tmp_path / WRITE_LOCK_FILE).exists()
    assert not (tmp_path / WRITE_LOCK_FILE).exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: cannot be written"), folder_lock(tmp_path / "file"):
        pass


def test_a_folder_that_a_command_works_in_is_rejected(tmp_path: Path) -> None:
    def lock() -> FolderLock:
        return FolderLock(tmp_path / "x", name=".lock", key="--output", busy_message="busy", lock_timeout=0.0)

    first = lock()
    with pytest.raises(UserError, match=r"--output: .*x: busy"):
        lock()
    first.release(remove_file=True)
    assert list((tmp_path / "x").iterdir()) == []
    lock().release()


def test_a_removed_lock_file_blocks_no_one(tmp_path: Path) -> None:
    """A removed lock file locks nobody out.

    The first owner removes the file while the second has it open; the third must not lock a new file beside it.
    """
    first = FolderLock(tmp_path, name=".lock", key="--output", busy_message="busy", lock_timeout=0.0)
    waiting: list[FolderLock] = []
    thread = threading.Thread(
        target=lambda: waiting.append(
            FolderLock(tmp_path, name=".lock", key="x", busy_message="busy", lock_timeout=60.0)
        )
    )
    thread.start()
    time.sleep(0.1)
    first.release(remove_file=True)
    thread.join()
    with pytest.raises(UserError, match="busy"):
        FolderLock(tmp_path, name=".lock", key="--output", busy_message="busy", lock_timeout=0.0)
    waiting[0].release()


def test_a_folder_recreated_while_a_writer_waits_is_locked_again(tmp_path: Path) -> None:
    """A folder that is recreated while a writer waits is locked again, because a lock on the removed folder is
    useless.
    """
    folder, is_locked = tmp_path / "results", threading.Event()

    def write() -> None:
        with folder_lock(folder):
            is_locked.set()
            descriptors.append(os.open(folder, os.O_RDONLY))
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)

    descriptors: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            write()
        except BaseException as error:
            failures.append(error)

    with folder_lock(folder):
        thread = threading.Thread(target=run)
        thread.start()
        assert not is_locked.wait(0.2)  # it has opened the folder
        folder.rmdir()
        folder.mkdir()
    thread.join()
    for descriptor in descriptors:
        os.close(descriptor)
    assert not failures

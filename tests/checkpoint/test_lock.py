"""One run at a time in a folder, and no lock outlives its process."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron.checkpoint import run_folder
from megatron.checkpoint.run_folder import RunLock
from megatron.utils.errors import RunError, UserError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT", 0.1)


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run")
    with pytest.raises(UserError, match="another run is writing there"):
        RunLock(tmp_path / "run")
    RunLock(tmp_path / "other").release()
    first.release()
    RunLock(tmp_path / "run").release()


def test_what_holds_it_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT", 60.0)
    first = RunLock(tmp_path)
    threading.Timer(0.3, first.release).start()
    RunLock(tmp_path).release()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            RunLock(tmp_path)
            (tmp_path / "held").touch()
            time.sleep(60)
        finally:
            os._exit(1)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(UserError):
        RunLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    RunLock(tmp_path).release()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"save: .*file: cannot be written: File exists"):
        RunLock(tmp_path / "file")

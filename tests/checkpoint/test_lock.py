"""One run at a time in a folder, and no lock outlives its process."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.lock import RunLock
from megatron.errors import UserError

ROOT = Path(__file__).parents[2]


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run")
    with pytest.raises(UserError, match="another run is writing there"):
        RunLock(tmp_path / "run")
    RunLock(tmp_path / "other").release()
    first.release()
    RunLock(tmp_path / "run").release()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom megatron.checkpoint.lock import RunLock\n"
        "lock = RunLock(sys.argv[1])\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT).returncode == -9
    assert (tmp_path / ".lock").exists()
    RunLock(tmp_path).release()

"""Processes of rehearsed ranks."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, sys, time
from pathlib import Path

from megatron.rehearsal import rank_process
from megatron.rehearsal.null_device import recorder
from megatron.utils.signals import GracefulStop


def train(job):
    with GracefulStop():
        print("training", flush=True)
        while True:
            time.sleep(0.1)


recorder.load_library = lambda: None
rank_process.run_rank_job = train
rank_process.main(sys.argv[1:])
"""
PARENT = """
import os, subprocess, sys

from megatron.utils.signals import get_parent_variable

rank = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
process = subprocess.Popen(rank, env=os.environ | get_parent_variable(), start_new_session=True)
print(process.pid, flush=True)
process.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_a_rank_ends_at_once_when_its_rehearsal_is_killed(tmp_path: Path) -> None:
    """The first rank waits for its parent to release the checkpoint; a request to save would not end that wait."""
    job = tmp_path / "job"
    job.write_text('{"folder": "", "config": "", "action": "train", "rank": 0, "devices": 1, "waits": true}')
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, RANK, str(job)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert parent.stdout is not None
    rank = int(parent.stdout.readline())
    try:
        assert parent.stdout.readline() == "training\n"
        parent.kill()
        parent.communicate(timeout=20)  # until the rank, which has the pipe too, has ended
    finally:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
        parent.kill()
        parent.wait()

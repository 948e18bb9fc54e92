"""Tests that start several ranks, each on its own: two such worlds on the same processors wait for each other.

Ranks of a world meet at every collective, so each waits until the operating system runs the others. With two worlds of
two ranks on two processors a step takes several times as long as twice one world's. So such tests come first, and take
one of as many turns as there are pairs of processors; other tests run beside them.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Tests that wait more than they compute (for SLURM, for a rank that hangs) are not among them.
STARTED_BY = (
    "checkpoint/test_any_layout.py",
    "checkpoint/test_layouts.py",
    "checkpoint/test_legacy.py",
    "data/test_datasets.py",
    "model/test_tensor_parallel.py",
    "parallel/test_processes.py",
    "planning/test_memory.py",
    "test_cli.py",
    "training/test_kills.py",
    "training/test_layouts.py",
    "training/test_processes.py",
    "training/test_tasks.py",
)
"""Files whose tests start ranks that compute."""

TURNS = max(1, len(os.sched_getaffinity(0)) // 2)


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait for a turn among the processes that share a folder. It ends with the process, however that ends."""
    files = [open(folder / f"ranks.{number}", "a") for number in range(TURNS)]  # noqa: SIM115
    try:
        while not any(_taken(file.fileno()) for file in files):
            time.sleep(0.05)
        yield
    finally:
        for file in files:
            file.close()


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

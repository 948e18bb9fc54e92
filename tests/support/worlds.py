"""Tests that start several ranks, each on its own: two such worlds on the same processors wait for each other.

Ranks of a world meet at every collective, so each waits until the operating system runs the others. With two worlds of
two ranks on two processors a step takes several times as long as twice one world's. So such tests come first, and take
one of as many turns as there are pairs of processors; other tests run beside them.

Tests that wait for SLURM, for connections or for a rank that hangs take minutes and little of a processor. They come
first too, on another worker than those of ranks.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STARTED_BY = (
    "checkpoint/test_any_layout.py",
    "checkpoint/test_layouts.py",
    "checkpoint/test_legacy.py",
    "data/test_datasets.py",
    "model/test_tensor_parallel.py",
    "distributed/test_process_groups.py",
    "planning/test_memory.py",
    "test_cli.py",
    "training/test_kills.py",
    "training/test_layouts.py",
    "training/test_processes.py",
    "training/test_tasks.py",
)
"""Files whose tests start ranks that compute."""
WAITING = ("cluster", "launch/test_ssh_launcher.py", "training/test_watchdog.py")
"""Folders and files whose tests start processes, and wait more than they compute."""

TURNS = max(1, len(os.sched_getaffinity(0)) // 2)


def ordered(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Tests of ranks at the head of the first worker's share, tests that wait at that of the second's.

    At first xdist gives each worker one piece of the list, all of one size (`--dist worksteal`).
    """
    ranks, waiting = ([item for item in items if item.get_closest_marker(mark)] for mark in ("ranks", "waits"))
    placed = {*ranks, *waiting}
    rest = [item for item in items if item not in placed]
    second = max(0, len(items) // workers - len(ranks))
    return [*ranks, *rest[:second], *waiting, *rest[second:]]


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

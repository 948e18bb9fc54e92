"""Tests that start several ranks, each on its own: two such worlds on the same processors wait for each other.

Ranks of a world meet at every collective, so each waits until the operating system runs the others. With two worlds of
two ranks on two processors a step takes several times as long as twice one world's. So such tests come first, and take
one of as many turns as there are pairs of processors; other tests run beside them.

Tests that wait for SLURM, for connections or for a rank that hangs take minutes and little of a processor. One worker
begins with them (`scheduling.py`), with `-n auto` one more than there are processors.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.distributed.hardware import count_cores

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


TURNS = max(1, count_cores() // 2)


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests of ranks first: so they begin at once, on the first worker as far as its share goes."""
    return sorted(items, key=lambda item: item.get_closest_marker("ranks") is None)


def is_in(path: str, places: tuple[str, ...]) -> bool:
    """Is a file of tests among files and folders?"""
    return any(path == place or path.startswith(f"{place}/") for place in places)


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

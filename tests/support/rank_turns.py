"""Turns for tests that start several ranks: two such groups on the same processors wait for each other.

Ranks meet at every collective, so each waits until the operating system schedules the others. With two groups of two
ranks on two processors, a step takes several times as long as one after the other. Such tests therefore run first, and
take one of as many turns as there are pairs of processors; other tests run beside them.

Tests that wait for SLURM, for connections or for a hanging rank take minutes and little CPU time. One worker starts
with them (`scheduling.py`); `-n auto` adds a worker to the number of processors.
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
"""Files with tests that start ranks that compute."""
WAITING = ("cluster", "launch/test_ssh_launcher.py", "training/test_watchdog.py")
"""Folders and files with tests that start processes and mostly wait."""


TURNS = max(1, count_cores() // 2)


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """Move tests of ranks to the front, so that they start at once, on the first worker as far as its share goes."""
    return sorted(items, key=lambda item: item.get_closest_marker("ranks") is None)


def is_in(path: str, places: tuple[str, ...]) -> bool:
    """Return True if a test file is among files and folders."""
    return any(path == place or path.startswith(f"{place}/") for place in places)


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait for a turn among the processes that share a folder. The turn ends with the process in any case."""
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

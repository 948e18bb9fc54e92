"""Folders that appear whole or not at all, also when the process that writes them is killed.

A folder is written inside a working folder beside its place and then renamed:

    data/.python.k3x9_a7q.tmp/new    what is being written
    data/.python.k3x9_a7q.tmp/old    what stood in its place, for the moment between two renames

The process that writes holds a lock on the working folder, which the system releases however the process ends. So
whoever comes next knows which working folders nobody owns: it puts an `old` back whose place is empty, and removes the
rest. File systems that cannot lock keep such folders, since nobody can tell whether their owner lives.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """An empty folder that takes the place of `target` when the block ends without an exception.

    Whatever stood there is replaced, or, with `replace=False`, kept if another process made it meanwhile. After an
    exception `target` is as it was. Raises OSError where the disk refuses.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    recover(target)
    work, lock = _begin(target)
    try:
        (work / "new").mkdir()  # not mkdtemp's permissions, which are for its owner alone
        yield work / "new"
        if replace or not target.exists():
            if target.exists():
                target.rename(work / "old")
            (work / "new").rename(target)
    finally:
        _settle(work, target)
        if lock is not None:
            os.close(lock)


def recover(target: Path) -> None:
    """Put right what killed processes left of their work on `target`."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}\.tmp")
    left: list[Path] = []
    with contextlib.suppress(OSError):  # a place that cannot be listed holds nothing of ours
        left = [path for path in target.parent.iterdir() if name.fullmatch(path.name)]
    for work in left:
        with contextlib.suppress(OSError):  # nor does what is no folder, or another's; the next one may be ours
            if {path.name for path in work.iterdir()} <= {"new", "old"}:
                _settle_if_abandoned(work, target)


def _settle_if_abandoned(work: Path, target: Path) -> None:
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody works there, or the file system has no locks
        return
    else:
        _settle(work, target)
    finally:
        os.close(descriptor)


def _begin(target: Path) -> tuple[Path, int | None]:
    """A new working folder and the lock on it; no lock where the file system has none."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        try:
            descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # swept away by `recover` in another process before it was locked
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            os.close(descriptor)
            return work, None
        if work.exists():
            return work, descriptor
        os.close(descriptor)


def _settle(work: Path, target: Path) -> None:
    """The end of a working folder, however its work ended: what stood in the place goes back if the place is empty."""
    old = work / "old"
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(work, ignore_errors=True)

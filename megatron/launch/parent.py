"""Processes that must not outlive the one that started them, however it went: the ranks of a run, a sweep's trainings.

The parent passes `bound()` in the environment; the child calls `end_with_parent` first of all and is then sent SIGTERM
when the parent is gone, also by SIGKILL. A training answers by saving after its step.
"""

import ctypes
import os
import signal
import sys

PARENT = "FARFIELD_PARENT"


def bound() -> dict[str, str]:
    """The environment that binds a child to this process."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Linux: ask for SIGTERM when the process that bound this one ends. Without such a process nothing happens."""
    parent = os.environ.pop(PARENT, None)  # not for children of ours
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if parent != str(os.getppid()):  # it was gone before the call
        sys.exit(1)

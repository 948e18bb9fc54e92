"""Processes that must not outlive the one that started them, however it went: the ranks of a run, a sweep's trainings.

The parent passes `bound()` in the environment; the child calls `end_with_parent` first of all and is then sent SIGHUP
when the parent is gone, also by SIGKILL. A training answers by saving after its step.

The system hands a child from one of its parent's dying threads to the next, and sends the signal each time. So it must
be one of which the second means nothing new: SIGHUP, not SIGTERM, whose second ends a run at once (`signals.py`).
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
    """Linux: ask for SIGHUP when the process that bound this one ends. Without such a process nothing happens.

    It is heard also where the parent ignores it (nohup): bound processes have sessions of their own, so it comes from
    no terminal.
    """
    parent = os.environ.pop(PARENT, None)  # not for children of ours
    if parent is None or not sys.platform.startswith("linux"):
        return
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGHUP)  # PR_SET_PDEATHSIG
    if parent != str(os.getppid()):  # it was gone before the call
        sys.exit(1)

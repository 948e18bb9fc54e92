"""Work that ends with SIGKILL, so that nothing is cleaned up."""

import importlib
import os
import signal
from collections.abc import Callable


def die(*_: object) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object]) -> None:
    """Run some work in a process that kills itself with `die`."""
    importlib.import_module("megatron.data.core_datasets")  # before the fork, because it takes seconds
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

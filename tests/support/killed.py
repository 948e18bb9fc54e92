"""Work that ends by SIGKILL, so that nothing of it is tidied up."""

import importlib
import os
import signal
from collections.abc import Callable


def die(*_: object) -> None:
    """End this process here."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object]) -> None:
    """Do some work in a process that kills itself on the way, by `die`."""
    importlib.import_module("megatron.data.megatron_core")  # before the fork: it takes seconds
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

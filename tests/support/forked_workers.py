"""Workers of xdist that need not import the tests: forks of one process that has collected them.

xdist starts each worker as a Python of its own, which imports torch, DeepSpeed, megatron-core and all files of tests:
ten seconds of a processor, twice as much in a fresh clone. Here it starts this file as a script, which asks a server
for a fork with its own standard streams, and ends when that does. The server is this file too:

    forked_workers.py --start SOCKET -u -c CODE                 what xdist starts, with the options it gives to Python
    forked_workers.py --serve TESTS ARGUMENTS… DESCRIPTOR       what collects by pytest's arguments, and listens
"""

import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ONE_PROCESS = ("-n", "0", "--dist", "no", "--collect-only", "-q")
"""Options that are added to those of the run, so that its tests are imported and nothing else is done."""


def start_servers(tests: Path, arguments: Sequence[str]) -> str:
    """Start the servers of a run, which end with this process.

    Args:
        tests: the folder of all tests.
        arguments: pytest's own.

    Returns:
        The command that xdist starts each worker by, as words of a shell.
    """
    from forked import SHARED_SERVER, ForkServer, start_fork_server

    script = str(Path(__file__).resolve())
    os.environ[SHARED_SERVER] = start_fork_server().path
    server = ForkServer(script, "--serve", str(tests), *arguments, *ONE_PROCESS, folder=Path.cwd())
    return shlex.join([sys.executable, "-S", "-E", script, "--start", server.path])


def become_worker(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Run the code that xdist has for a worker, in a fork of the process that has collected."""
    from fork_server import reset_process_groups, reset_seeds, reset_signals

    reset_signals()
    reset_process_groups()
    reset_seeds()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    exec(request["code"], {"__name__": "__main__"})


def serve_workers(tests: str, arguments: Sequence[str], descriptor: int) -> None:
    """Collect, then fork for whoever connects, until standard input ends."""
    import pytest
    from fork_server import serve

    code = pytest.main([*arguments], plugins=[_Interrupt()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        _forget_modules(tests)
    # A worker learns of the end of xdist from its own standard input, and tidies up, in at most 15 s.
    serve(socket.socket(fileno=descriptor), become_worker, grace=20)


class _Interrupt:
    """Ctrl-C while the tests are imported: there is no need for workers any more."""

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        if excinfo.type is KeyboardInterrupt:  # files that cannot be imported are an interruption too
            os._exit(130)


def _forget_modules(folder: str) -> None:
    """pytest leaves a file that could not be imported among the modules, where a worker would find what there is of it,
    and miss its other tests without a word. So workers import all files, and tell what is wrong."""
    for name, module in list(sys.modules.items()):
        if name != "__main__" and (getattr(module, "__file__", None) or "").startswith(folder + os.sep):
            del sys.modules[name]


def start_worker(path: str, code: str) -> int:
    """Ask for a worker and wait for its end. Returns its exit code."""
    from forked import connect, read_answer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    try:
        answers = connect(path, {"code": code}, (0, 1, 2)).makefile()
        read_answer(answers, "started")
        return read_answer(answers, "code")
    except (OSError, RuntimeError) as error:
        print(f"error: no worker: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve_workers(sys.argv[2], sys.argv[3:-1], int(sys.argv[-1]))
    else:
        sys.exit(start_worker(sys.argv[2], sys.argv[-1]))

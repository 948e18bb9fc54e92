"""Workers of xdist without repeated imports: forks of one process that has collected the tests.

xdist starts each worker as a new Python process that imports torch, DeepSpeed, megatron-core and all test files: ten
seconds of CPU time, twice as much in a fresh clone. Instead, it starts this file as a script, which requests a fork
with its own standard streams from a server and ends with it. This file is also the server:

    forked_workers.py --start SOCKET -u -c CODE                 started by xdist, with its Python options
    forked_workers.py --serve TESTS ARGUMENTS… DESCRIPTOR       collects with pytest's arguments, and listens
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
"""Options added to those of the run, so that its tests are imported but not run."""


def start_servers(tests: Path, arguments: Sequence[str]) -> str:
    """Start the servers of a run, which end with this process.

    Args:
        tests: folder of all tests.
        arguments: pytest's own arguments.

    Returns:
        Command with which xdist starts each worker, in shell syntax.
    """
    from forked import SHARED_SERVER, ForkServer, start_fork_server

    script = str(Path(__file__).resolve())
    os.environ[SHARED_SERVER] = start_fork_server().path
    server = ForkServer(script, "--serve", str(tests), *arguments, *ONE_PROCESS, folder=Path.cwd())
    return shlex.join([sys.executable, "-S", "-E", script, "--start", server.path])


def become_worker(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Run xdist's code of a worker in a fork of the process that has collected the tests."""
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
    """Collect the tests, then fork for each connection until standard input closes."""
    import pytest
    from fork_server import serve

    code = pytest.main([*arguments], plugins=[_Interrupt()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        _forget_modules(tests)
    # A worker notices the end of xdist on its own standard input, and cleans up within 15 s.
    serve(socket.socket(fileno=descriptor), become_worker, grace=20)


class _Interrupt:
    """Plugin for Ctrl-C during the import of tests, after which no workers are needed."""

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        if excinfo.type is KeyboardInterrupt:  # files that cannot be imported also raise an interruption
            os._exit(130)


def _forget_modules(folder: str) -> None:
    """Remove modules that failed to import, so that workers import them again and report the error.

    Otherwise a worker would find the partial module and silently miss its other tests.
    """
    for name, module in list(sys.modules.items()):
        if name != "__main__" and (getattr(module, "__file__", None) or "").startswith(folder + os.sep):
            del sys.modules[name]


def start_worker(path: str, code: str) -> int:
    """Request a worker, wait for its end and return its exit code."""
    from forked import connect, read_answer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles Ctrl-C
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

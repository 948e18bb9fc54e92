"""Scripts in processes of their own that need not import anything first (`fork_server.py`).

For tests of what processes do, together or when they are killed, where how they start is not what is tested. Each of
the programs that users start is started once as they do.
"""

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]


def run(
    script: Path, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder to its end, as `subprocess.run` does; two minutes at most.

    Args:
        cwd: the folder.
        env: is added to our environment.
        root: the copy of the project that the script imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = Forked(script, *arguments, output=out, errors=err, cwd=cwd, env=env, root=root)
        try:
            code = child.wait(120)
        finally:
            child.kill()
        return subprocess.CompletedProcess([str(script), *arguments], code, out.read_text(), err.read_text())


class Forked:
    """A running script; as `subprocess.Popen`, as far as tests need it. It ends with this object."""

    def __init__(
        self, script: Path, *arguments: str, output: Path, errors: Path | None = None, cwd: Path | None = None,
        env: Mapping[str, str] | None = None, root: Path = ROOT,
    ) -> None:  # fmt: skip
        """Start it in a session of its own, in the current folder if no other is named.

        Args:
            output: gets what it prints; a terminal becomes that of its session.
            errors: gets what it prints as errors; `output` if not given.
            env: is added to our environment.
            root: the copy of the project that it imports.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        request = {"argv": [str(script), *arguments], "env": environment, "cwd": str(cwd or Path.cwd())}
        self.output, self.returncode = output, None
        with ExitStack() as streams:
            numbers = [streams.enter_context(open(os.devnull)).fileno()]
            numbers += [streams.enter_context(open(path, "ab")).fileno() for path in (output, errors or output)]
            self.connection = connect(_start_server(root), request, numbers)
        self.answers = self.connection.makefile()
        self.pid = read_answer(self.answers, "started")

    returncode: int | None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.returncode = read_answer(self.answers, "code")
            self.connection.close()
            self.answers.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.output), timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal if it runs still."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def printed(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""


class ForkServer:
    """A process that forks for this one and for those that know its socket, until it is closed or this one ends.

    Args:
        command: Python's options, a script and its arguments; the last will be the listening socket's descriptor.
        folder: where it runs.
        env: is added to our environment.
    """

    def __init__(self, *command: str, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.sockets = tempfile.mkdtemp(prefix="forks-", dir="/tmp")  # for us alone; a socket's path must be short
        self.path = os.path.join(self.sockets, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen()
            number = listener.fileno()
            self.process = subprocess.Popen(
                [sys.executable, *command, str(number)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=folder, pass_fds=[number],
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        atexit.register(self.close)

    def close(self) -> None:
        """End it, and what it has forked."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.sockets, ignore_errors=True)


def connect(path: str, request: Mapping[str, object], streams: Sequence[int]) -> socket.socket:
    """Ask the server of a socket for a fork with these standard streams."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    data = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(connection, [data], streams)
    connection.sendall(data[sent:])
    return connection


def read_answer(answers: TextIO, name: str) -> int:
    """What a server says of a fork: `started`, its number, and `code`, how it ended."""
    line = answers.readline()
    if not line:
        raise RuntimeError("the fork server has ended")
    return int(json.loads(line)[name])


SHARED_SERVER = "FARFIELD_TESTS_FORK_SERVER"
"""The environment variable with the socket of a server for all workers of xdist."""


@cache
def _start_server(root: Path) -> str:
    """The socket of a server that imports the project from a folder."""
    if root == ROOT and SHARED_SERVER in os.environ:
        return os.environ[SHARED_SERVER]
    return start_fork_server(root).path


def start_fork_server(root: Path = ROOT) -> ForkServer:
    """Start `fork_server.py`, with the copy of the project that its scripts import."""
    script = str(Path(__file__).with_name("fork_server.py"))
    return ForkServer("-W", "ignore", script, folder=root, env={"OMP_NUM_THREADS": "1"})

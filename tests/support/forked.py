"""Scripts in separate processes without repeated imports (`fork_server.py`).

They are for tests of what processes do, together or when killed, if their startup is not tested. Each program for users
is also tested once with a normal start.
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
    """Run a script in a folder to its end, like `subprocess.run`, for at most two minutes.

    Args:
        cwd: working folder.
        env: additional environment variables.
        root: copy of the project that the script imports.
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
    """Running script with the methods of `subprocess.Popen` that tests need. It ends with this object."""

    def __init__(
        self, script: Path, *arguments: str, output: Path, errors: Path | None = None, cwd: Path | None = None,
        env: Mapping[str, str] | None = None, root: Path = ROOT,
    ) -> None:  # fmt: skip
        """Start a script in a new session, by default in the current folder.

        Args:
            output: receives standard output; a terminal becomes the session's terminal.
            errors: receives standard error; by default `output`.
            env: additional environment variables.
            root: copy of the project that the script imports.
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
        """Return the exit code, negative for a signal; None if it is running."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.returncode = read_answer(self.answers, "code")
            self.connection.close()
            self.answers.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.output), timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal if the script is running."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def printed(self) -> str:
        """Return the output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""


class ForkServer:
    """Process that forks for this process and for others that know its socket, until it is closed or this process ends.

    Args:
        command: Python options, a script and its arguments; the descriptor of the listening socket is appended.
        folder: working folder.
        env: additional environment variables.
    """

    def __init__(self, *command: str, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.sockets = tempfile.mkdtemp(prefix="forks-", dir="/tmp")  # private; the path of a socket must be short
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
        """End the server and its forks."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.sockets, ignore_errors=True)


def connect(path: str, request: Mapping[str, object], streams: Sequence[int]) -> socket.socket:
    """Request a fork with these standard streams from the server of a socket."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    data = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(connection, [data], streams)
    connection.sendall(data[sent:])
    return connection


def read_answer(answers: TextIO, name: str) -> int:
    """Read a server's answer about a fork: `started` with its process ID, or `code` with its exit code."""
    line = answers.readline()
    if not line:
        raise RuntimeError("the fork server has ended")
    return int(json.loads(line)[name])


SHARED_SERVER = "FARFIELD_TESTS_FORK_SERVER"
"""Environment variable with the socket of a server shared by all workers of xdist."""


@cache
def _start_server(root: Path) -> str:
    """Return the socket of a server that imports the project from a folder."""
    if root == ROOT and SHARED_SERVER in os.environ:
        return os.environ[SHARED_SERVER]
    return start_fork_server(root).path


def start_fork_server(root: Path = ROOT) -> ForkServer:
    """Start `fork_server.py` with the copy of the project that its scripts import."""
    script = str(Path(__file__).with_name("fork_server.py"))
    return ForkServer("-W", "ignore", script, folder=root, env={"OMP_NUM_THREADS": "1"})

"""Scripts in processes of their own that need not import anything first (`fork_server.py`).

For tests of what processes do, together or when they are killed, where how they start is not what is tested. Each of
the programs that users start is started once as they do.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

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
    """A running script; as `subprocess.Popen`, as far as tests need it."""

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
        self.output, self.returncode, self.server = output, None, _server(root)
        self.pid = self.server.start(request | {"output": str(output), "errors": str(errors or output)})

    returncode: int | None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self.server.code(self.pid)
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


class _Server:
    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fork_server.py"))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd=root,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.codes: dict[int, int] = {}
        atexit.register(self.close)

    def start(self, request: Mapping[str, object]) -> int:
        self.requests.write(json.dumps(request).encode() + b"\n")
        while (started := self._answer()) is None:
            pass
        return started

    def code(self, pid: int) -> int | None:
        while select.select([self.answers], [], [], 0)[0]:
            self._answer()
        return self.codes.pop(pid, None)

    def _answer(self) -> int | None:
        """Take in one answer, waiting for it; the process number if it tells of a start."""
        line = self.answers.readline()
        assert line, "the fork server has ended"
        answer = json.loads(line)
        if "code" in answer:
            self.codes[answer["pid"]] = answer["code"]
        return answer.get("started")

    def close(self) -> None:
        self.requests.close()
        self.process.wait()


_server = cache(_Server)

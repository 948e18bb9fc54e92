"""Servers that start test processes as forks: they end when they should, and signals reach the forks."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from forked import SHARED_SERVER, Forked, ForkServer, connect, read_answer

SUPPORT = Path(__file__).parent / "support"
SLEEPING = """\
import socket, sys, time
sys.path.insert(0, {support!r})
from fork_server import serve
serve(socket.socket(fileno=int(sys.argv[1])), lambda request, streams: time.sleep(60), grace={grace})
"""
CONFTEST = """\
import sys
from pathlib import Path
sys.path[:0] = [{support!r}, {root!r}]
from forked_workers import start_servers

def pytest_xdist_setupnodes(config, specs):
    for spec in specs:
        spec.python = start_servers(Path(__file__).parent, config.invocation_params.args)
"""


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Sleepers:
    """Server whose forks sleep."""

    server: ForkServer
    grace: float
    pids: list[int] = field(default_factory=list)

    def ask(self) -> socket.socket:
        """Connect to the server, which forks."""
        connection = connect(self.server.path, {}, (0, 1, 2))
        self.pids.append(read_answer(connection.makefile(), "started"))
        return connection


@pytest.fixture(params=[0, 1])
def sleepers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sleepers]:
    script = tmp_path / "server.py"
    script.write_text(SLEEPING.format(support=str(SUPPORT), grace=request.param))
    sleepers = Sleepers(ForkServer(str(script), folder=tmp_path), request.param)
    yield sleepers
    for pid in filter(is_alive, sleepers.pids):
        os.kill(pid, signal.SIGKILL)
    sleepers.server.close()


def test_a_fork_ends_after_its_connection(sleepers: Sleepers) -> None:
    connection, _other = sleepers.ask(), sleepers.ask()
    start_time = time.monotonic()
    connection.shutdown(socket.SHUT_RDWR)
    while is_alive(sleepers.pids[0]):
        assert time.monotonic() < start_time + 30
        time.sleep(0.01)
    assert time.monotonic() > start_time + sleepers.grace
    assert is_alive(sleepers.pids[1])


def test_forks_end_before_their_server(sleepers: Sleepers) -> None:
    _connections = sleepers.ask(), sleepers.ask()
    start_time = time.monotonic()
    sleepers.server.close()
    assert time.monotonic() > start_time + sleepers.grace
    assert not any(map(is_alive, sleepers.pids))
    assert not Path(sleepers.server.path).parent.exists()


def test_disconnecting_clients_do_not_end_a_server(sleepers: Sleepers) -> None:
    """Neither Ctrl-C nor a client that disconnects without a request ends a server."""
    sleepers.ask()
    sleepers.server.process.send_signal(signal.SIGINT)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(sleepers.server.path)
    assert sleepers.ask()


def test_clients_of_an_ended_server_get_an_error(sleepers: Sleepers) -> None:
    connection = connect(sleepers.server.path, {}, (0, 1, 2))
    answers = connection.makefile()
    sleepers.pids.append(read_answer(answers, "started"))
    sleepers.server.process.kill()
    with pytest.raises(RuntimeError, match="the fork server has ended"):
        read_answer(answers, "code")


def test_files_that_cannot_be_imported_fail_in_workers_too(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -q -p no:cacheprovider\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.format(support=str(SUPPORT), root=str(SUPPORT.parents[1])))
    (tmp_path / "test_right.py").write_text("def test_a(): pass\n")
    (tmp_path / "test_wrong.py").write_text("def test_b(): pass\nimport nosuch_module\n")
    (tmp_path / "test_worse.py").write_text("def test_c(:\n")
    command = [sys.executable, "-m", "pytest", "-n", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed, 2 errors" in done.stdout
    for name in ("test_wrong.py", "test_worse.py"):
        (tmp_path / name).unlink()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_a_script_receives_the_first_signal_and_reports_its_exit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, time\ntime.sleep(float(sys.argv[1]))\nsys.exit(3)\n")
    assert Forked(script, "0", output=tmp_path / "out").wait(60) == 3
    for number in range(20):
        running = Forked(script, "60", output=tmp_path / f"out{number}")
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 1
        assert "KeyboardInterrupt" in running.printed()
    running = Forked(script, "60", output=tmp_path / "out")
    running.kill()
    assert running.wait(60) == -signal.SIGKILL


@pytest.mark.skipif(torch.cuda.is_available(), reason="workers that see a GPU are no forks")
def test_workers_share_a_server() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # not known when this file is imported
        pytest.skip("this is not a worker")
    assert Path(os.environ[SHARED_SERVER]).is_socket()

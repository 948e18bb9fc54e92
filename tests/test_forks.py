"""What starts processes of tests as forks: they end when they should, and hear what is sent to them."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import SHARED_SERVER, Forked, ForkServer, connect

SUPPORT = Path(__file__).parent / "support"
SLEEPING = """\
import socket, sys, time
sys.path.insert(0, {support!r})
from fork_server import serve
serve(socket.socket(fileno=int(sys.argv[1])), lambda request, streams: time.sleep(60), kills={kills})
"""


def is_alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.01)


@pytest.fixture(params=[True, False], ids=["scripts", "workers"])
def sleeping(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ForkServer, socket.socket, int, bool]]:
    """A server, a connection to it, and the fork that this asked for."""
    script = tmp_path / "server.py"
    script.write_text(SLEEPING.format(support=str(SUPPORT), kills=request.param))
    server = ForkServer(str(script), folder=tmp_path)
    connection = connect(server.path, {}, (0, 1, 2))
    answer = connection.makefile().readline()
    pid = int(answer.removeprefix('{"started": ').rstrip("}\n"))
    yield server, connection, pid, request.param
    if is_alive(pid):
        os.kill(pid, signal.SIGKILL)
    server.close()


def test_scripts_end_with_their_connection_and_workers_go_on(
    sleeping: tuple[ForkServer, socket.socket, int, bool],
) -> None:
    server, connection, pid, is_script = sleeping
    connection.shutdown(socket.SHUT_RDWR)
    if is_script:
        wait_for_end(pid)
    else:
        connect(server.path, {}, (0, 1, 2)).makefile().readline()  # it has seen to the other by now
        assert is_alive(pid)


def test_scripts_end_with_their_server_and_workers_go_on(
    sleeping: tuple[ForkServer, socket.socket, int, bool],
) -> None:
    server, _, pid, is_script = sleeping
    server.close()
    if is_script:
        wait_for_end(pid)
    else:
        assert is_alive(pid)
    assert not Path(server.path).exists()


def test_ctrl_c_does_not_end_a_server(sleeping: tuple[ForkServer, socket.socket, int, bool]) -> None:
    server, *_ = sleeping
    server.process.send_signal(signal.SIGINT)
    assert "started" in connect(server.path, {}, (0, 1, 2)).makefile().readline()


@pytest.mark.slow
def test_a_script_hears_the_first_signal_and_tells_its_end(tmp_path: Path) -> None:
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
    if "PYTEST_XDIST_WORKER" not in os.environ:  # which is not known where this file is imported
        pytest.skip("this is not a worker")
    assert Path(os.environ[SHARED_SERVER]).is_socket()

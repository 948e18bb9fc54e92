"""Several processes: their environment, the reported error, and no leftover processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megatron.config.execution import ResolvedRun
from megatron.config.load import load_config
from megatron.distributed.launcher_environment import ADDRESS, RankInfo, find_free_port
from megatron.distributed.mesh import ParallelSizes
from megatron.launch import local_launcher, rank_group
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.signals import StoppedBySignal

ROOT = Path(__file__).resolve().parents[2]
CONFIG = load_config(
    [], ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=4", "train_iters=1"]
).config


def places(ranks: int) -> list[RankInfo]:
    return [RankInfo(rank, ranks, rank) for rank in range(ranks)]


PRELUDE = """
import json, os, pathlib, signal, sys, time
job, log, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def fail(kind, message, code=1):
    (job / f"error_{rank}.json").write_text(json.dumps({"kind": kind, "message": message, "time": time.time()}))
    sys.exit(code)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Function that runs Python code as every rank and returns the ranks' folder."""
    monkeypatch.setattr(rank_group, "STOP_TIMEOUT", 1.0)
    monkeypatch.setenv("OUT", str(tmp_path))

    def _run(code: str, ranks: int = 2) -> Path:
        script = PRELUDE + textwrap.dedent(code)
        code = rank_group.run_ranks(
            CONFIG, tmp_path / "log.txt", places(ranks), ADDRESS, 23456, [sys.executable, "-c", script]
        )
        assert code == 0
        return tmp_path

    return _run


def wait_until_gone(pids: list[int]) -> bool:
    deadline = time.time() + 10
    while time.time() < deadline:
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def test_every_rank_gets_its_rank_and_threads(run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = run(
        """
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS".split()
        seen = {name: os.environ[name] for name in names}
        seen["config"] = (job / "config.yml").read_text()
        sys.path.insert(0, os.environ["PYTHONPATH"].split(os.pathsep)[0])
        import megatron.config.schema  # the package is found from any working directory
        (pathlib.Path(os.environ["OUT"]) / f"{rank}.json").write_text(json.dumps(seen))
        print("noise of rank", rank)
        """,
        ranks=3,
    )
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]
    assert [(s["RANK"], s["LOCAL_RANK"], s["WORLD_SIZE"]) for s in seen] == [
        ("0", "0", "3"),
        ("1", "1", "3"),
        ("2", "2", "3"),
    ]
    assert {(s["MASTER_ADDR"], s["MASTER_PORT"], s["LOCAL_WORLD_SIZE"]) for s in seen} == {("127.0.0.1", "23456", "3")}
    assert {s["OMP_NUM_THREADS"] for s in seen} == {str(rank_group.count_threads_per_process(3))}
    assert "num_layers: 1" in seen[0]["config"]
    assert "noise of rank 1" in (folder / "log.txt").read_text()


def test_threads_the_user_chose_are_kept(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    folder = run('(pathlib.Path(os.environ["OUT"]) / f"{rank}").write_text(os.environ["OMP_NUM_THREADS"])')
    assert (folder / "1").read_text() == "7"


@pytest.mark.parametrize(("kind", "code", "error"), [("user", 2, UserError), ("run", 1, RunError)])
def test_error_of_a_rank_is_raised_as_it_was_and_the_others_end(run, tmp_path, kind, code, error):
    with pytest.raises(error, match=r"^the disk is full$"):
        run(
            f"""
            (pathlib.Path(os.environ["OUT"]) / f"pid{{rank}}").write_text(str(os.getpid()))
            if rank == 1:
                fail("{kind}", "the disk is full", {code})
            time.sleep(60)
            """
        )
    assert wait_until_gone([int(path.read_text()) for path in tmp_path.glob("pid*")])


def test_the_cause_is_reported_not_its_consequences(run, monkeypatch):
    """Rank 1 causes the failure; rank 0 fails first, in a collective, because rank 1 leaves.

    Rank 1's error is reported.
    """
    monkeypatch.setattr(rank_group, "STOP_TIMEOUT", 60.0)
    with pytest.raises(RunError, match=r"^loss is NaN$"):
        run(
            """
            if rank == 0:
                fail("unexpected", "RuntimeError: peer closed")
            time.sleep(0.4)
            fail("run", "loss is NaN")
            """
        )


def test_a_killed_rank_is_named(run, monkeypatch):
    monkeypatch.setattr(rank_group, "STOP_TIMEOUT", 60.0)
    with pytest.raises(RunError, match=r"rank 1 was killed by SIGKILL \(out of memory\?\); see .*log\.txt"):
        run(
            """
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.4)
            fail("unexpected", "RuntimeError: connection closed by peer")
            """
        )


def test_an_exit_code_without_a_message(run):
    with pytest.raises(RunError, match="rank 0 died with exit code 3"):
        run("sys.exit(3) if rank == 0 else None")


def test_a_rank_that_ignores_sigterm_is_killed(run, tmp_path):
    started = time.time()
    with pytest.raises(RunError, match="gone"):
        run(
            """
            (pathlib.Path(os.environ["OUT"]) / f"pid{rank}").write_text(str(os.getpid()))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (pathlib.Path(os.environ["OUT"]) / f"ready{rank}").touch()
            while rank == 0 and not (pathlib.Path(os.environ["OUT"]) / "ready1").exists():
                time.sleep(0.02)
            fail("run", "gone") if rank == 0 else time.sleep(60)
            """
        )
    assert time.time() - started < 20
    assert wait_until_gone([int(path.read_text()) for path in tmp_path.glob("pid*")])


def launch(tmp_path: Path, rank_code: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a launcher of two ranks as a separate process; return it and the ranks once they are ready."""
    rank_code = PRELUDE + textwrap.dedent(rank_code)
    launcher = textwrap.dedent(
        f"""
        import pathlib, sys
        from megatron.config.load import read_config
        from megatron.launch import local_launcher as local
        from megatron.launch import rank_group as processes
        config = read_config({str(tmp_path / "config.yml")!r})
        command = [sys.executable, "-c", {rank_code!r}]
        from megatron.distributed.launcher_environment import RankInfo
        places = [RankInfo(rank, 2, rank) for rank in range(2)]
        log = pathlib.Path({str(tmp_path / "log.txt")!r})
        sys.exit(processes.run_ranks(config, log, places, "127.0.0.1", 23457, command))
        """
    )
    CONFIG.save(tmp_path / "config.yml")
    environment = {**os.environ, "OUT": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", launcher], env=environment, stderr=subprocess.PIPE)
    deadline = time.time() + 60
    while len(list(tmp_path.glob("pid*"))) < 2 and time.time() < deadline and process.poll() is None:
        time.sleep(0.05)
    pids = [int(path.name.removeprefix("pid")) for path in tmp_path.glob("pid*")]
    assert len(pids) == 2, process.communicate()[1].decode()
    return process, pids


READY = '(pathlib.Path(os.environ["OUT"]) / f"pid{os.getpid()}").touch()\n'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_ranks_exit_cleanly(tmp_path: Path, number: signal.Signals):
    save = f"""
        def save(*_):
            (pathlib.Path(os.environ["OUT"]) / f"saved{{rank}}").touch()
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        {READY}
        time.sleep(60)
        """
    process, pids = launch(tmp_path, save)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]
    assert wait_until_gone(pids)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_while_ranks_are_started_is_not_lost(when: str):
    """A signal during startup reaches the rank being started, and no further rank starts."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        if when == "before":
            signal.raise_signal(signal.SIGTERM)
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        if when == "after":
            signal.raise_signal(signal.SIGTERM)
        return started[-1]

    start_time = time.monotonic()
    with pytest.raises(StoppedBySignal) as ended:
        rank_group.RankGroup([start, start], lambda index, code: f"child {index} ended with {code}").run()
    assert ended.value.signum == signal.SIGTERM
    assert [child.returncode for child in started] == [-signal.SIGTERM]
    assert time.monotonic() - start_time < 30


def test_a_second_signal_ends_ranks_that_ignore_the_first(tmp_path: Path):
    process, pids = launch(tmp_path, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY}time.sleep(60)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].endswith(b"\nKeyboardInterrupt\n")  # the command line reports it
    assert wait_until_gone(pids)


def test_a_second_sighup_does_not_interrupt_saving(tmp_path: Path):
    """A closing terminal sends SIGHUP twice; ranks that are saving must not be killed."""
    saved = tmp_path / "saved"
    save = f"signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), open({str(saved)!r}, 'w'), os._exit(143)))\n"
    process, pids = launch(tmp_path, f"import os\n{save}{READY}time.sleep(60)")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert saved.exists()
    assert wait_until_gone(pids)


def test_an_error_while_ending_after_a_signal_is_reported(tmp_path: Path):
    fail = f'signal.signal(signal.SIGTERM, lambda *_: fail("run", "the disk is full"))\n{READY}time.sleep(60)'
    process, _ = launch(tmp_path, fail)
    process.send_signal(signal.SIGTERM)
    assert b"RunError: the disk is full" in process.communicate(timeout=60)[1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_ranks_end_when_the_launcher_is_killed_outright(tmp_path: Path):
    code = f"from megatron.utils.signals import exit_with_parent\nexit_with_parent()\n{READY}time.sleep(60)"
    process, pids = launch(tmp_path, code)
    process.kill()
    process.communicate(timeout=60)
    assert wait_until_gone(pids)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_a_multithreaded_parent_ends_a_run_once(tmp_path: Path):
    """The kernel sends the signal for each exiting thread of the parent; the run still ends in good order."""
    done = tmp_path / "done"
    child = f"""
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
from megatron.utils.signals import exit_with_parent
from megatron.utils.signals import GracefulStop
exit_with_parent()
with GracefulStop() as stop:
    print("ready", flush=True)
    while stop.signal is None:
        time.sleep(0.01)
    time.sleep(0.5)  # the step, and saving
open({str(done)!r}, "w").write(str(int(stop.signal)))
"""
    parent = f"""
import subprocess, sys, threading, time
from megatron.utils.signals import get_parent_variable
import os
for _ in range(64):
    threading.Thread(target=time.sleep, args=(60,)).start()
subprocess.run([sys.executable, "-c", {child!r}], env={{**os.environ, **get_parent_variable()}}, start_new_session=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait(60)
    deadline = time.monotonic() + 30
    while not (done.exists() and done.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done.read_text() == str(int(signal.SIGHUP))
    process.stdout.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_a_training_does_not_start_without_its_parent(monkeypatch: pytest.MonkeyPatch):
    """Training whose parent has already exited does not start.

    A separate process, because the setting lasts for its lifetime.
    """
    monkeypatch.setenv("FARFIELD_PARENT", "1")
    child = os.fork()
    if child == 0:
        try:
            local_launcher.train_on_this_machine(ResolvedRun(CONFIG, ParallelSizes(), ()))
        except SystemExit as leaving:
            os._exit(10 + int(leaving.code))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11


def test_free_port_is_free():
    import socket

    with socket.socket() as listener:
        listener.bind((ADDRESS, find_free_port()))


def test_error_kinds_are_farfield_errors():
    assert all(issubclass(kind.error, FarfieldError) for kind in rank_group.ERROR_KINDS.values())

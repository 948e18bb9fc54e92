"""Hostfile: its format, and runs over machines reached by a replacement of ssh on this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Forked, run
from tiny_runs import losses, records, tiny_config, write_corpora, write_pausing_method

from megatron.config.load import load_config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.launch import dispatch, ssh_launcher
from megatron.launch.local_launcher import train_on_this_machine
from megatron.launch.ssh_launcher import Host
from megatron.position.catalog import METHODS_VARIABLE
from megatron.training.resolve_run import resolve_run
from megatron.utils.errors import RunError, UserError
from tools.tolerances import compute_tolerance, count_gpt_sums

ROOT = Path(__file__).resolve().parents[2]
ROUNDING = compute_tolerance(*count_gpt_sums(32, layers=2))
SMALL = [
    *("num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "train_iters=2"),
    *("train_data_paths=[nowhere]", "train_micro_batch_size_per_gpu=2", "hostfile=hosts", "device=cpu"),
]
SSH = f"""\
#!{sys.executable}
# Options, a machine, a command: as ssh, which leaves the command its standard streams.
import os, shlex, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[:2]
host = words.pop(0)
with open("reached.txt", "a") as file:
    print(host, file=file)
if host == "nowhere":
    print("ssh: Could not resolve hostname nowhere", file=sys.stderr)
    sys.exit(255)
env, variable, *command = shlex.split(" ".join(words))
assert env == "env"
os.environ.pop({METHODS_VARIABLE!r}, None)  # a machine has a user's variables if the launcher sends them
os.environ.update([variable.split("=", 1)])
sys.exit(subprocess.call(command, cwd="/"))
"""
"""Script of this Python, so that a forked launcher starts it as a fork (`fork_server.py`)."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with the ssh replacement on PATH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def hosts(text: str, *overrides: str) -> list[Host]:
    Path("hosts").write_text(text)
    return ssh_launcher.read_hostfile(load_config([], [*SMALL, *overrides]).config.launch)


def test_hostfiles_have_deepspeeds_format(place: Path) -> None:
    text = "# two machines\nnode1 slots=8\n\n  me@node2\tslots=4 # the small one\n"
    assert hosts(text) == [Host("node1", 8), Host("me@node2", 4)]
    assert hosts(text, "num_gpus=4") == [Host("node1", 4), Host("me@node2", 4)]
    assert hosts(text, "nodes=1") == [Host("node1", 8)]


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("node1 slots=8\nnode2\n", [], r"^hosts:2: 'node2' is invalid; it must be NAME slots=8$"),
        ("node1 slots=0\n", [], r"^hosts:1: 'node1 slots=0' is invalid"),
        ("-oProxyCommand=x slots=2\n", [], r"^hosts:1: .* is invalid"),  # would be an option of ssh
        ("node1 slots=2\nnode1 slots=2\n", [], r"^hosts:2: node1 is listed twice"),
        ("# nobody\n", [], r"^nodes is 1, but hosts has 0 hosts$"),
        ("node1 slots=2\n", ["nodes=2"], r"^nodes is 2, but hosts has 1 host$"),
        ("node1 slots=2\n", ["num_gpus=4"], r"^num_gpus is 4, but node1 has slots=2 in hosts$"),
    ],
)
def test_invalid_hostfiles(place: Path, text: str, keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        hosts(text, *keys)


def test_when_ssh_is_used(place: Path) -> None:
    def launch(*overrides: str):
        return load_config([], [*SMALL, *overrides]).config.launch

    with pytest.raises(
        UserError, match=r"^hostfile: no such file: hosts; to train on this machine only, set hostfile=n"
    ):
        dispatch.uses_ssh(launch())
    # The default of GPT-NeoX's configurations means this machine, as in DeepSpeed.
    assert not dispatch.uses_ssh(launch("hostfile=/mock_path"))
    assert dispatch.list_hostfile_notes(launch("hostfile=/mock_path")) == (
        "hostfile /mock_path has no effect: no such file",
    )
    assert dispatch.uses_ssh(launch("launcher=ssh"))
    Path("hosts").write_text("node1 slots=1\n")
    assert dispatch.uses_ssh(launch())
    assert dispatch.list_hostfile_notes(launch()) == ()
    assert not dispatch.uses_ssh(launch("launcher=slurm", "num_gpus=1"))
    with pytest.raises(UserError, match="launcher ssh needs hostfile"):
        load_config([], ["launcher=ssh", *SMALL, "hostfile=null"])


def test_consecutive_ranks_are_on_one_machine() -> None:
    assert ssh_launcher.assign_ranks([Host("a", 2), Host("b", 1)]) == [
        [RankInfo(0, 3, 0, 2), RankInfo(1, 3, 1, 2)],
        [RankInfo(2, 3, 0, 1)],
    ]
    assert ssh_launcher.assign_ranks([Host("a", 2)]) == [[RankInfo(0, 2, 0), RankInfo(1, 2, 1)]]


def test_a_machine_that_cannot_be_reached_is_named(place: Path) -> None:
    config = load_config([], [*SMALL, "save=run"]).config
    with pytest.raises(RunError, match=r"^nowhere cannot be reached, .*Could not resolve .*; try: ssh nowhere true$"):
        ssh_launcher.train_over_ssh(config, hosts("nowhere slots=1\n"))
    with pytest.raises(UserError, match="a run on several hosts requires save"):
        ssh_launcher.train_over_ssh(config.replace(save=None), hosts("nowhere slots=1\n"))


def test_errors_of_another_machine_are_reported_like_local_ones(place: Path) -> None:
    """Errors of a remote machine are reported like local ones.

    The remote process is started as by ssh, not as a fork.
    """
    config = load_config([], [*SMALL, "save=run", "train_batch_size=6"]).config
    with pytest.raises(UserError, match=r"^train_batch_size 6 is not"):
        ssh_launcher.train_over_ssh(config, hosts("localhost slots=2\n"))


def test_a_run_over_two_machines_survives_its_launcher_and_resumes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL of the launcher its connections close, and the ranks on both machines save and end.

    The run can be resumed.
    """
    corpus, method = write_corpora(place / "data"), write_pausing_method(place / "methods")
    monkeypatch.setenv(METHODS_VARIABLE, str(place / "methods"))
    keys = {"pos_emb": method, "train_iters": 24, "train_batch_size": 4, "checkpoint_factor": None, "num_workers": 0}
    config = tiny_config(corpus, place / "whole", **keys)
    assert train_on_this_machine(resolve_run(config, LocalHardware(0, 1))) == 0
    expected = losses(place / "whole")
    tiny_config(corpus, **keys, train_micro_batch_size_per_gpu=1, num_gpus=None, nodes=None).save("run.yml")
    Path("hosts").write_text("localhost slots=1\nme@localhost slots=1\n")
    command = (ROOT / "deepy.py", "train", "run.yml", "save=run", "load=run", "hostfile=hosts")

    def until(what) -> None:
        deadline = time.monotonic() + 240
        while not what():
            log = Path("run/log.txt")
            assert time.monotonic() < deadline, log.read_text() if log.is_file() else "no log"
            time.sleep(0.1)

    def steps() -> int:
        return max(records(place / "run"), default=0) if Path("run/metrics.jsonl").is_file() else 0

    launcher = Forked(*command, output=place / "printed.txt")
    try:
        until(lambda: steps() >= 2)
    finally:
        launcher.kill()
    until(lambda: list(Path("run/checkpoints").glob("step_*")) and "stopped by SIGTERM" in log_of(place))
    assert steps() < len(expected)
    assert "2 ranks: tensor 1 × pipeline 1 × context 1 × data 2" in launcher.printed()
    until(lambda: not [path for path in Path("/proc").glob("[0-9]*/cwd") if _is(path, place)])

    done = run(*command, cwd=place)
    assert done.returncode == 0, done.stderr + log_of(place)
    assert re.search(r"^saved run/checkpoints/step_0000024; next", done.stdout, re.MULTILINE)
    assert sorted(Path("reached.txt").read_text().split()) == [*["localhost"] * 2, *["me@localhost"] * 2]
    assert losses(place / "run") == pytest.approx(expected, rel=ROUNDING)


def log_of(place: Path) -> str:
    return (place / "run" / "log.txt").read_text()


def _is(link: Path, folder: Path) -> bool:
    """Return True if a process other than this one works in the folder."""
    try:
        return int(link.parent.name) != os.getpid() and link.readlink() == folder
    except OSError:
        return False


def test_signals_of_the_launcher_reach_the_ranks_of_a_machine(place: Path) -> None:
    """Without ranks: TERM on the lifeline, or its end, sends SIGTERM; KILL sends a second signal."""
    code = (
        "import io, signal, sys, threading, time\n"
        "from megatron.launch.ssh_launcher import _read_control_channel\n"
        "for said in sys.argv[1:]:\n"
        "    seen = []\n"
        "    for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, lambda n, _: seen.append(n))\n"
        "    thread = threading.Thread(target=_read_control_channel, args=(io.BytesIO(said.encode()),))\n"
        "    thread.start(); thread.join()\n"
        "    time.sleep(0.1); print(*sorted(seen))\n"
    )
    both = [signal.SIGINT, signal.SIGTERM]
    received = {"": [signal.SIGTERM], "TERM\n": [signal.SIGTERM], "TERM\nKILL\n": both, "KILL\n": both}
    done = subprocess.run(
        [sys.executable, "-c", code, *received], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert [[int(number) for number in line.split()] for line in done.stdout.splitlines()] == list(received.values())

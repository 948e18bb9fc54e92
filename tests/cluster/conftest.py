"""SLURM cluster on this machine: a controller and two nodes in a temporary folder, independent of the machine's own
setup.
"""

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from megatron.distributed.launcher_environment import find_free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CREDENTIALS = 10  # seconds until SLURM restarts a requeued job; default 120


@dataclass(frozen=True)
class Slurm:
    """SLURM cluster for the commands of a test."""

    folder: Path
    nodes: tuple[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a user on a login node; jobs inherit it."""
        own = {name: value for name, value in os.environ.items() if not re.match(r"SLURM_|RANK|WORLD_SIZE", name)}
        return {**own, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def __call__(self, *command: str, cwd: Path | None = None, timeout: float = 120) -> str:
        """Run a command and return its standard output."""
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def deepy(self, *arguments: str, cwd: Path) -> str:
        """Run a deepy.py command on the login node."""
        return self(sys.executable, str(ROOT / "deepy.py"), *arguments, cwd=cwd)

    def state(self, job: str) -> str:
        """Return the state of a job (PENDING, RUNNING, COMPLETED …); for a job array, the distinct states of its
        tasks.
        """
        found = re.findall(r"JobState=(\S+)", self("scontrol", "show", "job", job))
        return ",".join(sorted(set(found)))

    def logs(self) -> str:
        """Return the end of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in (self.folder / "log").iterdir())


def _configuration(folder: Path, nodes: tuple[str, str], ports: list[int]) -> str:
    user = getpass.getuser()
    # Two slurmd share the host's address and use separate ports. The first is named after the host, so that ranks can
    # resolve the name of a job's first node.
    lines = "\n".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=2000"
        for name, port in zip(nodes, ports[1:], strict=True)
    )
    return f"""\
ClusterName=farfield
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={CREDENTIALS}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
{lines}
PartitionName=debug Nodes={",".join(nodes)} Default=YES MaxTime=60 State=UP
"""


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """SLURM cluster with both nodes idle; skipped if Debian's packages are not installed."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"no SLURM on this machine ({', '.join(missing)}); as root, make slurm installs Debian's")
    host = socket.gethostname().split(".")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # some container engines give a new name to each container and do not write it down
        message = f"the name of this machine, {host}, cannot be resolved: add it to /etc/hosts"
        raise pytest.fail.Exception(message, pytrace=False) from None
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # the path of a socket must be short
    folder.chmod(0o755)
    for name in ("log", "state", "spool"):
        (folder / name).mkdir()
    nodes = (host, f"{host}-2")
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(_configuration(folder, nodes, [find_free_port() for _ in range(3)]))
    cluster = Slurm(folder, nodes)
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/seed"]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with open(folder / "log" / f"{len(daemons)}.out", "wb") as output:
            daemons.append(
                subprocess.Popen(
                    command, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    cwd=folder, start_new_session=True,
                )
            )  # fmt: skip

    try:
        start(*munge)
        until(lambda: (folder / "munge.socket").exists(), cluster, "munged")
        start("slurmctld", "-D", "-i")
        for node in nodes:
            start("slurmd", "-D", "-N", node)
        until(lambda: _idle(cluster) == sorted(nodes), cluster, "two idle nodes")
        yield cluster
    finally:
        _stop(cluster, daemons)
        shutil.rmtree(folder, ignore_errors=True)


def _idle(cluster: Slurm) -> list[str]:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60, check=False)
    return sorted(done.stdout.split())


class Cluster(Protocol):
    """Interface of a cluster for waiting tests."""

    def logs(self) -> str:
        """Return the end of the daemons' logs."""


def until(there: Callable[[], object], cluster: Cluster, what: str, seconds: float = 60) -> None:
    """Wait until a condition is true, or raise AssertionError with the cluster's logs after the timeout."""
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, f"no {what} after {seconds:.0f} s\n{cluster.logs()}"
        time.sleep(0.1)


def _stop(cluster: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    """End all jobs, so that no step keeps running, then the daemons started by this test."""
    if len(daemons) == 4:
        run = {"env": cluster.environment, "capture_output": True, "text": True, "timeout": 60, "check": False}
        subprocess.run(["scancel", "--user", getpass.getuser()], **run)  # type: ignore[call-overload]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if not subprocess.run(["squeue", "--noheader"], **run).stdout.strip():  # type: ignore[call-overload]
                break
            time.sleep(0.2)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

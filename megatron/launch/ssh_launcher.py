"""`hostfile`: a run over machines that are reached by ssh, one connection to each.

A connection's standard input is its control channel. It brings the request (what to train, as which ranks), then a line
TERM or KILL for a signal; when it ends, with the launcher or the network, the machine's ranks are asked to save and end
(`node.py`). So nothing has to be searched for and killed by its name.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config.schema import Config
from megatron.distributed.launcher_environment import PORTS, RankInfo
from megatron.launch.local_launcher import check_run_folder, open_run_log
from megatron.launch.rank_group import ROOT, supervise
from megatron.options.launch import LaunchOptions
from megatron.utils.errors import UserError
from megatron.utils.signals import end_with_parent

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8")
FORWARDED_VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "WANDB_", "HF_")
"""How variables begin that the machines get from here. Through the connection: nobody sees them in a list of
processes."""
LINE = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class Host:
    """A machine, and how many processes it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class LaunchRequest:
    """What a machine is told first."""

    configuration: str
    log: str
    rank_infos: list[dict[str, Any]]
    address: str
    port: int
    folder: str
    """The working directory, which paths are relative to."""
    environment: dict[str, str]


def uses_ssh(launch: LaunchOptions) -> bool:
    """Is the run to be started over ssh? As in DeepSpeed, a hostfile that does not exist means this machine."""
    if launch.launcher == "ssh":
        return True
    return launch.launcher == "auto" and launch.hostfile is not None and Path(launch.hostfile).is_file()


def list_ssh_notes(launch: LaunchOptions) -> tuple[str, ...]:
    """Lines worth telling."""
    if launch.hostfile is None or uses_ssh(launch):
        return ()
    reason = "no such file" if launch.launcher == "auto" else f"launcher is {launch.launcher}"
    return (f"hostfile {launch.hostfile} has no effect: {reason}",)


def read_hostfile(launch: LaunchOptions) -> list[Host]:
    """The machines of a run: the first `nodes` of the hostfile, with `num_gpus` processes each where that is given.

    The file is DeepSpeed's: a line `NAME slots=N` for each machine; # begins a comment.

    Raises:
        UserError: the file is not there, a line is none of these, or there are fewer machines or slots than wanted.
    """
    assert launch.hostfile is not None
    try:
        text = Path(launch.hostfile).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hostfile is {launch.hostfile}, which cannot be read ({error})") from error
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#")[0].strip()
        if not content:
            continue
        found = LINE.fullmatch(content)
        if found is None or found[1].startswith("-") or int(found[2]) < 1:
            raise UserError(f"{launch.hostfile}:{number}: {content!r} is no machine; write NAME slots=8")
        if any(host.name == found[1] for host in hosts):
            raise UserError(f"{launch.hostfile}:{number}: {found[1]} is there twice; give all its slots in a line")
        hosts.append(Host(found[1], int(found[2])))
    if len(hosts) < (launch.nodes or 1):
        raise UserError(f"nodes is {launch.nodes or 1}, but {launch.hostfile} has {len(hosts)} machines")
    hosts = hosts[: launch.nodes]
    if launch.num_gpus is None:
        return hosts
    for host in hosts:
        if host.slots < launch.num_gpus:
            have = f"{host.name} has slots={host.slots} in {launch.hostfile}"
            raise UserError(f"num_gpus is {launch.num_gpus}, but {have}")
    return [Host(host.name, launch.num_gpus) for host in hosts]


def assign_ranks(hosts: Sequence[Host]) -> list[list[RankInfo]]:
    """The ranks of each machine: neighbours in number are on one."""
    world_size, rank_infos, first = sum(host.slots for host in hosts), [], 0
    for host in hosts:
        local = None if host.slots == world_size else host.slots
        rank_infos.append([RankInfo(first + slot, world_size, slot, local) for slot in range(host.slots)])
        first += host.slots
    return rank_infos


def train_over_ssh(config: Config) -> int:
    """Train over the machines of the hostfile.

    Returns:
        0, or 128 + n if signal n ended the run early.

    Raises:
        UserError: the hostfile, or what the ranks refuse.
        RunError: what went wrong first, with the machine's name if it could not be reached.
    """
    end_with_parent()
    hosts = read_hostfile(config.launch)
    if config.checkpoint.save is None:
        raise UserError("a run over several machines needs save, a folder that all of them see")
    check_run_folder(config)
    with open_run_log(config, True) as log, tempfile.TemporaryDirectory(prefix="farfield-") as folder:

        def errors(index: int) -> Path:
            return Path(folder) / f"{index}.txt"

        def report(index: int, code: int) -> dict[str, Any] | str:
            return _describe_end(hosts[index], code, errors(index).read_text(encoding="utf-8", errors="replace"), log)

        common = LaunchRequest(
            configuration=config.replace(num_gpus=None, nodes=None).to_yaml(only_set=True),
            log=str(log),
            rank_infos=[],
            address=hosts[0].name.rpartition("@")[2],
            port=config.launch.master_port or random.choice(PORTS),
            folder=os.getcwd(),
            environment={name: value for name, value in os.environ.items() if name.startswith(FORWARDED_VARIABLES)},
        )
        starts = []
        for index, (host, rank_infos) in enumerate(zip(hosts, assign_ranks(hosts), strict=True)):
            request = replace(common, rank_infos=[asdict(rank_info) for rank_info in rank_infos])
            starts.append(partial(SshConnection, host, request, errors(index), log if index else None))
        return supervise(starts, report)


class SshConnection(subprocess.Popen[bytes]):
    """A machine of the run, as a child process whose signals travel through its standard input."""

    def __init__(self, host: Host, request: LaunchRequest, errors: Path, output: Path | None) -> None:
        """output: where its output goes; None for the user's console, where the first rank reports."""
        command = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-m", "megatron.launch.node_agent"])
        with open(errors, "wb") as problems, open(output or os.devnull, "ab") as log:
            super().__init__(
                [*SSH, host.name, command], stdin=subprocess.PIPE, stdout=log if output else None, stderr=problems,
                start_new_session=True,
            )  # fmt: skip
        self._send(json.dumps(asdict(request)))

    def send_signal(self, sig: int) -> None:
        """SIGTERM: its ranks are asked to save and end. SIGKILL: they are ended at once, and the connection closed."""
        self._send("KILL" if sig == signal.SIGKILL else "TERM")
        if sig == signal.SIGKILL and self.stdin is not None:
            with suppress(OSError):
                self.stdin.close()

    def _send(self, line: str) -> None:
        assert self.stdin is not None
        with suppress(OSError, ValueError):  # it is gone, or closed: what it left says why
            self.stdin.write(f"{line}\n".encode())
            self.stdin.flush()


def _describe_end(host: Host, code: int, errors: str, log: Path) -> dict[str, Any] | str:
    """What a machine said of its end, or what ssh did."""
    lines = [line for line in errors.splitlines() if line.strip()]
    for line in reversed(lines):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and found.keys() >= {"kind", "message", "time"}:
                return found
    reason = f": {lines[-1]}" if lines else ""
    if code == 255:  # ssh's own
        return f"{host.name} cannot be reached, or the connection to it was lost{reason}; try: ssh {host.name} true"
    return f"{host.name}: its processes ended with exit code {code}{reason}; see {log}"

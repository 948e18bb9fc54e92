"""`hostfile`: a run over machines that are reached by ssh, one connection to each.

At its other end `python -m megatron.launch.ssh_launcher` starts and watches the machine's ranks (`main`). Its standard
input is the control channel. The first line is the `LaunchRequest`: what to train, as which ranks. Then TERM asks the
ranks to save and end, KILL ends them at once, and so does TERM after TERM; the end of the input, with the launcher or
the network, means TERM, for nobody is there any more. So nothing has to be searched for and killed by its name. An
error is left on standard error as a line of JSON.
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
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from megatron.config.load import read_config
from megatron.config.schema import Config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import PORTS, RankInfo
from megatron.launch.local_launcher import open_run_log
from megatron.launch.rank_group import ROOT, ErrorReport, RankGroup, run_ranks
from megatron.options.launch import LaunchOptions
from megatron.training.resolve_run import resolve_run
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.signals import end_with_parent
from megatron.utils.temporary_folder import temporary_folder

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8")
FORWARDED_VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "WANDB_", "HF_", "FARFIELD_METHODS")
"""Prefixes of the variables that the machines get from here. Through the connection: nobody sees them in a list of
processes."""
HOSTFILE_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class Host:
    """A machine, and how many processes it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class LaunchRequest:
    """The first line that a machine gets."""

    configuration: str
    """As YAML, not resolved: that takes the machine's facts."""
    log: str
    rank_infos: list[dict[str, Any]]
    address: str
    port: int
    folder: str
    """The working directory, which paths are relative to."""
    environment: dict[str, str]


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
        match = HOSTFILE_LINE.fullmatch(content)
        if match is None or match[1].startswith("-") or int(match[2]) < 1:
            raise UserError(f"{launch.hostfile}:{number}: {content!r} is no machine; write NAME slots=8")
        if any(host.name == match[1] for host in hosts):
            raise UserError(f"{launch.hostfile}:{number}: {match[1]} is there twice; give all its slots in a line")
        hosts.append(Host(match[1], int(match[2])))
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


def train_over_ssh(config: Config, hosts: Sequence[Host]) -> int:
    """Train over several machines.

    Args:
        config: not resolved, which each machine does for itself.
        hosts: the machines (`read_hostfile`).

    Returns:
        0, or 128 + n if signal n ended the run early.

    Raises:
        UserError: what the machines refuse.
        RunError: what went wrong first, with the machine's name if it could not be reached.
    """
    end_with_parent()
    if config.checkpoint.save is None:
        raise UserError("a run over several machines needs save, a folder that all of them see")
    with open_run_log(config, True) as log, temporary_folder("ssh") as folder:
        error_files = [folder / f"{index}.txt" for index in range(len(hosts))]

        def read_report(index: int, code: int) -> ErrorReport | str:
            errors = error_files[index].read_text(encoding="utf-8", errors="replace")
            return _read_report(hosts[index], code, errors, log)

        common = LaunchRequest(
            configuration=config.replace(num_gpus=None, nodes=None).to_yaml(only_set=True),
            log=str(log),
            rank_infos=[],
            address=hosts[0].name.rpartition("@")[2],
            port=config.launch.master_port or random.choice(PORTS),
            folder=os.getcwd(),
            environment={name: value for name, value in os.environ.items() if name.startswith(FORWARDED_VARIABLES)},
        )
        starters = []
        for index, (host, rank_infos) in enumerate(zip(hosts, assign_ranks(hosts), strict=True)):
            request = replace(common, rank_infos=[asdict(rank_info) for rank_info in rank_infos])
            starters.append(partial(SshConnection, host, request, error_files[index], log if index else None))
        return RankGroup(starters, read_report).run()


class SshConnection(subprocess.Popen[bytes]):
    """A machine of the run, as a child process whose signals travel through its standard input."""

    def __init__(self, host: Host, request: LaunchRequest, error_file: Path, output: Path | None) -> None:
        """error_file: gets its standard error. output: where its output goes; None for the user's console, where the
        first rank reports."""
        command = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-m", "megatron.launch.ssh_launcher"])
        with open(error_file, "wb") as errors, open(output or os.devnull, "ab") as log:
            super().__init__(
                [*SSH, host.name, command], stdin=subprocess.PIPE, stdout=log if output else None, stderr=errors,
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
        with suppress(OSError, ValueError):  # it is gone, or closed: its error file says why
            self.stdin.write(f"{line}\n".encode())
            self.stdin.flush()


def _read_report(host: Host, code: int, errors: str, log: Path) -> ErrorReport | str:
    """What a machine said of its end, or a line of what ssh did."""
    lines = [line for line in errors.splitlines() if line.strip()]
    for line in reversed(lines):
        with suppress(ValueError):
            return ErrorReport.parse(line)
    reason = f": {lines[-1]}" if lines else ""
    if code == 255:  # ssh's own
        return f"{host.name} cannot be reached, or the connection to it was lost{reason}; try: ssh {host.name} true"
    return f"{host.name}: its processes ended with exit code {code}{reason}; see {log}"


def main() -> int:
    """A machine's end of the connection: read the request and run the ranks. Returns 0, 128 + n after signal n, or the
    exit code of an error."""
    request = LaunchRequest(**json.loads(sys.stdin.buffer.readline()))
    try:
        return _run_requested_ranks(request)
    except FarfieldError as error:
        print(ErrorReport.from_error(error).to_json(), file=sys.stderr, flush=True)
        return error.exit_code


def _run_requested_ranks(request: LaunchRequest) -> int:
    log = Path(request.log)
    try:
        os.chdir(request.folder)
        if not log.is_file():
            raise FileNotFoundError(2, "not there")
    except OSError as error:
        hostname = os.uname().nodename
        path = request.folder if error.filename else log
        raise RunError(f"{hostname}: {path}: {error.strerror}; all machines must see the same folders") from error
    os.environ.update(request.environment)
    with tempfile.NamedTemporaryFile("w", prefix="farfield-", suffix=".yml", encoding="utf-8") as file:
        file.write(request.configuration)
        file.flush()
        config = read_config(file.name)
    rank_infos = [RankInfo(**rank_info) for rank_info in request.rank_infos]
    config = resolve_run(config, LocalHardware.detect(), rank_info=rank_infos[0]).config
    # The signals of the control channel find the handlers of the rank group, or, a moment before, end this process:
    # nothing runs.
    threading.Thread(target=_read_control_channel, args=(sys.stdin.buffer,), daemon=True).start()
    return run_ranks(config, log, rank_infos, request.address, request.port)


def _read_control_channel(control_channel: BinaryIO) -> None:
    """Turn what comes into signals to this process, which hands them on to its ranks."""
    stop_requested = False
    for line in control_channel:
        if (word := line.strip()) == b"TERM" and not stop_requested:
            stop_requested = True
            os.kill(os.getpid(), signal.SIGTERM)
        elif word == b"KILL":
            # The second signal is the one that does not wait. Two of the same might arrive as one.
            for number in (signal.SIGINT,) if stop_requested else (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            return
    if not stop_requested:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    # os._exit: the thread may hold standard input, which the interpreter would wait for.
    code = main()
    sys.stdout.flush()
    os._exit(code)

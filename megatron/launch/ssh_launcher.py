"""`hostfile`: training on several hosts over ssh, with one connection to each.

On each host, `python -m megatron.launch.ssh_launcher` starts and monitors the host's ranks (`main`). Its standard input
is the control channel. The first line is the `LaunchRequest` with the configuration and ranks. TERM asks the ranks to
save and exit; KILL, or a second TERM, stops them immediately. The end of the input, when the launcher or the network
fails, means TERM. No processes therefore have to be found and killed by name. Errors are written to standard error as a
line of JSON.
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
from megatron.launch.rank_group import ErrorReport, RankGroup, run_ranks
from megatron.options.launch import LaunchOptions
from megatron.training.resolve_run import resolve_run
from megatron.utils.atomic_directory import temporary_folder
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.formatting import format_quantity
from megatron.utils.project import PACKAGES_FOLDER
from megatron.utils.signals import exit_with_parent

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8")
FORWARDED_VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "WANDB_", "HF_", "FARFIELD_METHODS")
"""Prefixes of environment variables that are forwarded to the hosts.

They are sent through the connection, so that they do not appear in process lists.
"""
HOSTFILE_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class Host:
    """Host and its number of processes."""

    name: str
    slots: int


@dataclass(frozen=True)
class LaunchRequest:
    """First line sent to a host."""

    configuration: str
    """Unresolved configuration as YAML; resolving requires the host's hardware."""
    log: str
    rank_infos: list[dict[str, Any]]
    address: str
    port: int
    folder: str
    """Working directory, to which paths are relative."""
    environment: dict[str, str]


def read_hostfile(launch: LaunchOptions) -> list[Host]:
    """Return the hosts of a run: the first `nodes` in the hostfile, with `num_gpus` processes each if set.

    The file has DeepSpeed's format: one line `NAME slots=N` per host; # begins a comment.

    Raises:
        UserError: the file is missing or invalid, or has too few hosts or slots.
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
            raise UserError(f"{launch.hostfile}:{number}: {content!r} is invalid; it must be NAME slots=8")
        if any(host.name == match[1] for host in hosts):
            raise UserError(f"{launch.hostfile}:{number}: {match[1]} is listed twice; give all its slots on one line")
        hosts.append(Host(match[1], int(match[2])))
    if len(hosts) < (launch.nodes or 1):
        raise UserError(
            f"nodes is {launch.nodes or 1}, but {launch.hostfile} has {format_quantity(len(hosts), 'host')}"
        )
    hosts = hosts[: launch.nodes]
    if launch.num_gpus is None:
        return hosts
    for host in hosts:
        if host.slots < launch.num_gpus:
            have = f"{host.name} has slots={host.slots} in {launch.hostfile}"
            raise UserError(f"num_gpus is {launch.num_gpus}, but {have}")
    return [Host(host.name, launch.num_gpus) for host in hosts]


def assign_ranks(hosts: Sequence[Host]) -> list[list[RankInfo]]:
    """Return the ranks of each host; a host's ranks are consecutive."""
    world_size, rank_infos, first = sum(host.slots for host in hosts), [], 0
    for host in hosts:
        local = None if host.slots == world_size else host.slots
        rank_infos.append([RankInfo(first + slot, world_size, slot, local) for slot in range(host.slots)])
        first += host.slots
    return rank_infos


def train_over_ssh(config: Config, hosts: Sequence[Host]) -> int:
    """Train on several hosts.

    Args:
        config: unresolved configuration; each host resolves it.
        hosts: the hosts (`read_hostfile`).

    Returns:
        0, or 128 + n if signal n ended the run early.

    Raises:
        UserError: a host rejects the run.
        RunError: root cause of a failure, with the host's name if it could not be reached.
    """
    exit_with_parent()
    if config.checkpoint.save is None:
        raise UserError("a run on several hosts requires save, a folder shared by all of them")
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
    """Host of the run, as a child process that receives signals through its standard input."""

    def __init__(self, host: Host, request: LaunchRequest, error_file: Path, output: Path | None) -> None:
        """Connect to a host.

        error_file: file for its standard error. output: file for its standard output; None shows it on the user's
        console, where the first rank reports.
        """
        command = shlex.join(
            ["env", f"PYTHONPATH={PACKAGES_FOLDER}", sys.executable, "-P", "-m", "megatron.launch.ssh_launcher"]
        )
        with open(error_file, "wb") as errors, open(output or os.devnull, "ab") as log:
            super().__init__(
                [*SSH, host.name, command], stdin=subprocess.PIPE, stdout=log if output else None, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        self._send(json.dumps(asdict(request)))

    def send_signal(self, sig: int) -> None:
        """Ask the host's ranks to save and exit (SIGTERM), or kill them and close the connection (SIGKILL)."""
        self._send("KILL" if sig == signal.SIGKILL else "TERM")
        if sig == signal.SIGKILL and self.stdin is not None:
            with suppress(OSError):
                self.stdin.close()

    def _send(self, line: str) -> None:
        assert self.stdin is not None
        with suppress(OSError, ValueError):  # the connection is closed; the error file gives the reason
            self.stdin.write(f"{line}\n".encode())
            self.stdin.flush()


def _read_report(host: Host, code: int, errors: str, log: Path) -> ErrorReport | str:
    """Return the host's error report, or a line about the ssh failure."""
    lines = [line for line in errors.splitlines() if line.strip()]
    for line in reversed(lines):
        with suppress(ValueError):
            return ErrorReport.parse(line)
    reason = f": {lines[-1]}" if lines else ""
    if code == 255:  # ssh's own code
        return f"{host.name} cannot be reached, or the connection was lost{reason}; try: ssh {host.name} true"
    return f"{host.name}: its processes died with exit code {code}{reason}; see {log}"


def main() -> int:
    """Run the host's end of the connection: read the request and run the ranks.

    Returns 0, 128 + n after signal n, or the exit code of an error.
    """
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
        raise RunError(f"{hostname}: {path}: {error.strerror}; all hosts must share the same folders") from error
    os.environ.update(request.environment)
    with tempfile.NamedTemporaryFile("w", prefix="farfield-", suffix=".yml", encoding="utf-8") as file:
        file.write(request.configuration)
        file.flush()
        config = read_config(file.name)
    rank_infos = [RankInfo(**rank_info) for rank_info in request.rank_infos]
    config = resolve_run(config, LocalHardware.detect(), rank_info=rank_infos[0]).config
    # Signals from the control channel reach the handlers of the rank group. Before these are installed, they end this
    # process, which has not started anything.
    threading.Thread(target=_read_control_channel, args=(sys.stdin.buffer,), daemon=True).start()
    return run_ranks(config, log, rank_infos, request.address, request.port)


def _read_control_channel(control_channel: BinaryIO) -> None:
    """Convert lines of the control channel to signals of this process, which forwards them to its ranks."""
    stop_requested = False
    for line in control_channel:
        if (word := line.strip()) == b"TERM" and not stop_requested:
            stop_requested = True
            os.kill(os.getpid(), signal.SIGTERM)
        elif word == b"KILL":
            # A second signal stops immediately. Two identical signals might be merged into one.
            for number in (signal.SIGINT,) if stop_requested else (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            return
    if not stop_requested:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    # os._exit: the thread may block on standard input, which the interpreter would wait for.
    code = main()
    sys.stdout.flush()
    os._exit(code)

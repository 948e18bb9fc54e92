"""Rank of this process in a run, read from the environment variables of its launcher.

torch, DeepSpeed and this project read torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. Variables of other launchers are translated into them.

`LAUNCHERS` lists the launchers, innermost first: torchrun may run inside a SLURM step or mpirun, and then its variables
count. A launcher that started a single process is ignored: such a process is a run of its own, and may start others.

SLURM sets SLURM_PROCID and SLURM_NTASKS in the batch script too. Only steps started by srun have SLURM_STEP_ID, and
only there do the other variables describe ranks.
"""

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.utils.errors import UserError

Environment = Mapping[str, str]
ADDRESS = "127.0.0.1"
PORTS = range(20000, 30000)
"""Ports for jobs without a configured port, below the system's ephemeral ports (Linux: from 32768)."""


def find_free_port() -> int:
    """Return a TCP port of this machine that is currently unused."""
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        return listener.getsockname()[1]


@dataclass(frozen=True)
class RankInfo:
    """Rank of one process of a run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Index among the processes of this machine, which is the index of its GPU."""
    local_world_size: int | None = None
    """Number of processes of the run on this machine, or None if all are."""

    @staticmethod
    def from_environment(environment: Environment = os.environ) -> "RankInfo":
        """Read the variables written by `to_environment`."""
        rank, world_size, local_rank, local_world_size = (
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        return RankInfo(rank, world_size, local_rank, None if local_world_size == world_size else local_world_size)

    @property
    def ranks_on_node(self) -> int:
        """Number of processes of the run on this machine."""
        return self.local_world_size or self.world_size

    def to_environment(self, address: str, port: int) -> dict[str, str]:
        """Return the environment variables of this rank and the rendezvous: host name or address, and port.

        On a single machine gloo uses the loopback interface, unless the user chose another: otherwise it looks up the
        machine's own name, which fails or leads to an unreachable address on machines without a DNS entry.
        """
        is_local = address == ADDRESS and "GLOO_SOCKET_IFNAME" not in os.environ
        return ({"GLOO_SOCKET_IFNAME": "lo"} if is_local else {}) | {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_on_node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


@dataclass(frozen=True)
class LauncherVariables:
    """A launcher, and the environment variables that it sets for each process."""

    name: str
    marker: str
    """Variable that is set only in processes of this launcher."""
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    """Variable with the number of processes per machine: a number, or SLURM's list such as `4(x2),3`."""
    title: str
    """Name of a job of this launcher in messages."""
    job: tuple[str, ...]
    """Variables that identify a start uniquely and are equal in all processes; a port is derived from them."""
    machine: str | None = None
    """Variable with the index of this machine in that list."""
    hosts: str | None = None
    """Variable with the names of the machines; the first process is on the first."""
    restarts: str | None = None
    """Variable with the number of restarts."""
    cores: str | None = None
    """Variable with the number of CPU cores per process."""


TORCHRUN = LauncherVariables(
    "torchrun", "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    title="torchrun", job=("TORCHELASTIC_RUN_ID",), restarts="TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
MPIRUN = LauncherVariables(
    "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", title="MPI job", job=("PMIX_NAMESPACE",),
)  # fmt: skip
SRUN = LauncherVariables(
    "srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
    title="SLURM job", job=("SLURM_JOB_ID", "SLURM_STEP_ID"), machine="SLURM_NODEID", hosts="SLURM_STEP_NODELIST",
    restarts="SLURM_RESTART_COUNT", cores="SLURM_CPUS_PER_TASK",
)  # fmt: skip
LAUNCHERS = (TORCHRUN, MPIRUN, SRUN)


@dataclass(frozen=True)
class LaunchContext:
    """Launch context of a process that was started as one of several."""

    rank_info: RankInfo
    address: str
    """Rendezvous address: the machine of the first process."""
    port: int | None
    """Rendezvous port from the environment, or None."""
    job_port: int
    """Port derived from the job number, used if none is configured."""
    cores: int | None
    """Number of CPU cores per process, if the launcher reports it."""

    def to_environment(self, configured_port: int | None = None) -> dict[str, str]:
        """Return torchrun's environment variables. `configured_port` is used if the environment has no port."""
        ports = (self.port, configured_port, self.job_port)
        return self.rank_info.to_environment(self.address, next(port for port in ports if port is not None))


def read_launcher_environment(environment: Environment = os.environ) -> LaunchContext | None:
    """Read the rank of this process from its launcher; None if there is none, or if it started a single process.

    Raises:
        UserError: variables are missing, not numbers, or contradict each other.
    """
    launchers = [
        (launcher, rank_info)
        for launcher in LAUNCHERS
        if (rank_info := _read_rank_info(launcher, environment)) is not None
    ]
    if not launchers:
        return None
    launcher, rank_info = launchers[0]
    _check_agreement(launcher, rank_info, launchers[1:], environment)
    if rank_info.world_size == 1:
        return None
    cores = _read_number(launcher.cores, environment) if launcher.cores and launcher.cores in environment else None
    return LaunchContext(
        rank_info,
        _find_address(launcher, rank_info, environment),
        _read_port(launcher, environment),
        _derive_port(launcher, environment),
        cores,
    )


def is_in_slurm_job(environment: Environment = os.environ) -> bool:
    """Return True if this process is part of a SLURM job, including its batch script."""
    return SRUN.job[0] in environment


def describe_job(environment: Environment = os.environ) -> str | None:
    """Describe the job of this process and its number of restarts in one line; None outside of a job.

    Also works for single processes started by a scheduler.
    """
    for launcher in LAUNCHERS:
        if (job_id := environment.get(launcher.job[0])) is not None:
            count = environment.get(launcher.restarts or "", "0")
            restarts = "" if count == "0" else f", restart {count} ({launcher.restarts})"
            # torchrun's run ID is "none" unless --rdzv-id is given.
            return f"{f'started by {launcher.name}' if job_id == 'none' else f'{launcher.title} {job_id}'}{restarts}"
    return None


def _read_rank_info(launcher: LauncherVariables, environment: Environment) -> RankInfo | None:
    if launcher.marker not in environment:
        return None
    required = (launcher.rank, launcher.world_size, launcher.local_rank)
    if missing := [name for name in required if name not in environment]:
        if launcher is TORCHRUN and environment.get(launcher.world_size, "1") == "1":
            return None  # stale variables: a single process needs no rank
        raise UserError(f"environment: {launcher.marker} is set, but {', '.join(missing)} is not; {_HINT}")
    rank, world_size, local_rank = (_read_number(name, environment) for name in required)
    local_world_size = _read_local_world_size(launcher, environment)
    for name, number, of, limit in (
        (launcher.rank, rank, launcher.world_size, world_size),
        (launcher.local_rank, local_rank, launcher.local_world_size, local_world_size or world_size),
        (launcher.local_world_size, (local_world_size or 1) - 1, launcher.world_size, world_size),
    ):
        if not 0 <= number < limit:
            raise UserError(f"environment: {name} is {environment[str(name)]}, but {of} is {environment[str(of)]}")
    return RankInfo(rank, world_size, local_rank, None if local_world_size == world_size else local_world_size)


_HINT = "start with ./deepy.py train, srun, mpirun or torchrun"


def _read_number(name: str, environment: Environment) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"environment: {name} is {environment[name]!r}; it must be an integer") from None


def _read_local_world_size(launcher: LauncherVariables, environment: Environment) -> int | None:
    """Return the number of processes on this machine, or None if unknown."""
    if launcher.local_world_size not in environment:
        return None
    if launcher.machine is None or launcher.machine not in environment:
        return _read_number(launcher.local_world_size, environment)
    machine, text = _read_number(launcher.machine, environment), environment[launcher.local_world_size]
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if machine >= len(counts):
        raise UserError(f"environment: {launcher.machine} is {machine}, but {launcher.local_world_size} is {text}")
    return counts[machine]


def _check_agreement(
    launcher: LauncherVariables,
    rank_info: RankInfo,
    others: list[tuple[LauncherVariables, RankInfo]],
    environment: Environment,
) -> None:
    """Raise UserError for exported variables that would make ranks wait for each other forever."""
    other_world_size = environment.get(TORCHRUN.world_size)
    if other_world_size is not None and other_world_size != str(rank_info.world_size):
        raise UserError(
            f"environment: WORLD_SIZE is {other_world_size}, but {launcher.name} started {rank_info.world_size} "
            f"processes ({launcher.world_size}); "
            "unset WORLD_SIZE"
        )
    # torchrun numbers its processes in order of arrival, and mpirun has one srun process per machine.
    exported = launcher is TORCHRUN and TORCHRUN.job[0] not in environment
    for other, other_rank in others[:1] if exported else ():
        if other_rank.world_size == rank_info.world_size and other_rank.rank != rank_info.rank:
            raise UserError(
                f"environment: {launcher.rank} is {rank_info.rank}, but {other.rank} is {other_rank.rank}; unset "
                f"{launcher.rank}, because "
                f"{other.name} sets the rank of this process"
            )


def _find_address(launcher: LauncherVariables, rank_info: RankInfo, environment: Environment) -> str:
    if (address := environment.get("MASTER_ADDR")) is not None:
        return address
    if launcher.hosts is not None and launcher.hosts in environment:
        return get_first_hostname(environment[launcher.hosts])
    if launcher is not TORCHRUN and rank_info.local_world_size is None:
        return ADDRESS
    hint = f"{launcher.name} -x MASTER_ADDR=NAME" if launcher is MPIRUN else _HINT
    raise UserError(f"environment: {launcher.rank} is set, but MASTER_ADDR (the first machine) is not; {hint}")


def _read_port(launcher: LauncherVariables, environment: Environment) -> int | None:
    if "MASTER_PORT" in environment:
        return _read_number("MASTER_PORT", environment)
    if launcher is TORCHRUN:
        raise UserError(f"environment: {launcher.rank} is set, but MASTER_PORT is not; {_HINT}")
    return None


def _derive_port(launcher: LauncherVariables, environment: Environment) -> int:
    job = ".".join(environment.get(name, "") for name in launcher.job)
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def get_first_hostname(hosts: str) -> str:
    """Return the first name of SLURM's compact form: gpu08 for `gpu[08-11,20],login`. Containers have no scontrol."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name.group() if name else hosts)

"""Which of a run's processes this one is, as whoever started it says in the environment.

torch, DeepSpeed and this project read torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. What other launchers set is turned into them.

`LAUNCHERS` is the table of launchers, the innermost first: torchrun may run inside a SLURM step, or mpirun, and then
says what counts. A launcher that started one process has said nothing: such a process is a run by itself, and may start
others.

SLURM sets SLURM_PROCID and SLURM_NTASKS in the batch script too. Only a step that srun started has SLURM_STEP_ID, and
only there are the other variables those of the ranks.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.utils.errors import UserError

Environment = Mapping[str, str]
ADDRESS = "127.0.0.1"
PORTS = range(20000, 30000)
"""Where jobs meet that were given no port: below those that the system gives to connections (Linux: from 32768)."""


@dataclass(frozen=True)
class RankInfo:
    """One process among all of a run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the processes of this machine: the GPU that is its own."""
    local_world_size: int | None = None
    """Processes of the run on this machine; None: all of them."""

    @staticmethod
    def from_environment(environment: Environment = os.environ) -> "RankInfo":
        """What `to_environment` wrote."""
        rank, world_size, local_rank, local_world_size = (
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        return RankInfo(rank, world_size, local_rank, None if local_world_size == world_size else local_world_size)

    @property
    def ranks_on_node(self) -> int:
        """Processes of the run on this machine."""
        return self.local_world_size or self.world_size

    def to_environment(self, address: str, port: int) -> dict[str, str]:
        """The environment that says this place, and where the processes meet: a host's name or number, and a port."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_on_node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


@dataclass(frozen=True)
class LauncherVariables:
    """A launcher, and the variables that it sets for each process it starts."""

    name: str
    marker: str
    """Set in its processes, and nowhere else."""
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    """How many of its processes are on this machine: a number, or SLURM's `4(x2),3`, one number for each machine."""
    title: str
    """What a person calls a job of it."""
    job: tuple[str, ...]
    """What names this start among all others, and is the same in all processes; a port follows from it."""
    machine: str | None = None
    """This machine's index in such a list."""
    hosts: str | None = None
    """The machines' names; the first process is on the first."""
    restarts: str | None = None
    """How often the job was started before."""
    cores: str | None = None
    """CPU cores of each process."""


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
    """A process that was started as one of several."""

    rank_info: RankInfo
    address: str
    """Where the processes meet: the first one's machine."""
    port: int | None
    """Where they meet there, as the environment says; None where it does not."""
    job_port: int
    """One that follows from the job's number, for where nobody says."""
    cores: int | None
    """CPU cores of each process, where the launcher says."""

    def to_environment(self, configured_port: int | None = None) -> dict[str, str]:
        """The environment, in torchrun's words. `configured_port` is where to meet if the environment does not say."""
        ports = (self.port, configured_port, self.job_port)
        return self.rank_info.to_environment(self.address, next(port for port in ports if port is not None))


def read_launcher_environment(environment: Environment = os.environ) -> LaunchContext | None:
    """Which process of a run this is, as a launcher says; None if there is no launcher, or it started one process.

    Raises:
        UserError: variables that are missing, are no numbers, or contradict each other.
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


def in_slurm_job(environment: Environment = os.environ) -> bool:
    """Is this process part of a SLURM job, its batch script included?"""
    return SRUN.job[0] in environment


def describe_job(environment: Environment = os.environ) -> str | None:
    """The job that this process belongs to, and how often it was started before, as one line; None outside of one.

    Also for what a scheduler started as a single process.
    """
    for launcher in LAUNCHERS:
        if (job_id := environment.get(launcher.job[0])) is not None:
            count = environment.get(launcher.restarts or "", "0")
            restarts = "" if count == "0" else f", restart {count} ({launcher.restarts})"
            # torchrun's number is the word none, unless --rdzv-id is given.
            return f"{f'started by {launcher.name}' if job_id == 'none' else f'{launcher.title} {job_id}'}{restarts}"
    return None


def _read_rank_info(launcher: LauncherVariables, environment: Environment) -> RankInfo | None:
    if launcher.marker not in environment:
        return None
    required = (launcher.rank, launcher.world_size, launcher.local_rank)
    if missing := [name for name in required if name not in environment]:
        if launcher is TORCHRUN and environment.get(launcher.world_size, "1") == "1":
            return None  # left by something else: one process needs no place
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
        raise UserError(f"environment: {name} is {environment[name]!r}; it must be a whole number") from None


def _read_local_world_size(launcher: LauncherVariables, environment: Environment) -> int | None:
    """Processes on this machine, or None where nobody says."""
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
    """Refuse what a batch script exported and would make ranks wait for each other for ever."""
    other_world_size = environment.get(TORCHRUN.world_size)
    if other_world_size is not None and other_world_size != str(rank_info.world_size):
        raise UserError(
            f"environment: WORLD_SIZE is {other_world_size}, but {launcher.name} started {rank_info.world_size} "
            f"processes ({launcher.world_size}); "
            "unset WORLD_SIZE"
        )
    # torchrun itself numbers its processes as they come, and mpirun has one process of srun's on each machine.
    exported = launcher is TORCHRUN and TORCHRUN.job[0] not in environment
    for other, other_rank in others[:1] if exported else ():
        if other_rank.world_size == rank_info.world_size and other_rank.rank != rank_info.rank:
            raise UserError(
                f"environment: {launcher.rank} is {rank_info.rank}, but {other.rank} is {other_rank.rank}; unset "
                f"{launcher.rank}: "
                f"{other.name} says which process this is"
            )


def _find_address(launcher: LauncherVariables, rank_info: RankInfo, environment: Environment) -> str:
    if (address := environment.get("MASTER_ADDR")) is not None:
        return address
    if launcher.hosts is not None and launcher.hosts in environment:
        return get_first_hostname(environment[launcher.hosts])
    if launcher is not TORCHRUN and rank_info.local_world_size is None:
        return ADDRESS
    hint = f"{launcher.name} -x MASTER_ADDR=NAME" if launcher is MPIRUN else _HINT
    raise UserError(f"environment: {launcher.rank} is set, but MASTER_ADDR is not: the first process's machine; {hint}")


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
    """The first name of SLURM's short form: `gpu[08-11,20],login` begins with gpu08. Containers have no scontrol."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name.group() if name else hosts)

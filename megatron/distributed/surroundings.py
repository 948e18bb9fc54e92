"""Which of a run's processes this one is, as whoever started it says in the environment.

`SOURCES` is the table of launchers, the innermost first: torchrun may run inside a SLURM step, or mpirun, and then says
what counts. A launcher that started one process has said nothing: such a process is a run by itself, and may start
others.

SLURM sets SLURM_PROCID and SLURM_NTASKS in the batch script too. Only a step that srun started has SLURM_STEP_ID, and
only there are the other variables those of the ranks.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.distributed.place import Place
from megatron.errors import UserError

Environment = Mapping[str, str]
ADDRESS = "127.0.0.1"
PORTS = range(20000, 30000)
"""Where jobs meet that were told no port: below those that the system gives to connections (Linux: from 32768)."""


@dataclass(frozen=True)
class Source:
    """A launcher, and the variables that it sets for each process it starts."""

    name: str
    mark: str
    """Set in its processes, and nowhere else."""
    rank: str
    world: str
    local_rank: str
    local_world: str
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


TORCHRUN = Source(
    "torchrun", "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    title="torchrun", job=("TORCHELASTIC_RUN_ID",), restarts="TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
MPIRUN = Source(
    "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", title="MPI job", job=("PMIX_NAMESPACE",),
)  # fmt: skip
SRUN = Source(
    "srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
    title="SLURM job", job=("SLURM_JOB_ID", "SLURM_STEP_ID"), machine="SLURM_NODEID", hosts="SLURM_STEP_NODELIST",
    restarts="SLURM_RESTART_COUNT", cores="SLURM_CPUS_PER_TASK",
)  # fmt: skip
SOURCES = (TORCHRUN, MPIRUN, SRUN)


@dataclass(frozen=True)
class Started:
    """A process that was started as one of several."""

    place: Place
    address: str
    port: int
    cores: int | None
    """CPU cores of each process, where the launcher was told."""

    def variables(self) -> dict[str, str]:
        """The environment, in torchrun's words."""
        return self.place.variables(self.address, self.port)


def told(environment: Environment = os.environ, *, port: int | None = None) -> Started | None:
    """What the launcher said; None if nobody did, or it started one process.

    Args:
        environment: of this process.
        port: where to meet, if the environment does not say; otherwise one that follows from the job's number.

    Raises:
        UserError: variables that are missing, are no numbers, or contradict each other.
    """
    said = [(source, place) for source in SOURCES if (place := _place(source, environment)) is not None]
    if not said:
        return None
    source, place = said[0]
    _agreed(source, place, said[1:], environment)
    if place.world == 1:
        return None
    cores = _number(source.cores, environment) if source.cores and source.cores in environment else None
    return Started(place, _address(source, place, environment), _port(source, environment, port), cores)


def in_slurm_job(environment: Environment = os.environ) -> bool:
    """Is this process part of a SLURM job, its batch script included?"""
    return SRUN.job[0] in environment


def job_line(environment: Environment = os.environ) -> str | None:
    """The job that this process belongs to, and how often it was started before, as one line; None outside of one.

    Also for what a scheduler started as a single process.
    """
    for source in SOURCES:
        if (number := environment.get(source.job[0])) is not None:
            count = environment.get(source.restarts or "", "0")
            again = "" if count == "0" else f", restart {count} ({source.restarts})"
            # torchrun's number is the word none, unless --rdzv-id is given.
            return f"{f'started by {source.name}' if number == 'none' else f'{source.title} {number}'}{again}"
    return None


def _place(source: Source, environment: Environment) -> Place | None:
    if source.mark not in environment:
        return None
    needed = (source.rank, source.world, source.local_rank)
    if missing := [name for name in needed if name not in environment]:
        if source is TORCHRUN and environment.get(source.world, "1") == "1":
            return None  # left by something else: one process needs no place
        raise UserError(f"environment: {source.mark} is set, but {', '.join(missing)} is not; {_HOW}")
    rank, world, local_rank = (_number(name, environment) for name in needed)
    here = _local_world(source, environment)
    for name, number, of, most in (
        (source.rank, rank, source.world, world),
        (source.local_rank, local_rank, source.local_world, here or world),
        (source.local_world, (here or 1) - 1, source.world, world),
    ):
        if not 0 <= number < most:
            raise UserError(f"environment: {name} is {environment[str(name)]}, but {of} is {environment[str(of)]}")
    return Place(rank, world, local_rank, None if here == world else here)


_HOW = "start with ./deepy.py train, srun, mpirun or torchrun"


def _number(name: str, environment: Environment) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"environment: {name} is {environment[name]!r}; it must be a whole number") from None


def _local_world(source: Source, environment: Environment) -> int | None:
    """Processes on this machine, or None where nobody says."""
    if source.local_world not in environment:
        return None
    if source.machine is None or source.machine not in environment:
        return _number(source.local_world, environment)
    machine, text = _number(source.machine, environment), environment[source.local_world]
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if machine >= len(counts):
        raise UserError(f"environment: {source.machine} is {machine}, but {source.local_world} is {text}")
    return counts[machine]


def _agreed(source: Source, place: Place, others: list[tuple[Source, Place]], environment: Environment) -> None:
    """Refuse what a batch script exported and would make ranks wait for each other for ever."""
    world = environment.get(TORCHRUN.world)
    if world is not None and world != str(place.world):
        raise UserError(
            f"environment: WORLD_SIZE is {world}, but {source.name} started {place.world} processes ({source.world}); "
            "unset WORLD_SIZE"
        )
    # torchrun itself numbers its processes as they come, and mpirun has one process of srun's on each machine.
    exported = source is TORCHRUN and TORCHRUN.job[0] not in environment
    for other, its in others[:1] if exported else ():
        if its.world == place.world and its.rank != place.rank:
            raise UserError(
                f"environment: {source.rank} is {place.rank}, but {other.rank} is {its.rank}; unset {source.rank}: "
                f"{other.name} says which process this is"
            )


def _address(source: Source, place: Place, environment: Environment) -> str:
    if (address := environment.get("MASTER_ADDR")) is not None:
        return address
    if source.hosts is not None and source.hosts in environment:
        return first_host(environment[source.hosts])
    if source is not TORCHRUN and place.local_world is None:
        return ADDRESS
    how = f"{source.name} -x MASTER_ADDR=NAME" if source is MPIRUN else _HOW
    raise UserError(f"environment: {source.rank} is set, but MASTER_ADDR is not: the first process's machine; {how}")


def _port(source: Source, environment: Environment, given: int | None) -> int:
    if "MASTER_PORT" in environment:
        return _number("MASTER_PORT", environment)
    if given is not None:
        return given
    if source is TORCHRUN:
        raise UserError(f"environment: {source.rank} is set, but MASTER_PORT is not; {_HOW}")
    job = ".".join(environment.get(name, "") for name in source.job)
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def first_host(hosts: str) -> str:
    """The first name of SLURM's short form: `gpu[08-11,20],login` begins with gpu08. Containers have no scontrol."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name.group() if name else hosts)

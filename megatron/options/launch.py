"""Keys that decide where the processes run."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megatron.options.section import ConfigSection, config_field

MAX_RANKS = 1024
"""Processes of a run: a mistyped number of them is told at once."""

MAX_CORES = 4096
"""CPU cores of a process: a mistyped number of them is told at once."""

Word = Annotated[str, Field(pattern=r"^[^\s'\"\\$`]+$")]
"""What stands in a line of a batch script as it is."""
TIME_LIMIT_PATTERN = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
"""SLURM's forms of a time: minutes, minutes:seconds, hours:minutes:seconds, days-hours(:minutes(:seconds))."""


class SlurmOptions(ConfigSection):
    """A SLURM job, for `launcher: slurm`; what is absent is the cluster's default."""

    partition: Word | None = config_field(None, "the partition, or several with commas", policy="machine")
    account: Word | None = config_field(None, "the account that pays", policy="machine")
    qos: Word | None = config_field(None, "the quality of service", policy="machine")
    time: str | None = config_field(
        None, "longest time of one start, as SLURM writes it: 24:00:00, 2-12; a requeued job gets it anew",
        pattern=f"^{TIME_LIMIT_PATTERN.pattern}$", policy="machine",
    )  # fmt: skip
    constraint: Word | None = config_field(None, "features that nodes must have", policy="machine")
    gpu_type: Word | None = config_field(None, "of the GPUs, where a cluster has several: a100", policy="machine")
    cpus_per_task: int | None = config_field(None, "CPU cores of each process", ge=1, le=MAX_CORES, policy="machine")
    mem: Word | None = config_field(None, "host memory of a node: 480G", policy="machine")
    exclusive: bool = config_field(False, "share nodes with nobody", policy="machine")
    requeue: bool = config_field(
        True, "begin again after a preemption, a time limit or a failed node", policy="machine"
    )
    signal_seconds: int = config_field(
        300, "seconds before the time limit at which ranks are told to save; a save must fit into them", ge=10,
        le=65535, policy="machine",
    )  # fmt: skip
    setup: list[str] = config_field(list, "lines of shell before the start: module load cuda", policy="machine")
    container: Word | None = config_field(
        None, "image to run in: a .sif file, or the runtime's name of one", policy="machine"
    )
    container_runtime: Literal["apptainer", "pyxis"] = config_field(
        "apptainer", "apptainer (or singularity's successor) in each task, or srun's own --container-image (pyxis)",
        policy="machine",
    )  # fmt: skip
    container_mounts: list[Word] = config_field(
        list, "folders to see in the container: /scratch, or FROM:TO", policy="machine"
    )
    python: Word | None = config_field(
        None, "interpreter on the nodes; the one that submits, and in a container python3, if absent", policy="machine"
    )
    options: list[Word] = config_field(
        list, "further options of sbatch, as they are: --mail-type=END", policy="machine"
    )

    def time_limit_seconds(self) -> int | None:
        """`time` in seconds; None where there is none."""
        if self.time is None or (match := TIME_LIMIT_PATTERN.fullmatch(self.time)) is None:
            return None
        parts = [int(part) for part in match["parts"].split(":")]
        if match["days"] is not None:  # hours first
            hours, minutes, seconds = (*parts, 0, 0)[:3]
        elif len(parts) == 3:
            hours, minutes, seconds = parts
        else:  # minutes first
            hours, (minutes, seconds) = 0, (*parts, 0)[:2]
        return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class LaunchOptions(ConfigSection):
    """Machines, processes and devices, and what the processes divide among them."""

    num_gpus: int | None = config_field(
        None,
        "processes on each machine; all GPUs, or on CPU as many as hold one model, if absent",
        ge=1,
        le=MAX_RANKS,
        policy="machine",
    )
    launcher: Literal["auto", "ssh", "slurm"] = config_field(
        "auto",
        "auto: as srun, mpirun or torchrun started it, else by ssh if the hostfile is there, else on this machine; "
        "ssh: on the machines of the hostfile; slurm: as a job",
        policy="machine",
    )
    hostfile: str | None = config_field(
        None, "machines to reach by ssh, a line NAME slots=8 for each", policy="machine"
    )
    nodes: int | None = config_field(
        None, "machines; 1, or as many as srun, mpirun or torchrun started processes on, if absent", ge=1,
        le=MAX_RANKS, policy="machine",
    )  # fmt: skip
    device: Literal["auto", "cpu", "cuda"] = config_field("auto", "auto is cuda where there is one", policy="machine")
    check_resources: bool = config_field(
        True,
        "refuse, before anything is built, what cannot fit the GPUs' memory, this machine's or the disk",
        policy="machine",
    )
    hang_timeout: float | None = config_field(
        1500.0,
        "seconds in which no rank hangs: one that shows no progress for so long ends the run, with the stacks of all "
        "ranks in the run's folder; null turns it off",
        ge=1,
        policy="machine",
    )
    master_port: int | None = config_field(
        None,
        "port where processes meet; if absent a free one, or of processes that srun started one that their job gives",
        ge=1,
        le=65535,
        policy="machine",
    )
    distributed_backend: Literal["auto", "nccl", "gloo"] = config_field(
        "auto", "nccl on GPUs, gloo on CPU", policy="machine"
    )
    model_parallel_size: int = config_field(
        1, "tensor parallelism: processes that divide each layer's heads and matrices", ge=1, le=MAX_RANKS,
        policy="machine",
    )  # fmt: skip
    context_parallel_size: int = config_field(
        1,
        "context parallelism: processes that divide the places of each sequence",
        ge=1,
        le=MAX_RANKS,
        policy="machine",
    )
    pipe_parallel_size: int = config_field(
        1, "pipeline parallelism: processes that divide the stack of layers; 0 means 1", ge=0, le=MAX_RANKS,
        policy="machine",
    )  # fmt: skip
    slurm: SlurmOptions = config_field(SlurmOptions, "the job of launcher slurm")


def find_launch_conflicts(launch: LaunchOptions) -> Iterator[tuple[str, str]]:
    """What contradicts itself: the key to blame, and a sentence."""
    slurm = launch.slurm
    if launch.launcher == "slurm" and launch.num_gpus is None:
        yield "launcher", "launcher slurm needs num_gpus: the processes, and GPUs, of each node"
    if launch.launcher == "ssh" and launch.hostfile is None:
        yield "launcher", "launcher ssh needs hostfile, a file with a line NAME slots=8 for each machine"
    limit = slurm.time_limit_seconds()
    if limit is not None and slurm.signal_seconds >= limit:
        yield (
            "slurm.signal_seconds",
            f"slurm.signal_seconds {slurm.signal_seconds} is not less than slurm.time {slurm.time} ({limit} s): the "
            "job would be told to save as soon as it starts",
        )
    if slurm.container_mounts and slurm.container is None:
        yield "slurm.container_mounts", "slurm.container_mounts needs slurm.container, the image to run in"

"""Keys that decide where the processes run."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from megatron.options.section import ConfigSection, config_field, require_pattern

MAX_RANKS = 1024
"""Largest number of processes in a run, so that a mistyped number is reported at once."""

GPUS_PER_NODE = 8
"""GPUs of a machine that is not this one and not described by a configuration."""

MAX_CORES = 4096
"""Largest number of CPU cores of a process, so that a mistyped number is reported at once."""

Word = Annotated[
    str,
    require_pattern(r"[^\s'\"\\$`]+", "it must be one word without quotes, backslashes, dollar signs or backticks"),
]
"""Word that needs no quoting in a batch script."""
TIME_LIMIT_PATTERN = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
"""SLURM's time formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours(:minutes(:seconds))."""
TimeLimit = Annotated[
    str, require_pattern(TIME_LIMIT_PATTERN.pattern, "it must be a time limit in SLURM's format: 90, 24:00:00 or 2-12")
]


class SlurmOptions(ConfigSection):
    """SLURM job, for `launcher: slurm`. Absent values are the cluster's defaults."""

    partition: Word | None = config_field(None, "partition, or several separated by commas", policy="machine")
    account: Word | None = config_field(None, "account to charge", policy="machine")
    qos: Word | None = config_field(None, "quality of service", policy="machine")
    time: TimeLimit | None = config_field(
        None, "time limit of one start in SLURM's format: 24:00:00, 2-12; it restarts when a job is requeued",
        policy="machine",
    )  # fmt: skip
    constraint: Word | None = config_field(None, "features that nodes must have", policy="machine")
    gpu_type: Word | None = config_field(None, "GPU type, if a cluster has several: a100", policy="machine")
    cpus_per_task: int | None = config_field(None, "CPU cores of each process", ge=1, le=MAX_CORES, policy="machine")
    mem: Word | None = config_field(None, "host memory per node: 480G", policy="machine")
    exclusive: bool = config_field(False, "allocate whole nodes", policy="machine")
    requeue: bool = config_field(
        True, "requeue the job after a preemption, a time limit or a failed node", policy="machine"
    )
    signal_seconds: int = config_field(
        300, "seconds before the time limit at which ranks are asked to save; must be enough for a save", ge=10,
        le=65535, policy="machine",
    )  # fmt: skip
    setup: list[str] = config_field(list, "shell commands before the start: module load cuda", policy="machine")
    container: Word | None = config_field(
        None, "container image: a .sif file, or an image name of the runtime", policy="machine"
    )
    container_runtime: Literal["apptainer", "pyxis"] = config_field(
        "apptainer", "apptainer (or singularity) in each task, or srun's --container-image (pyxis)",
        policy="machine",
    )  # fmt: skip
    container_mounts: list[Word] = config_field(
        list, "folders to mount in the container: /scratch, or FROM:TO", policy="machine"
    )
    python: Word | None = config_field(
        None,
        "Python interpreter on the nodes; if absent, the submitting one, or python3 in a container",
        policy="machine",
    )
    options: list[Word] = config_field(list, "additional options passed to sbatch: --mail-type=END", policy="machine")

    def get_time_limit_seconds(self) -> int | None:
        """Return `time` in seconds, or None if it is absent."""
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
    """Machines, processes and devices, and how processes share the work."""

    num_gpus: int | None = config_field(
        None,
        "processes per machine; if absent, all GPUs, or on CPU as many as one model replica needs",
        ge=1,
        le=MAX_RANKS,
        policy="machine",
    )
    launcher: Literal["auto", "ssh", "slurm"] = config_field(
        "auto",
        "auto: use the processes of srun, mpirun or torchrun, else ssh if hostfile is set, else this machine; "
        "ssh: the machines of the hostfile; slurm: submit a job",
        policy="machine",
    )
    hostfile: str | None = config_field(
        None, "file with a line NAME slots=8 for each machine to reach by ssh", policy="machine"
    )
    nodes: int | None = config_field(
        None, "number of machines; if absent, those of srun, mpirun or torchrun, else 1", ge=1,
        le=MAX_RANKS, policy="machine",
    )  # fmt: skip
    device: Literal["auto", "cpu", "cuda"] = config_field("auto", "auto: cuda if available, else cpu", policy="machine")
    check_resources: bool = config_field(
        True,
        "reject configurations that cannot fit into GPU memory, host memory or the disk, before building anything",
        policy="machine",
    )
    hang_timeout: float | None = config_field(
        1500.0,
        "seconds without progress of a rank after which the run ends, with the stacks of all ranks in the run's "
        "folder; null disables the check",
        ge=1,
        policy="machine",
    )
    master_port: int | None = config_field(
        None,
        "rendezvous port of the processes; if absent, a free port, or one derived from the SLURM job",
        ge=1,
        le=65535,
        policy="machine",
    )
    distributed_backend: Literal["auto", "nccl", "gloo"] = config_field(
        "auto", "nccl on GPUs, gloo on CPU", policy="machine"
    )
    model_parallel_size: int = config_field(
        1, "tensor parallelism: number of processes that shard each layer's heads and matrices", ge=1, le=MAX_RANKS,
        policy="machine",
    )  # fmt: skip
    context_parallel_size: int = config_field(
        1,
        "context parallelism: number of processes that shard the positions of each sequence",
        ge=1,
        le=MAX_RANKS,
        policy="machine",
    )
    pipe_parallel_size: int = config_field(
        1, "pipeline parallelism: number of stages that the layers are divided into; 0 means 1", ge=0, le=MAX_RANKS,
        policy="machine",
    )  # fmt: skip
    slurm: SlurmOptions = config_field(SlurmOptions, "job options for launcher slurm")

    @property
    def ranks_per_replica(self) -> int:
        """Number of processes per model replica and sequence; a run uses a multiple of it."""
        return self.model_parallel_size * self.context_parallel_size * max(1, self.pipe_parallel_size)

    @property
    def known_world_size(self) -> int | None:
        """Number of all processes if these keys alone determine it, or None."""
        if self.num_gpus is not None:
            return self.num_gpus * (self.nodes or 1)
        return self.ranks_per_replica if self.device == "cpu" and self.nodes in (None, 1) else None

    def choose_gpus(self, total: int | None, per_node: int | None) -> tuple[int, int]:
        """Return the number of GPUs of a job that need not be on this machine: in total, and per machine.

        Args:
            total: total number; if None, that of these keys, or one machine, or one model replica if that is larger.
            per_node: number per machine; if None, that of these keys, or `GPUS_PER_NODE`.
        """
        per_node = per_node or self.num_gpus or GPUS_PER_NODE
        if total is None:
            nodes = self.nodes or 1
            total = self.num_gpus * nodes if self.num_gpus else max(per_node * nodes, self.ranks_per_replica)
        return total, min(per_node, total)


def find_launch_conflicts(launch: LaunchOptions) -> Iterator[tuple[str, str]]:
    """Yield conflicting values: the key to blame, and a sentence."""
    slurm = launch.slurm
    if launch.launcher == "slurm" and launch.num_gpus is None:
        yield "launcher", "launcher slurm needs num_gpus, the number of processes and GPUs per node"
    if launch.launcher == "ssh" and launch.hostfile is None:
        yield "launcher", "launcher ssh needs hostfile, a file with a line NAME slots=8 for each machine"
    limit = slurm.get_time_limit_seconds()
    if limit is not None and slurm.signal_seconds >= limit:
        yield (
            "slurm.signal_seconds",
            f"slurm.signal_seconds {slurm.signal_seconds} is not less than slurm.time {slurm.time} ({limit} s): the "
            "job would be asked to save immediately",
        )
    if slurm.container_mounts and slurm.container is None:
        yield "slurm.container_mounts", "slurm.container_mounts needs slurm.container, the container image"

"""A sweep as a SLURM job array: one task, and one node, for each member."""

from collections.abc import Sequence
from pathlib import Path

from megatron.launch import slurm
from megatron.launch.dispatch import uses_slurm
from megatron.sweeps.spec import Sweep
from megatron.utils.errors import UserError


def build_array_job(
    sweep: Sweep, files: Sequence[str | Path], overrides: Sequence[str], search: Sequence[str | Path] | None
) -> slurm.SlurmJob | None:
    """The job array of all members; None if the sweep is to run in this process.

    Args:
        sweep: as it was read from `files`, `overrides` and `search`, which each task reads again.

    Raises:
        UserError: members that want different jobs, or more than a node each.
    """
    launches = [member.config.launch for member in sweep.members]
    if not uses_slurm(launches[0]):
        return None
    if any(launch != launches[0] for launch in launches):
        raise UserError("launcher slurm: all variants of a sweep need the same processes, devices and slurm keys")
    if launches[0].nodes not in (None, 1):
        raise UserError(
            f"nodes is {launches[0].nodes}, but each run of a sweep has one node; train large ones by train"
        )
    places = [word for folder in search or () for word in ("--conf-dir", str(folder))]
    return slurm.SlurmJob(
        name=sweep.output_folder.name,
        folder=sweep.output_folder,
        command=("sweep", *places, *map(str, files), *overrides, "--member=$SLURM_ARRAY_TASK_ID"),
        launch=launches[0],
        tasks=1,  # which starts the processes of its training
        nodes=1,
        array=format_array_indices(range(len(sweep.members))),
    )


def format_array_indices(numbers: Sequence[int]) -> str:
    """Rising numbers in SLURM's short form: 0-3,5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)

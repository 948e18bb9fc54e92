"""Choosing where a training runs: as a rank started by a launcher, on this machine, over ssh, or as a SLURM job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.load import LoadedConfig
from megatron.data.document_starts import describe_crossing_fraction, estimate_crossing_fraction
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import (
    LaunchContext,
    describe_job,
    is_in_slurm_job,
)
from megatron.launch import local_launcher, slurm, ssh_launcher
from megatron.options.launch import LaunchOptions
from megatron.training.check_start import CHECKED_ON_NODES, StartCheck, check_environment, check_start, describe_checks
from megatron.training.resolve_run import ResolvedRun, resolve_remote_run, resolve_run
from megatron.utils.atomic_io import check_writable
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.progress import WaitAnnouncer

if TYPE_CHECKING:
    from megatron.training.trainer import TrainingHooks

MAX_SILENCE = 6.0
"""Maximum time before a run starts without output, in seconds."""

PrintNotes = Callable[[Iterable[str]], object]


def uses_slurm(launch: LaunchOptions) -> bool:
    """Return True if work should be submitted to SLURM; False within a job, which does the work itself."""
    return launch.launcher == "slurm" and not is_in_slurm_job()


def uses_ssh(launch: LaunchOptions) -> bool:
    """Return True if a run should be started over ssh. As in DeepSpeed, a missing hostfile means this machine."""
    if launch.launcher == "ssh":
        return True
    return launch.launcher == "auto" and launch.hostfile is not None and Path(launch.hostfile).is_file()


def launch_training(
    loaded: LoadedConfig,
    launch_context: LaunchContext | None,
    print_notes: PrintNotes,
    *,
    dry_run: bool = False,
    hardware: LocalHardware | None = None,
    hooks: TrainingHooks | None = None,
) -> int:
    """Train according to a configuration, on the machines that it selects.

    Callers wrap loading and this function in `report_errors_once`.

    Args:
        loaded: configuration.
        launch_context: environment of the launcher that started this process, if any (`read_launcher_environment`).
        print_notes: prints notes.
        dry_run: only print the resolved configuration or the batch script.
        hardware: hardware of this machine; detected by default.
        hooks: hooks of a Python caller, if this process is a rank.

    Returns:
        0, or 128 + n if signal n ended the run early (after saving a checkpoint).
    """
    with loaded.layers.locate_errors():
        return _launch_training(loaded, launch_context, print_notes, dry_run=dry_run, hardware=hardware, hooks=hooks)


def _launch_training(
    loaded: LoadedConfig,
    launch_context: LaunchContext | None,
    print_notes: PrintNotes,
    *,
    dry_run: bool,
    hardware: LocalHardware | None,
    hooks: TrainingHooks | None,
) -> int:
    is_main = launch_context is None or launch_context.rank_info.rank == 0
    config, launch = loaded.config, loaded.config.launch
    if uses_slurm(launch):
        return _submit_to_slurm(loaded, print_notes, dry_run=dry_run)
    hosts, is_local = None, False
    if launch_context is None and uses_ssh(launch):
        hosts = ssh_launcher.read_hostfile(launch)
        resolved = resolve_remote_run(config, ssh_launcher.assign_ranks(hosts)[0][0])
    else:
        rank_info = None if launch_context is None else launch_context.rank_info
        hardware = hardware or LocalHardware.detect()
        resolved = resolve_run(config, hardware, rank_info=rank_info, dry_run=dry_run)
        is_local = resolved.config.launch.device == "cpu" or hardware.num_gpus > 0
    if dry_run:
        if is_main:
            # First, so that nothing is printed for an invalid run: the output may go to a file.
            check = _check_start(
                resolved,
                print_notes,
                needs_data=hosts is None,
                has_own_python=hosts is None,
                is_local=is_local,
                may_download=False,
            )
            settled, notes = resolved.config, resolved.notes
            if hosts is None and resolved.world_size is not None:
                settled = check.config
                notes = (*notes, *check.data_notes, *_describe_stages(check))
            print(settled.to_yaml(), end="")
            print_notes((*notes, *_describe_dry_run(loaded, resolved, check, is_local=is_local)))
        return 0
    if is_main:
        print_notes((*resolved.notes, *list_hostfile_notes(launch), *filter(None, [describe_job()])))
    if hosts is not None:
        check_environment(resolved.config, reads_data=False, has_own_python=False)
        return ssh_launcher.train_over_ssh(config, hosts)
    return local_launcher.train_on_this_machine(resolved, launch_context, hooks)


def list_hostfile_notes(launch: LaunchOptions) -> tuple[str, ...]:
    """Return notes about a hostfile that is not used."""
    if launch.hostfile is None or uses_ssh(launch):
        return ()
    reason = "no such file" if launch.launcher == "auto" else f"launcher is {launch.launcher}"
    return (f"hostfile {launch.hostfile} has no effect: {reason}",)


def suggest_rehearsal(resolved: ResolvedRun, arguments: str) -> tuple[str, ...]:
    """Return a note with the command that rehearses a run on GPUs, given its arguments of the command line."""
    if resolved.config.launch.device != "cuda":
        return ()
    gpus = "" if resolved.world_size is None else f" --gpus {resolved.world_size}"
    return (
        f"to check without a GPU whether the run starts, fits and resumes (docs/gpu.md): ./deepy.py rehearse "
        f"{arguments}{gpus}",
    )


def _submit_to_slurm(loaded: LoadedConfig, print_notes: PrintNotes, *, dry_run: bool) -> int:
    """Submit a run to SLURM, or print its batch script, after the checks that are possible here."""
    resolved = resolve_remote_run(loaded.config)
    launch = loaded.config.launch
    job = slurm.build_training_job(loaded.config)
    slurm.check_job_environment(launch)
    check = _check_start(
        resolved,
        print_notes,
        needs_data=not slurm.remaps_paths(launch),
        has_own_python=slurm.has_own_python(launch),
        is_local=False,
        may_download=not dry_run,
    )
    print_notes((*resolved.notes, *(_describe_dry_run(loaded, resolved, check, is_local=False) if dry_run else ())))
    if dry_run:
        check_writable("save", job.folder)
        print(slurm.render_batch_script(job), end="")
        return 0
    for line in slurm.describe_submission(job, slurm.submit_job(job)):
        print(line)
    print_notes(_describe_unchecked(resolved, check))
    return 0


def _check_start(
    resolved: ResolvedRun,
    print_notes: PrintNotes,
    *,
    needs_data: bool,
    has_own_python: bool,
    is_local: bool,
    may_download: bool,
) -> StartCheck:
    """Run the start checks (`check_start`), and print a note if they take long."""
    activity = describe_checks(resolved.config, reads_tasks=has_own_python)
    with WaitAnnouncer(lambda line: print_notes((line,)), activity, first=MAX_SILENCE):
        return check_start(
            resolved,
            needs_data=needs_data,
            has_own_python=has_own_python,
            is_local=is_local,
            may_download=may_download,
        )


def _describe_unchecked(resolved: ResolvedRun, check: StartCheck) -> tuple[str, ...]:
    """Return lines about checks that only the training machines can make."""
    lines = [f"the data must exist there; not found here: {check.missing_data}"] if check.missing_data else []
    for key in ("use_wandb", "use_trackio") if not check.has_own_python else ():
        if getattr(resolved.config.logging, key):
            lines.append(f"{key}: its package and login are checked only there")
    if resolved.config.logging.harness.tasks and (check.plan is None or not check.has_own_python):
        what = "requests" if check.has_own_python else "package, data and requests"
        lines.append(f"harness.tasks: their {what} are checked only there")
    return (f"not checked: {CHECKED_ON_NODES}", *lines)


def _describe_stages(check: StartCheck) -> tuple[str, ...]:
    """Return a line for each of a run's stages, if it has several."""
    stages = () if check.plan is None else check.plan.resume.stages
    return tuple(stage.describe(len(stages)) for stage in stages) if len(stages) > 1 else ()


def _describe_download(check: StartCheck) -> tuple[str, ...]:
    """Return a line about data of tasks that a dry run does not download."""
    if check.has_task_data:
        return ()
    return ("harness.tasks: training downloads the data that are not on this machine, and then checks the requests",)


def _describe_dry_run(
    loaded: LoadedConfig, resolved: ResolvedRun, check: StartCheck, *, is_local: bool
) -> tuple[str, ...]:
    """Return the additional notes of a dry run."""
    return (
        *loaded.layers.replacements,
        *_describe_start(check),
        *_describe_download(check),
        *_describe_groups(check),
        *(() if is_local else _describe_unchecked(resolved, check)),
        *suggest_rehearsal(resolved, loaded.arguments),
    )


def _describe_start(check: StartCheck) -> list[str]:
    """Return lines on the starting point of the run and the fraction of rows with several documents."""
    if (plan := check.plan) is None:
        return []
    lines = [*plan.resume.notes, *plan.notes]
    if plan.config.data.task is not None:
        return lines
    share = estimate_crossing_fraction(plan.slices.get("train", []), plan.config.model.seq_length)
    return [*lines, *describe_crossing_fraction(plan.config.position.attention_mask, share)]


def _describe_groups(check: StartCheck) -> tuple[str, ...]:
    """Return lines with the algorithm of each parameter group."""
    from megatron.training.optimizer import describe_parameter_groups  # importing torch takes seconds

    unknown = " (for the smallest vocabulary, because the real one is unknown here)" if check.plan is None else ""
    return (f"parameters{unknown}:", *describe_parameter_groups(check.config, check.model))


class ReportedExit(SystemExit):
    """Exit of a rank whose error another rank reports."""


@contextmanager
def report_errors_once(launch_context: LaunchContext | None) -> Iterator[None]:
    """Report an error that all ranks have only once, if a launcher started them and shows their output.

    User errors occur on all ranks; the first rank of each machine reports them. Errors while running are reported with
    their rank.
    """
    try:
        yield
    except FarfieldError as error:
        if launch_context is None or launch_context.rank_info.rank == 0:
            raise
        if not isinstance(error, UserError):
            raise type(error)(f"rank {launch_context.rank_info.rank}: {error}") from error
        if launch_context.rank_info.local_rank == 0:
            raise
        raise ReportedExit(error.exit_code) from error

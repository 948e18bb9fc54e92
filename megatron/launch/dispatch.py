"""Choosing where a training runs: as a rank started by a launcher, on this machine, over ssh, or as a SLURM job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.run_folder import describe_other_contents
from megatron.config.execution import ResolvedRun
from megatron.config.load import LoadedConfig
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import (
    LaunchContext,
    describe_job,
    is_in_slurm_job,
)
from megatron.launch import local_launcher, slurm, ssh_launcher
from megatron.options.launch import LaunchOptions
from megatron.training.check_start import (
    StartCheck,
    TrainingMachines,
    check_environment,
    check_start,
    describe_checks,
)
from megatron.training.resolve_run import resolve_remote_run, resolve_run
from megatron.utils.atomic_io import check_writable
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.progress import WaitAnnouncer

if TYPE_CHECKING:
    from megatron.training.trainer import TrainingHooks

MAX_SILENCE = 6.0
"""Maximum time before a run starts without output, in seconds."""

DEFAULT_HOSTFILES = ("/job/hostfile", "/mock_path")
"""Hostfiles of DeepSpeed and of GPT-NeoX's configurations, which mean this machine if they do not exist."""

PrintNotes = Callable[[Iterable[str]], object]


def uses_slurm(launch: LaunchOptions) -> bool:
    """Return True if work should be submitted to SLURM; False within a job, which does the work itself."""
    return launch.launcher == "slurm" and not is_in_slurm_job()


def uses_ssh(launch: LaunchOptions) -> bool:
    """Return True if a run should be started over ssh.

    Raises UserError if its hostfile is missing, unless it is one of `DEFAULT_HOSTFILES`.
    """
    if launch.launcher != "auto" or launch.hostfile is None:
        return launch.launcher == "ssh"
    if not (exists := Path(launch.hostfile).is_file()) and launch.hostfile not in DEFAULT_HOSTFILES:
        raise UserError(
            f"hostfile: no such file: {launch.hostfile}; to train on this machine only, set hostfile=null", "hostfile"
        )
    return exists


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
    config, launch = loaded.config, loaded.config.launch
    rank_info = None if launch_context is None else launch_context.rank_info
    is_main = rank_info is None or rank_info.rank == 0
    is_job = uses_slurm(launch)
    hosts = ssh_launcher.read_hostfile(launch) if not is_job and rank_info is None and uses_ssh(launch) else None

    # Loading has validated the configuration. Resolve it for the machines that train, check the start, and launch.
    if is_job or hosts is not None:
        resolved = resolve_remote_run(config, None if hosts is None else ssh_launcher.assign_ranks(hosts)[0][0])
        machines = TrainingMachines(is_local=False, shares_files=False, shares_python=False)
    else:
        hardware = hardware or LocalHardware.detect()
        resolved = resolve_run(config, hardware, rank_info=rank_info, dry_run=dry_run)
        machines = TrainingMachines(is_local=resolved.config.launch.device == "cpu" or hardware.num_gpus > 0)
    job = None
    if is_job:
        job, machines = slurm.build_training_job(config), slurm.check_job_environment(launch)

    if dry_run or job is not None:
        if not is_main:
            return 0
        with _announce_checks(describe_checks(resolved.config, machines), print_notes):
            check = check_start(resolved, machines, may_download=not dry_run)
        if dry_run:
            _print_dry_run(loaded, resolved, check, job, print_notes)
            return 0
        assert job is not None
        print_notes(resolved.notes)
        for line in slurm.describe_submission(job, slurm.submit_job(job)):
            print(line)
        print_notes(check.describe_unchecked())
        return 0

    if is_main:
        others = describe_other_contents(config.checkpoint.save)
        print_notes((*resolved.notes, *list_hostfile_notes(launch), *filter(None, [describe_job()]), *others))
    with _announce_checks("checking the run's files and names", print_notes if is_main else lambda notes: None):
        check_environment(resolved, machines)
    if hosts is not None:
        return ssh_launcher.train_over_ssh(config, hosts)
    return local_launcher.train_on_this_machine(resolved, launch_context, hooks)


def _announce_checks(activity: str, print_notes: PrintNotes) -> WaitAnnouncer:
    """Return an announcer that prints a note if checks take long."""
    return WaitAnnouncer(lambda line: print_notes((line,)), activity, first=MAX_SILENCE)


def _print_dry_run(
    loaded: LoadedConfig, resolved: ResolvedRun, check: StartCheck, job: slurm.SlurmJob | None, print_notes: PrintNotes
) -> None:
    """Print the batch script of a job or the resolved configuration, and notes about the start."""
    more = (
        *loaded.layers.replacements,
        *describe_other_contents(loaded.config.checkpoint.save),
        *check.describe_start(),
        *check.describe_parameter_groups(),
        *(() if check.machines.is_local else check.describe_unchecked()),
        *suggest_rehearsal(resolved, loaded.arguments),
    )
    if job is not None:
        print_notes((*resolved.notes, *more))
        check_writable("save", job.folder)
        print(slurm.render_batch_script(job), end="")
    elif check.machines.shares_files and resolved.open_config is None:
        print(check.config.to_yaml(), end="")
        print_notes((*resolved.notes, *check.data_notes, *check.describe_stages(), *more))
    else:
        print((resolved.open_config or resolved.config).to_yaml(), end="")
        print_notes((*resolved.notes, *more))


def list_hostfile_notes(launch: LaunchOptions) -> tuple[str, ...]:
    """Return notes about a hostfile that is not used."""
    if launch.hostfile is None or launch.launcher == "ssh":
        return ()
    if launch.launcher == "auto" and Path(launch.hostfile).is_file():
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

"""Where a training runs: as a rank that somebody started, on this machine, on others over ssh, or as a SLURM job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.load import LoadedConfig
from megatron.config.schema import Config
from megatron.config.stages import build_stages
from megatron.data.document_starts import describe_crossing_share, estimate_crossing_share
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import (
    LaunchContext,
    describe_job,
    in_slurm_job,
    read_launcher_environment,
)
from megatron.launch import local_launcher, slurm, ssh_launcher
from megatron.options.launch import LaunchOptions
from megatron.training.check_start import UNCHECKED_ELSEWHERE, StartCheck, check_start, check_surroundings
from megatron.training.resolve_run import ResolvedRun, resolve_remote_run, resolve_run
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.progress import WaitAnnouncer

if TYPE_CHECKING:
    from megatron.training.trainer import TrainingHooks

MAX_SILENCE = 6.0
"""Seconds without a line before a run starts."""

PrintNotes = Callable[[Iterable[str]], object]


def uses_slurm(launch: LaunchOptions) -> bool:
    """Is work to be handed to SLURM? Not by what is a job already: it does the work."""
    return launch.launcher == "slurm" and not in_slurm_job()


def uses_ssh(launch: LaunchOptions) -> bool:
    """Is a run to be started over ssh? As in DeepSpeed, a hostfile that does not exist means this machine."""
    if launch.launcher == "ssh":
        return True
    return launch.launcher == "auto" and launch.hostfile is not None and Path(launch.hostfile).is_file()


def launch_training(
    load_config: Callable[[bool], LoadedConfig],
    print_notes: PrintNotes,
    *,
    dry_run: bool = False,
    hardware: LocalHardware | None = None,
    hooks: TrainingHooks | None = None,
) -> int:
    """Train as a configuration says, wherever it says.

    Args:
        load_config: reads the configuration; True: without its notes, which another rank prints.
        print_notes: prints lines beside the results.
        dry_run: print the resolved configuration, or the batch script, and do nothing else.
        hardware: of this machine; what is found there if absent.
        hooks: of a caller from Python, for a process that is a rank itself.

    Returns:
        0, or 128 + n if signal n ended the run early (it saved a checkpoint first).
    """
    launch_context = read_launcher_environment()
    is_main = launch_context is None or launch_context.rank_info.rank == 0
    with report_errors_once(launch_context):
        loaded = load_config(not is_main)
        config, launch = loaded.config, loaded.config.launch
        if uses_slurm(launch):
            return _submit_to_slurm(loaded, print_notes, dry_run=dry_run)
        hosts, is_here = None, False
        if launch_context is None and uses_ssh(launch):
            hosts = ssh_launcher.read_hostfile(launch)
            resolved = resolve_remote_run(config, ssh_launcher.assign_ranks(hosts)[0][0])
        else:
            rank_info = None if launch_context is None else launch_context.rank_info
            hardware = hardware or LocalHardware.detect()
            resolved = resolve_run(config, hardware, rank_info=rank_info, dry_run=dry_run)
            is_here = resolved.config.launch.device == "cpu" or hardware.num_gpus > 0
        if dry_run:
            if is_main:
                # First, so that nothing is printed of what is refused: it may be meant for a file.
                with loaded.locate_errors():
                    check = _check_start(
                        resolved, print_notes, needs_data=hosts is None, has_own_python=hosts is None, is_here=is_here
                    )
                settled, notes = resolved.config, resolved.notes
                if hosts is None and resolved.world_size is not None:
                    settled = check.config
                    notes = (*notes, *check.data_notes, *_describe_stages(settled))
                print(settled.to_yaml(), end="")
                print_notes((*notes, *_describe_dry_run(loaded, resolved, check, is_here=is_here)))
            return 0
        if is_main:
            print_notes((*resolved.notes, *list_hostfile_notes(launch), *filter(None, [describe_job()])))
        with loaded.locate_errors():
            if hosts is not None:
                check_surroundings(resolved.config, reads_data=False, has_own_python=False)
                return ssh_launcher.train_over_ssh(config, hosts)
            return local_launcher.train_on_this_machine(resolved, launch_context, hooks)


def list_hostfile_notes(launch: LaunchOptions) -> tuple[str, ...]:
    """Notes about a hostfile that is not used."""
    if launch.hostfile is None or uses_ssh(launch):
        return ()
    reason = "no such file" if launch.launcher == "auto" else f"launcher is {launch.launcher}"
    return (f"hostfile {launch.hostfile} has no effect: {reason}",)


def suggest_rehearsal(resolved: ResolvedRun) -> tuple[str, ...]:
    """A line on what finds out more than a dry run, for a run on GPUs."""
    if resolved.config.launch.device != "cuda":
        return ()
    gpus = "" if resolved.world_size is None else f" --gpus {resolved.world_size}"
    return (f"whether it starts, fits and goes on, without a GPU: ./deepy.py rehearse CONFIG…{gpus} (docs/gpu.md)",)


def _submit_to_slurm(loaded: LoadedConfig, print_notes: PrintNotes, *, dry_run: bool) -> int:
    """Hand a run to SLURM, or print its batch script. What its ranks would refuse is refused here, as far as that can
    be known."""
    resolved = resolve_remote_run(loaded.config)
    launch = loaded.config.launch
    job = slurm.build_training_job(loaded.config)
    with loaded.locate_errors():
        slurm.check_job_environment(launch)
        check = _check_start(
            resolved,
            print_notes,
            needs_data=not slurm.moves_folders(launch),
            has_own_python=slurm.has_own_python(launch),
            is_here=False,
        )
    print_notes((*resolved.notes, *(_describe_dry_run(loaded, resolved, check, is_here=False) if dry_run else ())))
    if dry_run:
        print(slurm.render_batch_script(job), end="")
        return 0
    for line in slurm.describe_submission(job, slurm.submit_job(job)):
        print(line)
    print_notes(_describe_unchecked(resolved, check))
    return 0


def _check_start(
    resolved: ResolvedRun, print_notes: PrintNotes, *, needs_data: bool, has_own_python: bool, is_here: bool
) -> StartCheck:
    """Refuse what the run would refuse (`check_start`). Says so while it takes long."""
    activity = "checking the data and the checkpoint to start from"
    with WaitAnnouncer(lambda line: print_notes((line,)), activity, first=MAX_SILENCE):
        return check_start(resolved, needs_data=needs_data, has_own_python=has_own_python, is_here=is_here)


def _describe_unchecked(resolved: ResolvedRun, check: StartCheck) -> tuple[str, ...]:
    """Return lines on what only the machines that train can check."""
    lines = [f"the data are looked for there alone; here: {check.missing_data}"] if check.missing_data else []
    if resolved.config.logging.use_wandb and not check.has_own_python:
        lines.append("use_wandb: its package and login are looked for there alone")
    return (f"not checked: {UNCHECKED_ELSEWHERE}", *lines)


def _describe_stages(config: Config) -> tuple[str, ...]:
    """A line for each of a run's stages, if it has several."""
    stages = build_stages(config)
    return tuple(stage.describe(len(stages)) for stage in stages) if len(stages) > 1 else ()


def _describe_dry_run(
    loaded: LoadedConfig, resolved: ResolvedRun, check: StartCheck, *, is_here: bool
) -> tuple[str, ...]:
    """What a dry run says beside the notes of a run."""
    return (
        *loaded.layers.replacements,
        *_describe_start(check),
        *_describe_groups(check),
        *(() if is_here else _describe_unchecked(resolved, check)),
        *suggest_rehearsal(resolved),
    )


def _describe_start(check: StartCheck) -> list[str]:
    """Return lines on what the run starts from, and on how many of its rows hold several documents."""
    if (plan := check.plan) is None:
        return []
    lines = [*plan.resume.notes, *plan.notes]
    if plan.config.data.task is not None:
        return lines
    share = estimate_crossing_share(plan.slices.get("train", []), plan.config.model.seq_length)
    return [*lines, *describe_crossing_share(plan.config.position.attention_mask, share)]


def _describe_groups(check: StartCheck) -> tuple[str, ...]:
    """Return lines that name the algorithm of each group of parameters."""
    from megatron.training.optimizer import describe_parameter_groups  # torch takes seconds

    unknown = " (the vocabulary is not known here, so of the smallest)" if check.plan is None else ""
    return (f"parameters{unknown}:", *describe_parameter_groups(check.config, check.model))


class ReportedExit(SystemExit):
    """End of a rank whose error another rank reports."""


@contextmanager
def report_errors_once(launch_context: LaunchContext | None) -> Iterator[None]:
    """Let one rank alone report an error that all have, where somebody else started them and shows what all write.

    What the user wrote is wrong for all of them: the first of each machine reports it. What went wrong while running is
    reported with the rank.
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

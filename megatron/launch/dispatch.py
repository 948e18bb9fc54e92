"""Where a training runs: as a rank that somebody started, on this machine, on others over ssh, or as a SLURM job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.load import LoadedConfig
from megatron.config.schema import Config
from megatron.config.stages import build_stages, list_stage_configs
from megatron.data.document_starts import describe_crossing_share, estimate_crossing_share
from megatron.data.load_tokenizer import read_vocabulary
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import (
    LaunchContext,
    describe_job,
    in_slurm_job,
    read_launcher_environment,
)
from megatron.launch import local_launcher, slurm, ssh_launcher
from megatron.options.launch import LaunchOptions
from megatron.training.check_resources import check_disk
from megatron.training.resolve_data import resolve_data
from megatron.training.resolve_run import ResolvedRun, resolve_remote_run, resolve_run
from megatron.utils.errors import FarfieldError, UserError

if TYPE_CHECKING:
    from megatron.training.trainer import TrainingHooks

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
        hosts = None
        if launch_context is None and uses_ssh(launch):
            hosts = ssh_launcher.read_hostfile(launch)
            resolved = resolve_remote_run(config, ssh_launcher.assign_ranks(hosts)[0][0])
        else:
            rank_info = None if launch_context is None else launch_context.rank_info
            hardware = hardware or LocalHardware.detect()
            resolved = resolve_run(config, hardware, rank_info=rank_info, dry_run=dry_run)
        if dry_run:
            if is_main:
                # First, so that nothing is printed of what is refused: it may be meant for a file.
                _check_here(loaded, resolved, has_data=hosts is None)
                settled, notes = resolved.config, resolved.notes
                if hosts is None and resolved.world_size is not None:
                    settled, epochs = resolve_data(settled)
                    notes = (*notes, *epochs, *_describe_stages(settled))
                print(settled.to_yaml(), end="")
                print_notes((*notes, *_describe_dry_run(loaded, resolved)))
            return 0
        if is_main:
            print_notes((*resolved.notes, *list_hostfile_notes(launch), *filter(None, [describe_job()])))
        with loaded.locate_errors():
            if hosts is not None:
                check_disk(resolved.config)
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
    """Hand a run to SLURM, or print its batch script. What its ranks would refuse is refused here, as far as that
    can be known."""
    resolved = resolve_remote_run(loaded.config)
    job = slurm.build_training_job(loaded.config)
    _check_here(loaded, resolved)
    print_notes((*resolved.notes, *(_describe_dry_run(loaded, resolved) if dry_run else ())))
    if dry_run:
        print(slurm.render_batch_script(job), end="")
        return 0
    for line in slurm.describe_submission(job, slurm.submit_job(job)):
        print(line)
    return 0


def _describe_stages(config: Config) -> tuple[str, ...]:
    """A line for each of a run's stages, if it has several."""
    stages = build_stages(config)
    return tuple(stage.describe(len(stages)) for stage in stages) if len(stages) > 1 else ()


def _describe_dry_run(loaded: LoadedConfig, resolved: ResolvedRun) -> tuple[str, ...]:
    """What a dry run says beside the notes of a run."""
    return (
        *loaded.layers.replacements,
        *_describe_documents(loaded.config),
        *_describe_groups(loaded),
        *suggest_rehearsal(resolved),
    )


def _describe_documents(config: Config) -> list[str]:
    """How many rows hold several documents, if the data are here."""
    try:
        share = None if config.data.task else estimate_crossing_share(config.data, config.model.seq_length)
    except FarfieldError:
        return []
    return describe_crossing_share(config.position.attention_mask, share)


def _describe_groups(loaded: LoadedConfig) -> tuple[str, ...]:
    """Which algorithm steps each parameter. Where the data are elsewhere, the vocabulary is taken for the smallest."""
    from megatron.training.optimizer import describe_parameter_groups  # torch takes seconds

    try:
        vocab_size, title = read_vocabulary(loaded.config.data).size, "parameters:"
    except FarfieldError:
        vocab_size, title = 1, "parameters (the vocabulary is not known here, so of the smallest):"
    with loaded.locate_errors():
        return (title, *describe_parameter_groups(loaded.config, vocab_size))


def _check_here(loaded: LoadedConfig, resolved: ResolvedRun, *, has_data: bool = True) -> None:
    """Refuse what a run would refuse of its data, its folder, its disk and its method, without making anything.

    has_data: are the data read on this machine? Over ssh, each machine looks for its own.
    """
    with loaded.locate_errors():
        if has_data:
            local_launcher.check_data_files(loaded.config)
        local_launcher.check_run_folder(loaded.config)
        check_disk(resolved.config)
        from megatron.model.build import check_position_options  # torch takes seconds

        for config in (loaded.config, *list_stage_configs(loaded.config)):
            check_position_options(config.model, config.position)


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

"""Where a training runs: as a rank that somebody started, on this machine, on others over ssh, or as a SLURM job."""

from collections.abc import Callable, Iterable

from megatron.config.load import LoadedConfig
from megatron.distributed import launcher_environment
from megatron.distributed.hardware import LocalHardware
from megatron.launch import local_launcher, slurm, ssh_launcher
from megatron.training.resolve_run import ResolvedRun, resolve_remote_run, resolve_run


def launch_training(
    load_config: Callable[[bool], LoadedConfig],
    print_notes: Callable[[Iterable[str]], object],
    *,
    dry_run: bool = False,
) -> int:
    """Train as a configuration says, wherever it says.

    Args:
        load_config: reads the configuration; told whether another rank says what there is to say about it.
        print_notes: prints lines beside the results.
        dry_run: print the resolved configuration, or the batch script, and do nothing else.

    Returns:
        0, or 128 + n if signal n ended the run early (it saved a checkpoint first).
    """
    launch_context = launcher_environment.read_launcher_environment()
    is_main = launch_context is None or launch_context.rank_info.rank == 0
    with local_launcher.report_errors_once(launch_context):
        loaded = load_config(not is_main)
        launch = loaded.config.launch
        if launch_context is not None:
            launch_context = launcher_environment.read_launcher_environment(port=launch.master_port)
        if slurm.is_slurm_requested(launch):
            return _submit_to_slurm(loaded, print_notes, dry_run=dry_run)
        over_ssh = launch_context is None and ssh_launcher.uses_ssh(launch)
        if over_ssh:
            resolved = resolve_remote_run(
                loaded.config, ssh_launcher.assign_ranks(ssh_launcher.read_hostfile(launch))[0][0]
            )
        else:
            rank_info = None if launch_context is None else launch_context.rank_info
            resolved = resolve_run(loaded.config, LocalHardware.detect(), rank_info=rank_info, dry_run=dry_run)
        if dry_run:
            if is_main:
                _print_config(loaded, resolved, print_notes)
            return 0
        if is_main:
            print_notes(
                (
                    *resolved.notes,
                    *ssh_launcher.list_ssh_notes(launch),
                    *filter(None, [launcher_environment.describe_job()]),
                )
            )
        with loaded.locate_errors():
            return (
                ssh_launcher.train_over_ssh(loaded.config)
                if over_ssh
                else local_launcher.train_on_this_machine(resolved, launch_context)
            )


def _print_config(loaded: LoadedConfig, resolved: ResolvedRun, print_notes: Callable[[Iterable[str]], object]) -> None:
    """Print the configuration, and nothing of one that is refused: it may be meant for a file."""
    _check_position(loaded)
    print(resolved.config.to_yaml(), end="")
    print_notes(resolved.notes)


def _check_position(loaded: LoadedConfig) -> None:
    from megatron.model.build import check_position_options  # torch takes seconds

    with loaded.locate_errors():
        check_position_options(loaded.config.model, loaded.config.position)


def _submit_to_slurm(loaded: LoadedConfig, print_notes: Callable[[Iterable[str]], object], *, dry_run: bool) -> int:
    """Hand a run to SLURM, or print its batch script. What its ranks would refuse is refused here, as far as that
    can be known."""
    resolved = resolve_remote_run(loaded.config)
    job = slurm.build_training_job(loaded.config)
    slurm.check_submission(loaded.config)
    _check_position(loaded)
    with loaded.locate_errors():
        local_launcher.check_data_files(loaded.config)
        local_launcher.check_run_folder(loaded.config)
    print_notes(resolved.notes)
    if dry_run:
        print(slurm.render_batch_script(job), end="")
        return 0
    for line in slurm.describe_submission(job, slurm.submit_job(job)):
        print(line)
    return 0

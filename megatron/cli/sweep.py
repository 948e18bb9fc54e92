"""`./deepy.py sweep`."""

from typing import Annotated

import typer

from megatron.cli.arguments import Arguments, ConfigFolder, split_arguments


def sweep(
    arguments: Arguments,
    conf_dir: ConfigFolder = None,
    member: Annotated[
        int | None,
        typer.Option(
            min=0, help="Run only this member, counted from 0, without a report. Used by tasks of a job array."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With launcher=slurm: only print the batch script.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retrain members whose training diverged.")
    ] = False,
) -> None:
    """Train and evaluate every variant of a sweep file, and report the results side by side.

    [bold]Examples[/]

      ./deepy.py sweep quickstart

      ./deepy.py sweep mine.yml slurm_a100 num_gpus=1

    The second submits a job array with one task per run; after the tasks have ended, the same command writes the
    report.
    """
    from megatron.sweeps.run_sweep import run_sweep

    files, overrides = split_arguments(arguments)
    run_sweep(
        files, overrides, search=[conf_dir] if conf_dir else None, member=member, dry=dry_run, retry_failed=retry_failed
    )

"""`./deepy.py status` and `./deepy.py checkpoints`: status and checkpoints of runs on disk."""

from pathlib import Path
from typing import Annotated

import typer

from megatron.cli.arguments import AsJson
from megatron.cli.console import print_to_stderr


def checkpoints(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Verify the checksums of all files.")] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", min=1, help="Keep only this number of newest undamaged checkpoints and those of extra_save_iters."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run with step, size, losses and integrity, and delete old ones.

    The exit code is 1 if a checkpoint is damaged.

    [bold]Example[/]

      ./deepy.py checkpoints runs/a --keep 2
    """
    from megatron.launch.run_status import print_checkpoints, prune_and_report
    from megatron.utils.progress import WaitAnnouncer

    with WaitAnnouncer(print_to_stderr, f"reading the checkpoints of {run}"):
        if keep is not None:
            prune_and_report(run, keep, print)
        are_whole = print_checkpoints(run, verify=verify, as_json=as_json)
    if not are_whole:
        raise typer.Exit(1)


def status(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run folders or folders of runs.", show_default=False)
    ],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Update every 5 seconds until no run trains, or Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show the status of runs: step, loss, speed, time left, last checkpoint, and whether they are running.

    [bold]Examples[/]

      ./deepy.py status runs/a

      ./deepy.py status runs --follow
    """
    from megatron.launch.run_status import print_status

    return 0 if print_status(runs, as_json=as_json, follow=follow) else 1

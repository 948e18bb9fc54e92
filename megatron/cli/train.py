"""`./deepy.py train`."""

from typing import Annotated

import typer

from megatron.cli.arguments import Arguments, ConfigFolder, load_config_arguments
from megatron.cli.console import print_notes


def train(
    arguments: Arguments,
    conf_dir: ConfigFolder = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only print the resolved configuration or the batch script."),
    ] = False,
) -> int:
    """Train a model.

    Files are merged from left to right, then KEY=VALUE pairs; later values override earlier ones, and --dry-run lists
    replaced values. A file is a path, or a name with or without .yml that is searched in configs/ and its subfolders:
    [bold]model[/] (architectures with their paper's settings), [bold]position[/] (one overlay per method),
    [bold]cluster[/] (where it runs).

    [bold]Examples[/]

      ./deepy.py train 162M kerple_log local_setup save=runs/kerple

      ./deepy.py train 125M rotary cdape local_setup precision=bf16 optimizer.params.lr=3e-4

      ./deepy.py train my.yml num_gpus=2 device=cpu

      ./deepy.py train runs/kerple/config.yml load=runs/kerple train_iters=60000

      ./deepy.py train.py -d configs 125M.yml local_setup.yml

    The third uses two processes on a CPU, the fourth resumes and extends a run, and the last uses GPT-NeoX's syntax.

    All keys: ./deepy.py keys, or docs/configuration.md.
    """
    from megatron.launch.dispatch import launch_training as dispatch

    return dispatch(
        lambda silent: load_config_arguments(arguments, conf_dir, silent=silent), print_notes, dry_run=dry_run
    )

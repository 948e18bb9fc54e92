"""`./deepy.py analyze`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron.cli.arguments import with_options
from megatron.cli.console import open_clean_console
from megatron.options.commands import AnalysisOptions


@with_options(AnalysisOptions, exclude=("multiples",))
def analyze(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN…", help="Run folders or checkpoints.", show_default=False)
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar='"CONFIG… [KEY=VALUE …]"',
            help="Configuration to analyze without training, as for `train`; may be repeated.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Folder for the page and its data; RUN/analysis by default for one run.",
            show_default=False,
        ),
    ] = None,
    **options: Any,
) -> None:
    """Analyze what models attend to, from their biases and from trained models reading a text or their task.

    Writes one page with its data next to it: convergence of the bias series, theoretical and measured receptive fields,
    effective lengths, kernels, maps of scores and biases, and what each head of a score processor reads. Several runs
    are compared side by side. Configurations need no training for results that depend only on the bias.

    [bold]Examples[/]

      ./deepy.py analyze runs/cdape

      ./deepy.py analyze runs/kerple runs/cdape --lengths 1x,4x,16x -o results/analysis

      ./deepy.py analyze --config "162M alibi" --config "162M type1" --config "162M type2" -o results/biases

      ./deepy.py analyze runs/cdape --only score_maps --layers 0,3 --heads 0,1 --data book.txt
    """
    from megatron.config.validation_errors import parse_section

    request = parse_section(AnalysisOptions, options)
    with open_clean_console() as console:
        from megatron.analysis.run import analyze as run_analyses

        run_analyses(runs or (), request, configs=config or (), output=output, console=console)

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
        list[str] | None, typer.Argument(metavar="RUN…", help="Run folders, or single checkpoints.", show_default=False)
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar='"CONFIG… [KEY=VALUE …]"',
            help="A configuration to look at untrained, as `train` takes it; as often as you like.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="For the page and its data; RUN/analysis for one run.",
            show_default=False,
        ),
    ] = None,
    **options: Any,
) -> None:
    """Show what models attend to: from their biases alone, and from how trained ones read a text or their task.

    Writes one page with its data beside it: does the series of the bias converge, receptive fields by theory and by
    measurement, effective lengths, kernels, maps of scores and biases, and what each head of a score processor reads.
    Runs stand side by side. Configurations need no training for what follows from the bias alone.

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

"""`./deepy.py report`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron.cli.arguments import with_options
from megatron.options.commands import ReportOptions
from megatron.utils.errors import UserError

DEFAULT_PORT = 8800


@with_options(ReportOptions)
def report(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS…", help="results.json files, or folders that contain one.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Page to write, .html, .md or .tex.", show_default=False),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the report on this machine, updated while runs train, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            help=f"Port of --serve, {DEFAULT_PORT} by default; 0 selects a free port.",
            min=0,
            max=65535,
            show_default=False,
        ),
    ] = None,
    **options: Any,
) -> None:
    """Combine results: tables, which methods extrapolate, and which differences are significant.

    Nothing is measured: the command reads results of evaluations and sweeps, including those of other programs. Methods
    are compared over common seeds by paired t-tests with Holm's correction. Two models with one seed get an interval
    over blocks of the text instead, which does not support claims about methods.

    [bold]Examples[/]

      ./deepy.py report runs/quickstart --against kerple_log

      ./deepy.py report runs/a runs/b elsewhere/results.json -o all.html --delta 0.05

      ./deepy.py report runs/quickstart --serve
    """
    from megatron.config.validation_errors import parse_section
    from megatron.launch.console import PlainConsole
    from megatron.reports.combine import combine_results

    request = parse_section(ReportOptions, options)
    if serve:
        from megatron.launch.live_server import serve_report

        if output is not None:
            raise UserError("--serve and --output cannot be combined")
        console = PlainConsole(highlight=False)
        serve_report(
            results, DEFAULT_PORT if port is None else port, lambda line: console.print(line, soft_wrap=True), request
        )
        return
    if port is not None:
        raise UserError("--port requires --serve")
    combine_results(results, PlainConsole(highlight=False), output=output, **request.model_dump())

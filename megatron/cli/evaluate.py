"""Commands of trained models and results: `./deepy.py evaluate`, `analyze`, `generate` and `report`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron.cli.arguments import add_section_options, open_clean_console, print_to_stderr
from megatron.options.commands import AnalysisOptions, GenerationOptions, ReportOptions
from megatron.options.evaluation import EvaluationOptions, TaskOptions
from megatron.utils.errors import UserError


@add_section_options(TaskOptions)
@add_section_options(EvaluationOptions, set_by={"multiples": "lengths"})
def evaluate(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Run folders or checkpoints.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="Folder for results.json, .csv, .md and .png.", show_default=False
        ),
    ] = None,
    **options: Any,
) -> None:
    """Measure perplexity at lengths beyond training, or run lm-evaluation-harness tasks.

    The model is rebuilt from the configuration in its checkpoint. Every run and every length is scored on the same
    target tokens, so that results differ only in context. Prints a table and writes JSON, CSV, Markdown and a plot.

    [bold]Examples[/]

      ./deepy.py evaluate runs/kerple --lengths 512,1024,2048,4096

      ./deepy.py evaluate runs/rotary runs/kerple runs/cdape --lengths 1x,4x,16x -o results/books

      ./deepy.py evaluate runs/kerple/checkpoints/step_0010000 --protocol nonoverlapping

      ./deepy.py evaluate runs/kerple --data book.txt

      ./deepy.py evaluate runs/rotary --window 512 -o results/window

      ./deepy.py evaluate runs/kerple --tasks lambada_openai,piqa --lengths 1x,4x

    A run trained on a task (docs/tasks.md) is evaluated on that task: accuracy at several input lengths.

    With --tasks, a length is the maximum context in tokens; the training length is the default.

    Results of other runs, protocols and texts in the output folder are kept; repeated measurements are replaced.
    """
    with open_clean_console() as console:
        from megatron.config.schema import parse_section
        from megatron.evaluation.run import evaluate_runs

        task_options = {name: options.pop(name) for name in TaskOptions.model_fields}
        request = parse_section(EvaluationOptions, options)
        if task_options["tasks"] is None:
            if unused := [f"--{name.replace('_', '-')}" for name, value in task_options.items() if value is not None]:
                raise UserError(f"{unused[0]} requires --tasks")
            evaluate_runs(runs, request, output=output, console=console)
            return
        from megatron.evaluation.harness_tasks import evaluate_tasks

        evaluate_tasks(runs, parse_section(TaskOptions, task_options), request, output=output, console=console)


@add_section_options(AnalysisOptions, set_by={"multiples": "lengths"})
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
    from megatron.config.schema import parse_section

    request = parse_section(AnalysisOptions, options)
    with open_clean_console() as console:
        from megatron.evaluation.analysis.run import analyze as run_analyses

        run_analyses(runs or (), request, configs=config or (), output=output, console=console)


@add_section_options(GenerationOptions)
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or checkpoint.", show_default=False)],
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT…", help="Texts to continue, as --prompt.", show_default=False),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", help="Text to continue; may be repeated.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", help="File with text to continue; .jsonl files may contain several."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per prompt instead of text.")] = False,
    **options: Any,
) -> None:
    """Continue texts with a model.

    Without a prompt, the text on standard input is continued; on a terminal, lines are entered interactively. Generated
    text is streamed to standard output, and everything else goes to standard error.

    [bold]Examples[/]

      ./deepy.py generate runs/kerple "def main("

      ./deepy.py generate runs/kerple --prompt "def main(" --max-new-tokens 200 --temperature 0.8 --top-p 0.95

      ./deepy.py generate runs/kerple --temperature 0 < book.txt

      ./deepy.py generate runs/kerple --file prompts.jsonl --json --batch-size 16 --stop "###"

      ./deepy.py generate runs/kerple
    """
    from megatron.config.schema import parse_section
    from megatron.evaluation import generate_text as generation
    from megatron.utils.console import log_traceback, run_console, temporary_log
    from megatron.utils.progress import WaitAnnouncer

    generation_options = parse_section(GenerationOptions, {**options, "stop": options["stop"] or []})
    prompts = generation.collect_prompts([*(text or []), *(prompt or [])], file or [], sys.stdin)
    request = generation.read_generation_request(run, generation_options, prompts)
    with (
        os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors=sys.stderr.errors) as stderr,
        temporary_log() as log,
        run_console(log),
        log_traceback(log),
        WaitAnnouncer(lambda line: print(line, file=stderr, flush=True), f"loading {run}"),
    ):
        writer = generation.load_text_generator(request)
    if prompts:
        generation.print_completions(writer, prompts, sys.stdout, print_to_stderr, as_json=as_json)
    else:
        generation.run_interactive(writer, sys.stdout, print_to_stderr)


DEFAULT_PORT = 8800


@add_section_options(ReportOptions)
def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS…",
            help="results.json files, folders that contain one, or folders of saved records (sweep.records).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Page to write: .html, .htm, .md or .tex.", show_default=False
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", metavar="FILE", help="Figure for a paper, .pdf or .svg.", show_default=False),
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
    are compared over common seeds by t-tests with Holm's correction. Two models with one seed get an interval
    over blocks of the text instead, which does not support claims about methods.

    [bold]Examples[/]

      ./deepy.py report runs/quickstart --against kerple_log

      ./deepy.py report runs/a runs/b elsewhere/results.json -o all.html --max-change 0.05

      ./deepy.py report runs/quickstart -o tables.tex --figure curves.pdf --figure-width 3.25

      ./deepy.py report runs/quickstart --serve
    """
    from megatron.config.schema import parse_section
    from megatron.reports.combine import combine_results
    from megatron.utils.console import PlainConsole

    request = parse_section(ReportOptions, options)
    if serve:
        from megatron.launch.live_server import serve_report

        sizes = {"--figure-width": request.figure_width, "--figure-font": request.figure_font}
        for name, value in {"--output": output, "--figure": figure, **sizes}.items():
            if value is not None:
                raise UserError(f"--serve and {name} cannot be combined")
        console = PlainConsole(highlight=False)
        serve_report(
            results, DEFAULT_PORT if port is None else port, lambda line: console.print(line, soft_wrap=True), request
        )
        return
    if port is not None:
        raise UserError("--port requires --serve")
    combine_results(results, PlainConsole(highlight=False), output=output, figure=figure, **request.model_dump())

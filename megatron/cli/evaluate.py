"""`./deepy.py evaluate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron.cli.arguments import with_options
from megatron.cli.console import open_clean_console
from megatron.options.evaluation import EvaluationOptions, TaskOptions
from megatron.utils.errors import UserError


@with_options(TaskOptions)
@with_options(EvaluationOptions, exclude=("multiples",))
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
        from megatron.config.validation_errors import parse_section
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

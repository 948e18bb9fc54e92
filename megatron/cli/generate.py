"""`./deepy.py generate`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron.cli.arguments import with_options
from megatron.cli.console import print_to_stderr
from megatron.options.commands import GenerationOptions
from megatron.utils.errors import refuse_exits


@with_options(GenerationOptions)
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or checkpoint.", show_default=False)],
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

      ./deepy.py generate runs/kerple --prompt "def main(" --maximum-tokens 200 --temperature 0.8 --top-p 0.95

      ./deepy.py generate runs/kerple --temperature 0 < book.txt

      ./deepy.py generate runs/kerple --file prompts.jsonl --json --batch-size 16 --stop "###"

      ./deepy.py generate runs/kerple
    """
    from megatron.config.validation_errors import parse_section
    from megatron.evaluation import generate_text as generation
    from megatron.launch.console import log_traceback, run_console, temporary_log
    from megatron.utils.progress import WaitAnnouncer

    generation_options = parse_section(GenerationOptions, {**options, "stop": options["stop"] or []})
    prompts = generation.collect_prompts(prompt or [], file or [], sys.stdin)
    request = generation.read_generation_request(run, generation_options, prompts)
    with (
        os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors=sys.stderr.errors) as stderr,
        temporary_log() as log,
        run_console(log),
        log_traceback(log),
        WaitAnnouncer(lambda line: print(line, file=stderr, flush=True), f"loading {run}"),
    ):
        writer = generation.load_text_generator(request)
    with refuse_exits():
        if prompts:
            generation.print_completions(writer, prompts, sys.stdout, print_to_stderr, as_json=as_json)
        else:
            generation.run_interactive(writer, sys.stdout, print_to_stderr)

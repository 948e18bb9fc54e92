#!/usr/bin/env python3
"""Farfield's command line. `./deepy.py --help` lists its commands.

Everything heavy is imported inside the commands, so that help and errors come at once.
"""

# ruff: noqa: E402 (signals get their answer before anything is imported that takes a while)

from __future__ import annotations

from megatron.stopping.signals import leave_at_once

if __name__ == "__main__":
    leave_at_once()  # until `main` takes care of them

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

ROOT = Path(__file__).resolve().parent
GPT2_VOCABULARY = 50257

try:
    import typer
except ModuleNotFoundError:  # a bare python3: continue in the environment that `make` made
    own = ROOT / ".venv" / "bin" / "python"
    if own.exists() and Path(sys.prefix).resolve() != own.parent.parent.resolve():
        os.execv(own, [str(own), *sys.argv])
    sys.exit("error: Farfield's requirements are not installed; run: make setup, or pip install -r requirements.txt")

from typer.core import TyperGroup

from megatron.errors import FarfieldError, UserError
from megatron.options.analysis import AnalysisOptions
from megatron.options.data import CorpusOptions
from megatron.options.evaluation import EvaluationOptions, TaskOptions
from megatron.options.generation import GenerationOptions
from megatron.options.section import docstring
from megatron.stopping.command import run, untouched

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from rich.console import Console

    from megatron.config.load import Loaded
    from megatron.config.schema import Config
    from megatron.options.section import Section
    from megatron.training.preflight import Settled


class Commands(TyperGroup):
    """Commands with or without `.py`, GPT-NeoX's habit: `./deepy.py train.py …`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name.removesuffix(".py"))

    def invoke(self, ctx: Any) -> Any:
        with untouched():
            return super().invoke(ctx)


def paragraphs(text: str) -> str:
    """Help as rich should show it: paragraphs wrapped to the terminal, indented lines as they are."""
    blocks = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(block if block.startswith(" ") else " ".join(block.splitlines()) for block in blocks)


app = typer.Typer(
    cls=Commands,
    name="deepy.py",
    help="""Pretrain GPTs that extrapolate to lengths they were never trained on.

    From text to a table in three steps:

      ./deepy.py prepare python --output data/python

      ./deepy.py train 125M cdape_kerple_log local_setup save=runs/cdape

      ./deepy.py evaluate runs/cdape --lengths 1x,2x,4x,8x,16x

    Each command explains itself: ./deepy.py train --help""",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(page: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a command: the function's name, without the underscore that keeps it from being a word of Python, and its
    docstring as help, with the page that explains more."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        text = f"{paragraphs(docstring(function))}\n\nMore: {page}"
        return app.command(function.__name__.rstrip("_"), help=text)(function)

    return add


def _show_versions(wanted: bool) -> None:
    if not wanted:
        return
    from megatron.launch.versions import versions

    for name, version in versions().items():
        print(f"{name} {version}")
    raise typer.Exit


@app.callback()
def _before_any_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="What is installed here, and on what it would run.",
            callback=_show_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Options that belong to no command."""


def with_options(section: type[Section], leaving_out: Sequence[str] = ()) -> Callable[..., Any]:
    """Give a command that takes `**options` one for each key of a section, with its type, bounds, default and words."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True)
        kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        keys = {name: field for name, field in section.model_fields.items() if name not in leaving_out}
        parameters = [*kept, *(_option(name, field) for name, field in keys.items())]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {each.name: each.annotation for each in parameters}
        return function

    return add


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """A key of a section as an option of a command. Choices are left to the section, which has better words."""
    kinds = (field.annotation, *get_args(field.annotation))
    kind = next((each for each in (int, float) if each in kinds), str)
    least = next((each.ge for each in field.metadata if hasattr(each, "ge")), None)
    text = f"{(field.description or '')[:1].upper()}{(field.description or '')[1:]}."
    option = typer.Option(help=text, min=least, show_default=field.default is not None)
    taken: Any = kind if field.default is not None else kind | None
    annotation = Annotated[taken, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation)


Arguments = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG… [KEY=VALUE …]", help="Configuration files, then single keys.", show_default=False),
]
Folder = Annotated[
    Path | None,
    typer.Option("-d", "--conf-dir", metavar="FOLDER", help="Look names up here first.", show_default=False),
]


AddBos = Annotated[
    bool | None,
    typer.Option(
        "--add-bos/--no-add-bos",
        help="Put the tokenizer's token for the beginning of a text before each; as its file says if absent.",
        show_default=False,
    ),
]


@command("docs/training.md")
def train(
    arguments: Arguments,
    conf_dir: Folder = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved configuration, or the batch script, and do nothing else."),
    ] = False,
) -> int:
    """Train a model.

    Files are merged left to right, then KEY=VALUE pairs; later wins, and one line says what it replaced. A file is a
    path, or a name with or without .yml that is looked up in configs/ and its subfolders: [bold]model[/] (shapes with
    their paper's settings), [bold]position[/] (one overlay per method), [bold]cluster[/] (where it runs).

    [bold]Examples[/]

      ./deepy.py train 162M kerple_log local_setup save=runs/kerple

      ./deepy.py train 125M rotary cdape local_setup precision=bf16 optimizer.params.lr=3e-4

      ./deepy.py train my.yml num_gpus=2 device=cpu

      ./deepy.py train runs/kerple/config.yml load=runs/kerple train_iters=60000

      ./deepy.py train.py -d configs 125M.yml local_setup.yml

    The third uses two processes on a CPU, the fourth resumes a run and goes on, the last is GPT-NeoX's way to say it.

    All keys: ./deepy.py keys, or docs/configuration.md.
    """
    from megatron.distributed import surroundings
    from megatron.distributed.devices import Machine
    from megatron.launch import local, nodes, slurm
    from megatron.training.preflight import afar, preflight

    started = surroundings.told()
    first = started is None or started.place.rank == 0
    with local.told_once(started):
        loaded = _load(arguments, conf_dir, silent=not first)
        if started is not None:
            started = surroundings.told(port=loaded.config.launch.master_port)
        place = None if started is None else started.place
        if slurm.wanted(loaded.config.launch):
            return _submit(loaded, dry_run)
        over_ssh = started is None and nodes.wanted(loaded.config.launch)
        if over_ssh:
            settled = afar(loaded.config, nodes.places(nodes.read_hosts(loaded.config.launch))[0][0])
        else:
            settled = preflight(loaded.config, Machine.here(), place=place, dry=dry_run)
        if dry_run:
            if first:
                _show(loaded, settled)
            return 0
        if first:
            _note((*settled.notes, *nodes.notes(loaded.config.launch), *filter(None, [surroundings.job_line()])))
        with loaded.placing_errors():
            return nodes.train(loaded.config) if over_ssh else local.train(settled, started)


def _show(loaded: Loaded, settled: Settled) -> None:
    """Print the configuration, and nothing of one that is refused: it may be meant for a file."""
    _check_position(loaded)
    print(settled.config.text(), end="")
    _note(settled.notes)


def _check_position(loaded: Loaded) -> None:
    from megatron.model.build import check_position_options

    with loaded.placing_errors():
        check_position_options(loaded.config.model, loaded.config.position)


def _submit(loaded: Loaded, dry_run: bool) -> int:
    """Hand a run to SLURM, or print its batch script. What its ranks would refuse is refused here, as far as that
    can be known."""
    from megatron.launch import local, slurm
    from megatron.training.preflight import afar

    settled = afar(loaded.config)
    job = slurm.training(loaded.config)
    slurm.check_start(loaded.config)
    _check_position(loaded)
    with loaded.placing_errors():
        local.check_data(loaded.config)
        local.check_save(loaded.config)
    _note(settled.notes)
    if dry_run:
        print(slurm.script(job), end="")
        return 0
    for line in slurm.described(job, slurm.submit(job)):
        print(line)
    return 0


@command("docs/planning.md")
def plan(
    arguments: Arguments,
    conf_dir: Folder = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=8192, help="GPUs in all.")] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help="Which: a100-40gb, a100-80gb, h100, …")] = "a100-40gb",
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, max=1024, help="GPUs of one machine.")] = 8,
    network: Annotated[
        float,
        typer.Option("--network", min=0.001, help="GB/s of one node to the others; 25 is one 200 Gbit/s adapter."),
    ] = 25.0,
    mfu: Annotated[
        float, typer.Option("--mfu", min=0.001, max=1, help="Share of its peak that a GPU reaches while it computes.")
    ] = 0.45,
    gib: Annotated[
        float | None, typer.Option("--gib", min=0.1, help="Memory of one GPU, if not as sold.", show_default=False)
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            "--vocabulary", min=1, help="Tokens; the data's if they are here, else 50257.", show_default=False
        ),
    ] = None,
    most: Annotated[int, typer.Option("--layouts", min=1, help="Layouts to list.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Estimate memory and time on GPUs, and find the layouts that fit.

    Nothing is trained, and no GPU is needed: it is arithmetic, which docs/planning.md explains and compares with what
    was measured. Batch, length, steps and precision stay as configured; what varies is how the GPUs divide the work.

    [bold]Examples[/]

      ./deepy.py plan 2-7B cdape_kerple_log a100_8k --gpus 64 --gpu a100-40gb

      ./deepy.py plan 350M rotary a100_2k --gpus 8 --gpu a100-80gb --mfu 0.35 --json
    """
    from dataclasses import replace

    from megatron.distributed.gpus import named
    from megatron.planning.plan import make_plan as make_plan
    from megatron.planning.step_time import Cluster

    chosen = named(gpu)
    loaded = _load(arguments, conf_dir)
    cluster = Cluster(chosen if gib is None else replace(chosen, gib=gib), gpus, gpus_per_node, network, mfu)
    made = make_plan(loaded.config, _vocabulary(loaded.config, vocabulary), cluster)
    if as_json:
        import json

        print(json.dumps(made.to_dict(most), indent=2))
        return
    from megatron.launch.console import PlainConsole
    from megatron.planning.print_plan import print_plan

    print_plan(made, PlainConsole(highlight=False), most)


@command("docs/data.md")
@with_options(CorpusOptions, leaving_out=("sources", "split", "packages", "suffixes", "column", "add_bos"))
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="Files (.txt, .jsonl, .jsonl.gz or .zst, .parquet, .arrow), folders, [bold]python[/]: the standard "
            "library, or [bold]hf:NAME[/]: a dataset on Hugging Face's hub.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The corpus folder to make.")],
    split: Annotated[
        str,
        typer.Option(metavar="SHARES|none", help="Shares for train, valid and test; none: no division."),
    ] = "0.9,0.05,0.05",
    packages: Annotated[bool, typer.Option("--packages", help="With python: all installed packages too.")] = False,
    suffixes: Annotated[
        str | None,
        typer.Option(metavar=".EXT,…", help="Files to take from folders; all of the kinds above if absent."),
    ] = None,
    column: Annotated[
        str, typer.Option("--column", "--jsonl-key", help="Key of a line, or column of a table, that holds the text.")
    ] = "text",
    add_bos: AddBos = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a corpus that was made differently.")] = False,
    **options: Any,
) -> None:
    """Make a corpus: text in, Megatron's indexed datasets (.bin, .idx) and their tokenizer out.

    Documents are divided into train, valid and test as wholes. The datasets are readable by megatron-core, Megatron-LM
    and GPT-NeoX. Preparing the same thing again finds it there.

    [bold]Examples[/]

      ./deepy.py prepare python --output data/python

      ./deepy.py prepare pile.jsonl.zst -o data/pile --tokenizer HFTokenizer --vocab-file 20B_tokenizer.json --workers 8

      ./deepy.py prepare hf:allenai/c4:en -o data/c4 --tokens 2000000000 --tokenizer HFTokenizer --vocab-file 20B.json

      ./deepy.py prepare papers/ --suffixes .tex,.bib -o data/papers --tokenizer bpe --vocab-size 8192
    """
    from megatron.config.chosen import chosen
    from megatron.launch.prepare import prepare_corpus

    kinds = None if suffixes is None else [suffix.strip() for suffix in suffixes.split(",")]
    own = {"sources": sources, "split": _shares(split), "packages": packages, "suffixes": kinds, "column": column}
    prepare_corpus(chosen(CorpusOptions, {**options, **own, "add_bos": add_bos}), output, overwrite=overwrite)


def _say_aside(line: str) -> None:
    """A line that is no result: on standard error."""
    print(line, file=sys.stderr, flush=True)


@command("docs/export.md")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="The folder of a model, or a checkpoint.", show_default=False)
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder to make.", show_default=False)],
    config: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="GPT-NeoX's configuration files, if SOURCE has none.", show_default=False),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="bytes, HFTokenizer, GPT2BPETokenizer or SPMTokenizer; the one in SOURCE if absent.",
            show_default=False,
        ),
    ] = None,
    vocab_file: Annotated[
        Path | None, typer.Option(help="tokenizer.json, vocab.json or .model file.", show_default=False)
    ] = None,
    merge_file: Annotated[Path | None, typer.Option(help="merges.txt of GPT2BPETokenizer.", show_default=False)] = None,
    end_token: Annotated[
        str | None,
        typer.Option(help="The token that ends a document, if it has none of the usual names.", show_default=False),
    ] = None,
    add_bos: AddBos = None,
) -> None:
    """Make a run folder of a model from elsewhere.

    SOURCE is a folder as Hugging Face's libraries write it (GPT-NeoX and Pythia, GPT-2, OPT, Llama 2 and 3, SmolLM2,
    Qwen2), an export of this project, or a checkpoint of GPT-NeoX, KERPLE or DAPE. What it computes is computed here;
    what could not be is refused by name. The run is evaluated, generated from and finetuned like any other.

    [bold]Examples[/]

      ./deepy.py import pythia-160m runs/pythia

      ./deepy.py evaluate runs/pythia --data book.txt --lengths 1x,2x,4x

      ./deepy.py train runs/pythia/config.yml add_cdape load=runs/pythia save=runs/cdape seq_length=4096 …
    """
    from megatron.conversion.import_model import import_model
    from megatron.meter import AnnounceWait
    from megatron.quantities import count

    files = {"vocab_file": vocab_file, "merge_file": merge_file}
    with AnnounceWait(_say_aside, f"reading {source}"):
        made, notes = import_model(
            source, run, configs=config or (), tokenizer=tokenizer, **files, end_token=end_token, add_bos=add_bos
        )
    _note(notes)
    model = made.config.model
    print(
        f"{run}: {count(made.num_parameters)} parameters, {model.num_layers} layers of width {model.hidden_size}, "
        f"{made.config.position.pos_emb}, training length {model.seq_length:,}, tokenizer {made.tokenizer}"
    )


@command("docs/evaluation.md")
@with_options(TaskOptions, leaving_out=("tasks",))
@with_options(EvaluationOptions, leaving_out=("lengths", "multiples"))
def evaluate(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Run folders, or single checkpoints.", show_default=False)
    ],
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="128,256,… | 1x,2x,…",
            help="Context lengths, in tokens or training lengths; 1x to 32x if absent.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="For results.json, .csv and .png.", show_default=False),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASK,…", help="Tasks of lm-evaluation-harness instead of perplexity.", show_default=False
        ),
    ] = None,
    **options: Any,
) -> None:
    """Measure perplexity at lengths never trained on, or tasks of lm-evaluation-harness.

    The model is rebuilt from the configuration in its checkpoint. Every run and every length is scored on the same
    target tokens, so that the numbers differ in context alone. Prints a table; writes JSON, CSV and a picture.

    [bold]Examples[/]

      ./deepy.py evaluate runs/kerple --lengths 512,1024,2048,4096

      ./deepy.py evaluate runs/rotary runs/kerple runs/cdape --lengths 1x,4x,16x -o results/books

      ./deepy.py evaluate runs/kerple/checkpoints/step_0010000 --protocol nonoverlapping

      ./deepy.py evaluate runs/kerple --data book.txt

      ./deepy.py evaluate runs/rotary --window 512 -o results/window

      ./deepy.py evaluate runs/kerple --tasks lambada_openai,piqa --lengths 1x,4x

    A run that learned a task (docs/tasks.md) is asked that task: its accuracy at lengths of the input.

    With --tasks a length is the most tokens that the model sees at once; it is the training's if none is given.

    A folder keeps its results of other runs, protocols and texts; what is measured again is replaced.
    """
    from megatron.launch.console import explained, run_console, temporary_log
    from megatron.stopping.signals import acknowledged

    with temporary_log() as log, run_console(log) as console, explained(log), acknowledged(console.print, "stopping"):
        from megatron.config.chosen import chosen
        from megatron.evaluation.lengths import read_lengths
        from megatron.evaluation.run import evaluate_runs

        of_tasks = {name: options.pop(name) for name in TaskOptions.model_fields if name in options}
        of_text = {} if lengths is None else read_lengths(lengths)
        wanted = chosen(EvaluationOptions, {**options, **of_text})
        if tasks is None:
            if given := [f"--{name.replace('_', '-')}" for name, value in of_tasks.items() if value is not None]:
                raise UserError(f"{given[0]} is for tasks, and there is no --tasks")
            evaluate_runs(runs, wanted, output=output, console=console)
            return
        from megatron.evaluation.harness_tasks import evaluate_tasks

        named = [name.strip() for name in tasks.split(",") if name.strip()]
        asked = chosen(TaskOptions, {**of_tasks, "tasks": named})
        evaluate_tasks(runs, asked, wanted, output=output, console=console)


@command("docs/analysis.md")
@with_options(AnalysisOptions, leaving_out=("lengths", "multiples", "only", "layers", "heads"))
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
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="128,256,… | 1x,2x,…",
            help="Window lengths, in tokens or training lengths; 1x and 4x if absent.",
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
    only: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Analyses to make; all if absent.", show_default=False)
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="0,5,…", help="Layers whose maps are drawn; first, middle and last if absent.", show_default=False
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="0,3,…", help="Heads whose maps are drawn; the first and the last if absent.", show_default=False
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
    from megatron.config.chosen import chosen
    from megatron.evaluation.lengths import read_lengths
    from megatron.launch.console import explained, run_console, temporary_log
    from megatron.stopping.signals import acknowledged

    listed: dict[str, Any] = {} if lengths is None else dict(read_lengths(lengths))
    if only is not None:
        listed["only"] = [name.strip() for name in only.split(",") if name.strip()]
    for key, text in (("layers", layers), ("heads", heads)):
        if text is not None:
            listed[key] = _places(f"--{key}", text)
    asked = chosen(AnalysisOptions, {**options, **listed})
    with temporary_log() as log, run_console(log) as console, explained(log), acknowledged(console.print, "stopping"):
        from megatron.analysis.run import analyze as make

        make(runs or (), asked, configs=config or (), output=output, console=console)


@command("docs/export.md")
@with_options(GenerationOptions, leaving_out=("stop",))
def generate(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, or a single checkpoint.", show_default=False)
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", help="A text to go on with; as often as you like.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", help="A file whose text is gone on with; of .jsonl files, each text."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="A text that ends what is written; as often as you like.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each prompt instead of its text.")] = False,
    **options: Any,
) -> None:
    """Let a model go on with texts.

    Without a prompt, what standard input holds is gone on with; on a terminal, lines are typed one by one. What is
    written goes to standard output as it comes, and everything else to standard error.

    [bold]Examples[/]

      ./deepy.py generate runs/kerple --prompt "def main(" --maximum-tokens 200 --temperature 0.8 --top-p 0.95

      ./deepy.py generate runs/kerple --temperature 0 < book.txt

      ./deepy.py generate runs/kerple --file prompts.jsonl --json --batch-size 16 --stop "###"

      ./deepy.py generate runs/kerple
    """
    from megatron.config.chosen import chosen
    from megatron.generation import run as generation
    from megatron.launch.console import explained, run_console, temporary_log

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    asked = chosen(GenerationOptions, {**options, "stop": stop or []})
    prompts = generation.read_prompts(prompt or [], file or [], sys.stdin)
    request = generation.read_request(run, asked, prompts)
    with temporary_log() as log, run_console(log), explained(log):
        writer = generation.load(request)
    if prompts:
        generation.write_all(writer, prompts, sys.stdout, say, as_json=as_json)
    else:
        generation.talk(writer, sys.stdout, say)


@command("docs/positions.md")
def positions(
    name: Annotated[
        str, typer.Argument(help="Only methods one of whose names contains this text.", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array instead of a table.")] = False,
) -> None:
    """List position encodings and score processors: formula, parameters, options, traits, when to use it."""
    import json

    from megatron.config.method_names import find_methods

    found = find_methods(name)
    from megatron.position.registry import describe_methods

    records, errors = describe_methods(found)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps(records, indent=2))
        return
    from rich.markup import escape

    from megatron.launch.console import PlainConsole

    console = PlainConsole(highlight=False)
    for kind, key in (("encoding", "pos_emb"), ("processor", "score_processor")):
        of_kind = [record for record in records if record["kind"] == kind]
        if not of_kind:
            continue
        console.print(f"[bold underline]{kind}s[/] ({key})")
        for record in of_kind:
            console.print(f"\n[bold cyan]{record['name']}[/]  {escape(record['formula'])}")
            options = ", ".join(f"{name}: {_text(value)}" for name, value in record["options"].items())
            facts = {"parameters": record["parameters"], "options": options, "traits": ", ".join(record["traits"])}
            _print_facts(console, {**facts, "use": record["advice"], "source": record["source"]})
        console.print()


@command("docs/evaluation.md")
def sweep(
    arguments: Arguments,
    conf_dir: Folder = None,
    member: Annotated[
        int | None,
        typer.Option(min=0, help="Only this run, counted from 0; no report. A job array's tasks call this."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With launcher=slurm: print the batch script, and do nothing else.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Train members again whose training diverged.")
    ] = False,
) -> None:
    """Train every variant of a sweep file, evaluate each, and report them side by side.

    [bold]Examples[/]

      ./deepy.py sweep quickstart

      ./deepy.py sweep mine.yml slurm_a100 num_gpus=1

    The second submits a job array, a task for each run; once they have ended, the same command writes the report.
    """
    from megatron.sweeps.run import run

    files, overrides = _divide(arguments)
    run(
        files, overrides, search=[conf_dir] if conf_dir else None, member=member, dry=dry_run, retry_failed=retry_failed
    )


@command("docs/evaluation.md")
def report(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS…", help="results.json files, or folders that hold one.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="A page to write: report.html.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="Compare all others with this method.", show_default=False),
    ] = None,
    delta: Annotated[
        float, typer.Option(min=0.0, help="A perplexity that changes by less, as a share, extrapolates.")
    ] = 0.1,
    title: Annotated[str | None, typer.Option(help="Of the page.", show_default=False)] = None,
) -> None:
    """Put results together: tables, who extrapolates, and who is better than another beyond chance.

    Nothing is measured: what evaluations and sweeps left is read, and other programs' results as well. Over several
    seeds methods are compared by paired t-tests, over one by a paired bootstrap over blocks of the text.

    [bold]Examples[/]

      ./deepy.py report runs/quickstart --against kerple_log

      ./deepy.py report runs/a runs/b elsewhere/results.json -o all.html --delta 0.05
    """
    from megatron.launch.console import PlainConsole
    from megatron.reports.combine import combine_results

    combine_results(results, PlainConsole(highlight=False), output=output, against=against, delta=delta, title=title)


@command("docs/export.md")
def export(
    run: Annotated[str, typer.Argument(help="A run's folder, or one of its checkpoints.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.", show_default=False)],
    native: Annotated[
        bool, typer.Option("--native", help="As a model of transformers' own, where one computes the same.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 (exact), bfloat16 or float16.")] = "float32",
    shard: Annotated[str, typer.Option(help="The largest file of weights, which is also what memory holds.")] = "2GB",
    license: Annotated[
        str | None, typer.Option(help="Of the weights, for the model card: apache-2.0, …", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """Write a model for Hugging Face's transformers: weights, tokenizer, model card, and the code that computes it.

    The folder needs torch and transformers (4.57 or 5) and nothing of this project. Every encoding, processor and
    window exports; the code is the one that trained the model.

    [bold]Examples[/]

      ./deepy.py export runs/cdape exported/cdape

      ./deepy.py export runs/cdape/checkpoints/step_0010000 exported/cdape --dtype bfloat16 --license apache-2.0

      ./deepy.py export runs/rotary exported/rotary --native

    The last needs nothing but transformers, also in programs that know its models only.
    """
    from megatron.conversion.export_model import export_model as write

    write(run, folder, native=native, dtype=dtype, max_shard_size=shard, license=license, overwrite=overwrite)


@command("docs/training.md")
def checkpoints(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every byte with the checksums.")] = False,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=1, help="Delete all but so many, the newest that are whole; extra_save_iters stay."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array instead of a table.")] = False,
) -> None:
    """List the checkpoints of a run: step, size, losses, whole or not; and delete old ones.

    The exit code is 1 if one of them is not whole.

    [bold]Example[/]

      ./deepy.py checkpoints runs/a --keep 2
    """
    from megatron.launch import checkpoints as listing

    if keep is not None:
        listing.thin(run, keep, print)
    if not listing.show(run, verify=verify, as_json=as_json):
        raise typer.Exit(1)


@command("docs/training.md")
def status(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders of runs.", show_default=False)
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every five seconds, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array instead of a table.")] = False,
) -> None:
    """Show how far runs are: step, loss, speed, time left, last checkpoint, and whether they are alive.

    [bold]Examples[/]

      ./deepy.py status runs/a

      ./deepy.py status runs --watch
    """
    from megatron.launch import status as files

    files.show(runs, as_json=as_json, watch=watch)


@command("docs/configuration.md")
def keys(
    pattern: Annotated[
        str, typer.Argument(help="Only keys with this text in their name or meaning.", show_default=False)
    ] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/configuration.md.")] = False,
) -> None:
    """Explain the keys of configuration files: ours, and what GPT-NeoX's, KERPLE's and DAPE's mean here."""
    from megatron.config import reference

    if markdown:
        print(reference.markdown(), end="")
        return
    from rich.markup import escape

    found = reference.lookup(pattern)
    if not found:
        raise UserError(f"no key contains {pattern!r}; {reference.nearest(pattern)}".removesuffix("; "))
    from megatron.launch.console import PlainConsole

    console = PlainConsole(highlight=False)
    for i, (name, default, values, meaning) in enumerate(found):
        console.print("\n" * (i > 0) + f"[bold cyan]{escape(name)}[/]")
        _print_facts(console, {"default": default, "values": values, "meaning": meaning})


def _print_facts(console: Console, facts: dict[str, str]) -> None:
    """One indented paragraph per fact, named; facts without text are left out."""
    from rich.markup import escape
    from rich.padding import Padding

    for name, fact in facts.items():
        if fact:
            console.print(Padding(f"[dim]{name}[/] {escape(fact)}", (0, 0, 0, 4), expand=False))


def _text(value: Any) -> str:
    from megatron.config.settings import show

    return show(value)


def _divide(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Files and `key=value` pairs. A pair is what has an equals sign and names no file."""
    pairs = [text for text in arguments if "=" in text and not os.path.isfile(text)]
    return [text for text in arguments if text not in pairs], pairs


def _load(arguments: list[str], conf_dir: Path | None, *, silent: bool = False) -> Loaded:
    """Read the configuration and say what there is to say about it, unless another rank does."""
    from megatron.config.load import load

    files, overrides = _divide(arguments)
    loaded = load(files, overrides, search=[conf_dir] if conf_dir else None)
    _note(() if silent else loaded.notes)
    return loaded


def _vocabulary(config: Config, given: int | None) -> int:
    """Tokens of a configuration: as given, or of its data, or GPT-2's."""
    from megatron.data.vocabulary import vocabulary

    if given is not None:
        return given
    try:
        return vocabulary(config.data).size
    except FarfieldError:
        _note((f"the data's tokenizer is not here: {GPT2_VOCABULARY} tokens are assumed (--vocabulary)",))
        return GPT2_VOCABULARY


def _note(notes: tuple[str, ...]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _places(option: str, text: str) -> list[int]:
    """Numbers of layers or heads."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option} is {text!r}; write numbers such as 0,5") from error


def _shares(text: str) -> list[float] | None:
    if text == "none":
        return None
    try:
        train, valid, test = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--split is {text!r}; write three shares such as 0.9,0.05,0.05, or none") from error
    return [train, valid, test]


def main() -> int:
    """Run a command; every failure is a line on standard error and an exit code."""
    return run(app, "./deepy.py")


if __name__ == "__main__":
    sys.exit(main())

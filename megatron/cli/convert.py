"""Commands that convert: `./deepy.py prepare` text to a corpus, `import` and `export` models of other projects."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron.cli.arguments import add_section_options, print_notes, print_to_stderr
from megatron.options.commands import ExportOptions, ImportOptions
from megatron.options.data import SPLITS, CorpusOptions, DataOptions
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_quantity

if TYPE_CHECKING:
    from rich.console import Console

    from megatron.data.corpus_metadata import CorpusInfo


OutputArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FOLDER", help="Folder to create, unless --output gives it.", show_default=False),
]


def choose_output(usage: str, argument: Path | None, option: Path | None) -> Path:
    """Return the folder that a command creates, given as an argument or by --output.

    Raises:
        UserError: neither or both are given; the message has the command's usage.
    """
    if argument is not None and option is not None:
        raise UserError(f"the folder is given twice: {argument} and --output {option}; omit one")
    if (folder := option or argument) is None:
        raise UserError(f"missing folder to create: ./deepy.py {usage}")
    return folder


@add_section_options(ImportOptions)
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Model folder or checkpoint.", show_default=False)],
    run: OutputArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="RUN", help="Run folder to create.", show_default=False),
    ] = None,
    **options: Any,
) -> None:
    """Import a model from another project as a run folder.

    SOURCE is a Hugging Face model folder (GPT-NeoX and Pythia, GPT-2, OPT, Llama 2 and 3, Mistral, SmolLM2 and 3, Qwen2
    and Qwen3, OLMo 2 and 3, Gemma 1 to 3, Granite, Phi-3, Command R), an export of this project, or a checkpoint of
    GPT-NeoX, KERPLE or DAPE. The imported model computes the same results; unsupported features raise an error that
    names them. The run can be evaluated, finetuned and used for generation like any other.

    [bold]Examples[/]

      ./deepy.py import pythia-160m -o runs/pythia

      ./deepy.py evaluate runs/pythia --data book.txt --lengths 1x,2x,4x

      ./deepy.py train runs/pythia/config.yml add_cdape load=runs/pythia save=runs/cdape seq_length=4096 …
    """
    from megatron.config.schema import parse_section
    from megatron.utils.formatting import format_count
    from megatron.utils.progress import WaitAnnouncer

    run = choose_output("import SOURCE -o RUN", run, output)
    request = parse_section(ImportOptions, {**options, "config": options["config"] or []})
    with WaitAnnouncer(print_to_stderr, f"reading {source}"):
        from megatron.conversion.import_model import import_model  # importing torch takes seconds

        imported, notes = import_model(
            source,
            run,
            configs=request.config,
            tokenizer=request.tokenizer,
            vocab_file=request.vocab_file,
            merge_file=request.merge_file,
            end_token=request.end_token,
            add_bos=request.add_bos,
        )
    print_notes(notes)
    model, position = imported.config.model, imported.config.position
    others = [name for name in (*position.processors, *position.temperatures) if name != "none"]
    print(
        f"{run}: {format_count(imported.num_parameters)} parameters, "
        f"{format_quantity(model.num_layers, 'layer')} of width {model.hidden_size}, "
        f"{', '.join([*position.encodings, *others])}, training length {model.seq_length:,}, "
        f"tokenizer {imported.tokenizer}"
    )


@add_section_options(ExportOptions)
def export(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run folder or checkpoint; with --refresh, an export.", show_default=False),
    ],
    folder: OutputArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Folder to create.", show_default=False),
    ] = None,
    **options: Any,
) -> None:
    """Export a model for Hugging Face transformers: weights, tokenizer, model card, and modeling code.

    The folder needs only torch and transformers (4.57 or 5). All encodings, processors and windows can be exported; the
    code is the same that trained the model.

    [bold]Examples[/]

      ./deepy.py export runs/cdape -o exported/cdape

      ./deepy.py export runs/cdape/checkpoints/step_0010000 -o exported/cdape --dtype bfloat16 --license apache-2.0

      ./deepy.py export runs/rotary -o exported/rotary --native

      ./deepy.py export --refresh exported/cdape

    The third uses a native transformers class, for programs that support no others. The last updates the code of an
    older export, for example for a newer transformers version; results stay the same.
    """
    from megatron.config.schema import parse_section
    from megatron.utils.progress import WaitAnnouncer

    request = parse_section(ExportOptions, options)
    if request.refresh:
        from megatron.utils.atomic_io import check_writable

        check_refresh_options(request, output or folder)
        check_writable("RUN", Path(run), "its files are unchanged")
        with WaitAnnouncer(print_to_stderr, f"updating {run}"):
            from megatron.conversion.refresh_export import refresh_export

            refresh_export(run, overwrite=request.overwrite)
        return
    folder = choose_output("export RUN -o FOLDER", folder, output)
    from megatron.conversion.export_request import read_export_request

    export_request = read_export_request(
        run,
        folder,
        native=request.native,
        dtype=request.dtype,
        max_shard_size=request.shard,
        license=request.license,
        overwrite=request.overwrite,
    )
    with WaitAnnouncer(print_to_stderr, f"writing {folder}"):
        from megatron.conversion.export_model import write_export  # importing torch takes seconds

        write_export(export_request)


def check_refresh_options(request: ExportOptions, folder: Path | None) -> None:
    """Reject options that only apply to a new export if --refresh is given. Raises UserError."""
    if folder is not None:
        raise UserError(f"--refresh updates one export in place; omit {folder}")
    for name, value in request.model_dump().items():
        if name not in ("refresh", "overwrite") and value != ExportOptions.model_fields[name].default:
            raise UserError(f"{name} is {value}, which --refresh does not change; omit it")


@add_section_options(CorpusOptions)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="Files (.txt, .jsonl, .jsonl.gz or .zst, .parquet, .arrow), folders, datasets saved by Hugging Face's "
            "library, [bold]python[/] (the standard library), [bold]shakespeare[/] (1.1 MB of plays, "
            "identical on every machine), or [bold]hf:NAME[/] (a dataset on the Hugging Face Hub).",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Corpus folder to create.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a corpus made with other settings.")] = False,
    **options: Any,
) -> None:
    """Prepare a corpus: convert text to Megatron's indexed datasets (.bin, .idx) with their tokenizer.

    Train, valid and test splits contain whole documents. The datasets can be read by megatron-core, Megatron-LM and
    GPT-NeoX. If the same corpus already exists, it is verified and reused.

    [bold]Examples[/]

      ./deepy.py prepare shakespeare --output data/shakespeare

      ./deepy.py prepare python --output data/python

      ./deepy.py prepare pile.jsonl.zst -o data/pile --tokenizer HFTokenizer --vocab-file 20B_tokenizer.json --workers 8

      ./deepy.py prepare hf:allenai/c4:en -o data/c4 --tokens 2000000000 --tokenizer HFTokenizer --vocab-file 20B.json

      ./deepy.py prepare papers/ --suffixes .tex,.bib -o data/papers --tokenizer bpe --vocab-size 8192
    """
    from megatron.config.schema import parse_section
    from megatron.data.corpus.prepare import find_unfinished, prepare_corpus
    from megatron.utils.console import log_traceback, run_console, temporary_log
    from megatron.utils.progress import ProgressMeter, WorkItem
    from megatron.utils.signals import StoppedBySignal

    corpus_options = parse_section(CorpusOptions, {**options, "sources": sources})
    with temporary_log() as log, run_console(log) as console, log_traceback(log):
        job = WorkItem(f"corpus {output}", "prepare", 1.0)
        try:
            with ProgressMeter(console, [job]) as meter:
                corpus = prepare_corpus(
                    corpus_options,
                    output,
                    overwrite=overwrite,
                    progress=meter.report_stage,
                    log=lambda line: _print_note(console, line),
                )
        except (KeyboardInterrupt, StoppedBySignal):
            if find_unfinished(output):
                console.print("run the same command to resume", highlight=False)
            raise
        _print_summary(console, corpus)


ROW_LENGTHS = (512, 2048, 8192)
"""Row lengths for which the summary gives the fraction of rows with several documents."""


def _describe_rows(corpus: CorpusInfo) -> list[str]:
    """Return a line on the fraction of rows of the largest split with several documents, unless it rounds to 0%."""
    from megatron.data.document_starts import compute_crossing_fraction
    from megatron.data.indexed_dataset import open_indexed

    largest = max(corpus.splits, key=lambda split: corpus.splits[split].tokens)
    lengths = open_indexed(corpus.get_dataset_prefix(largest)).lengths
    shares = [(length, compute_crossing_fraction(lengths, length)) for length in ROW_LENGTHS]
    percentages = [(length, f"{share:.0%}") for length, share in shares if share is not None]
    parts = [f"{percentage} of {length:,}-token rows" for length, percentage in percentages if percentage != "0%"]
    if not parts:
        return []
    return [f"{', '.join(parts)} contain several documents; attention_mask=document separates them"]


def _print_note(console: Console, line: str) -> None:
    from rich.markup import escape

    console.print(escape(f"note: {line}"), highlight=False, soft_wrap=True)


def _format_list_item(path: Path) -> str:
    """Return a path as an item of a YAML list: in quotes if YAML would not read it as one string, as with commas."""
    from megatron.config.yaml_files import parse_scalar

    try:
        is_plain = parse_scalar(f"[{path}]", "path") == [str(path)]
    except UserError:
        is_plain = False
    return str(path) if is_plain else json.dumps(str(path), ensure_ascii=False)


def _print_summary(console: Console, corpus: CorpusInfo) -> None:
    from rich.markup import escape
    from rich.table import Table

    from megatron.utils.console import print_table

    table = Table(box=None, pad_edge=False)
    table.add_column("split")
    for heading in ("documents", "tokens", "bytes"):
        table.add_column(heading, justify="right")
    for split, size in corpus.splits.items():
        table.add_row(split, f"{size.documents:,}", f"{size.tokens:,}", f"{size.bytes:,}")
    state = "already exists" if corpus.reused else "prepared"
    headline = f"{corpus.folder} {state}: tokenizer {corpus.tokenizer}, {corpus.vocab_size:,} tokens"
    console.print(escape(headline), highlight=False, soft_wrap=True)
    print_table(console, table)
    for line in _describe_rows(corpus):
        console.print(line, highlight=False, soft_wrap=True)
    for note in corpus.notes:
        _print_note(console, note)
    keys = {"train": "train_data_paths", "valid": "valid_data_paths", "test": "test_data_paths"}
    paths = [
        f"{keys[split]}=[{_format_list_item(corpus.get_dataset_prefix(split))}]"
        for split in corpus.splits
        if split in keys
    ]
    if not paths:
        from megatron.data.blend import compute_sequence_range

        (split, size), *_ = corpus.splits.items()
        paths = [f"data_path={_format_list_item(corpus.get_dataset_prefix(split))}"]
        default = DataOptions.model_fields["split"].default
        ranges = (compute_sequence_range(default, part, size.documents) for part in SPLITS)
        if any(taken is None or taken[0] == taken[1] for taken in ranges):
            paths.append("split=1,0,0")  # too few documents for all splits
    console.print(escape(f"train on it with {' '.join(map(shlex.quote, paths))}"), highlight=False, soft_wrap=True)

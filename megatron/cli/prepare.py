"""`./deepy.py prepare`: run `megatron.data.corpus.prepare_corpus` with a progress bar and print a summary."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron.cli.arguments import add_section_options
from megatron.options.data import SPLITS, CorpusOptions, DataOptions

if TYPE_CHECKING:
    from rich.console import Console

    from megatron.data.corpus_metadata import CorpusInfo


@add_section_options(CorpusOptions)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="Files (.txt, .jsonl, .jsonl.gz or .zst, .parquet, .arrow), folders, datasets saved by Hugging Face's "
            "library, [bold]python[/]: the standard library, [bold]shakespeare[/]: 1.1 MB of plays, "
            "identical on every machine, or [bold]hf:NAME[/]: a dataset on the hub.",
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
    from megatron.launch.console import log_traceback, run_console, temporary_log
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


def _print_summary(console: Console, corpus: CorpusInfo) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("split")
    for heading in ("documents", "tokens", "bytes"):
        table.add_column(heading, justify="right")
    for split, size in corpus.splits.items():
        table.add_row(split, f"{size.documents:,}", f"{size.tokens:,}", f"{size.bytes:,}")
    state = "already exists" if corpus.reused else "prepared"
    headline = f"{corpus.folder} {state}: tokenizer {corpus.tokenizer}, {corpus.vocab_size:,} tokens"
    console.print(escape(headline), highlight=False, soft_wrap=True)
    console.print(table)
    for line in _describe_rows(corpus):
        console.print(line, highlight=False, soft_wrap=True)
    for note in corpus.notes:
        _print_note(console, note)
    keys = {"train": "train_data_paths", "valid": "valid_data_paths", "test": "test_data_paths"}
    paths = [f"{keys[split]}=[{corpus.get_dataset_prefix(split)}]" for split in corpus.splits if split in keys]
    if not paths:
        from megatron.data.blend import compute_sequence_range

        (split, size), *_ = corpus.splits.items()
        paths = [f"data_path={corpus.get_dataset_prefix(split)}"]
        default = DataOptions.model_fields["split"].default
        ranges = (compute_sequence_range(default, part, size.documents) for part in SPLITS)
        if any(taken is None or taken[0] == taken[1] for taken in ranges):
            paths.append("split=1,0,0")  # too few documents for all splits
    console.print(escape(f"train on it with {' '.join(map(shlex.quote, paths))}"), highlight=False, soft_wrap=True)

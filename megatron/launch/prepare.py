"""`./deepy.py prepare`: a progress bar in front of `megatron.data.corpus.prepare`, and a summary after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.launch.console import explained, run_console, temporary_log
from megatron.meter import Job, Meter
from megatron.stopping.signals import Stopped

if TYPE_CHECKING:
    from megatron.data.corpus_folder import Corpus
    from megatron.data.options import CorpusOptions


def prepare_corpus(options: CorpusOptions, output: Path, *, overwrite: bool) -> None:
    """Prepare a corpus with progress on the console."""
    from megatron.data.corpus import unfinished

    with temporary_log() as log, run_console(log) as console, explained(log):
        try:
            corpus = metered(console if console.is_terminal else None, options, output, overwrite=overwrite)
        except (KeyboardInterrupt, Stopped):
            if unfinished(output):
                console.print("the same command goes on where this was interrupted", highlight=False)
            raise
        _summary(console, corpus)


def metered(console: Console | None, options: CorpusOptions, output: str | Path, *, overwrite: bool = False) -> Corpus:
    """`megatron.data.corpus.prepare` behind a bar on a console; None shows nothing."""
    from megatron.data.corpus import prepare

    job = Job(f"corpus {output}", "prepare", 1.0)
    with Meter(console, [job]) as meter:
        meter.begin(job)

        def progress(stage: str, done: int, total: int) -> None:
            meter.update(done / max(total, 1), stage)

        return prepare(options, output, overwrite=overwrite, progress=progress)


def _summary(console: Console, corpus: Corpus) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("split")
    for heading in ("documents", "tokens", "bytes"):
        table.add_column(heading, justify="right")
    for split, size in corpus.splits.items():
        table.add_row(split, f"{size.documents:,}", f"{size.tokens:,}", f"{size.bytes:,}")
    state = "already there" if corpus.reused else "prepared"
    about = f"{corpus.folder} {state}: tokenizer {corpus.tokenizer}, {corpus.vocab_size:,} tokens"
    console.print(escape(about), highlight=False, soft_wrap=True)
    console.print(table)
    for note in corpus.notes:
        console.print(escape(f"note: {note}"), highlight=False, soft_wrap=True)
    keys = {"train": "train_data_paths", "valid": "valid_data_paths", "test": "test_data_paths"}
    paths = [f"{keys[split]}=[{corpus.prefix(split)}]" for split in corpus.splits if split in keys]
    if not paths:
        paths = [f"data_path={corpus.prefix(next(iter(corpus.splits)))}"]
    console.print(escape(f"train on it with {' '.join(paths)}"), highlight=False, soft_wrap=True)

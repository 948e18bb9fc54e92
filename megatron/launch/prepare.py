"""`./deepy.py prepare`: a progress bar in front of `megatron.data.corpus.prepare`, and a summary after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.launch.console import explained, run_console, temporary_log
from megatron.meter import Job, Meter


def prepare_corpus(sources: Sequence[str], output: Path, **choices: Any) -> None:
    """Prepare a corpus with progress on the console. `choices` are those of `megatron.data.corpus.prepare`."""
    with temporary_log() as log, run_console(log) as console, explained(log):
        from megatron.data.corpus import Corpus, prepare

        job = Job(f"corpus {output}", "prepare", 1.0)
        with Meter(console if console.is_terminal else None, [job]) as meter:
            meter.begin(job)
            corpus: Corpus = prepare(
                sources,
                output,
                progress=lambda stage, done, total: meter.update(done / max(total, 1), stage),
                **choices,
            )
        _summary(console, corpus)


def _summary(console: Console, corpus: Any) -> None:
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

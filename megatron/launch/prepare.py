"""`./deepy.py prepare`: a progress bar in front of `megatron.data.corpus.prepare`, and a summary after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from megatron.launch.console import explained, run_console, temporary_log


def prepare_corpus(sources: Sequence[str], output: Path, **choices: Any) -> None:
    """Prepare a corpus with progress on the console. `choices` are those of `megatron.data.corpus.prepare`."""
    with temporary_log() as log, run_console(log) as console, explained(log):
        from megatron.data.corpus import Corpus, prepare

        with _Bar(console) as bar:
            corpus: Corpus = prepare(sources, output, progress=bar.report, **choices)
        _summary(console, corpus)


class _Bar:
    """Shows the stages of the preparation, each with the bytes of text done; nothing where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._stage: str | None = None
        self._task = self._progress.add_task("scanning", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, stage: str, done: int, total: int) -> None:
        """So many bytes of this stage are done."""
        if stage != self._stage:
            self._progress.remove_task(self._task)
            self._task = self._progress.add_task(stage, total=total)
            self._stage = stage
        self._progress.update(self._task, completed=done, total=total)


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

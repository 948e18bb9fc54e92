"""`./deepy.py prepare`: a progress bar in front of `megatron.data.corpus.prepare`, and a summary after it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.launch.console import log_traceback, run_console, temporary_log
from megatron.options.data import SPLITS, CorpusOptions, DataOptions
from megatron.utils.progress import Meter, WorkItem
from megatron.utils.signals import StoppedBySignal

if TYPE_CHECKING:
    from megatron.data.corpus_folder import CorpusInfo


def prepare_corpus(options: CorpusOptions, output: Path, *, overwrite: bool) -> None:
    """Prepare a corpus with progress on the console."""
    from megatron.data.corpus import find_unfinished

    with temporary_log() as log, run_console(log) as console, log_traceback(log):
        try:
            is_shown = console if console.is_terminal else None
            corpus = prepare_with_meter(
                is_shown, options, output, overwrite=overwrite, say=lambda line: _print_note(console, line)
            )
        except (KeyboardInterrupt, StoppedBySignal):
            if find_unfinished(output):
                console.print("the same command goes on where this was interrupted", highlight=False)
            raise
        _build_summary_table(console, corpus)


def prepare_with_meter(
    console: Console | None,
    options: CorpusOptions,
    output: str | Path,
    *,
    overwrite: bool = False,
    say: Callable[[str], None] | None = None,
) -> CorpusInfo:
    """`megatron.data.corpus.prepare` behind a bar on a console; None shows nothing. `say` gets lines before the work;
    they go to the console if absent."""
    from megatron.data.corpus import prepare_corpus

    job = WorkItem(f"corpus {output}", "prepare", 1.0)
    with Meter(console, [job]) as meter:
        meter.begin(job)

        def progress(stage: str, done: int, total: int) -> None:
            meter.update(done / max(total, 1), stage)

        return prepare_corpus(options, output, overwrite=overwrite, progress=progress, log=say or meter.log)


def _print_note(console: Console, line: str) -> None:
    console.print(escape(f"note: {line}"), highlight=False, soft_wrap=True)


def _build_summary_table(console: Console, corpus: CorpusInfo) -> None:
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
        _print_note(console, note)
    keys = {"train": "train_data_paths", "valid": "valid_data_paths", "test": "test_data_paths"}
    paths = [f"{keys[split]}=[{corpus.prefix(split)}]" for split in corpus.splits if split in keys]
    if not paths:
        from megatron.data.parts import compute_sequence_range

        (whole, size), *_ = corpus.splits.items()
        paths = [f"data_path={corpus.prefix(whole)}"]
        default = DataOptions.model_fields["split"].default
        ranges = (compute_sequence_range(default, split, size.documents) for split in SPLITS)
        if any(num_taken is None or num_taken[0] == num_taken[1] for num_taken in ranges):
            paths.append("split=1,0,0")  # too few documents for a split of each kind
    console.print(escape(f"train on it with {' '.join(map(shlex.quote, paths))}"), highlight=False, soft_wrap=True)

"""`./deepy.py what-was-in`: the documents of training batches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron.cli.arguments import print_to_stderr
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_quantity

if TYPE_CHECKING:
    from megatron.training.batch_contents import BatchHistory, BatchRow, StepAttempt

SHOWN_TOKENS = 64
"""Number of token ids printed of a row of a task."""


def what_was_in(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    steps: Annotated[
        list[str], typer.Argument(metavar="STEP…", help="Steps, or ranges such as 118-121.", show_default=False)
    ],
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Show only this data-parallel rank, counted from 0.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Characters to show of each document.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead of text.")] = False,
) -> None:
    """Show the documents that training read at a step: the first question after a loss spike.

    The batch follows from the run's configuration, checkpoints and data. It shows, for every sequence, its rank and
    micro-batch, and for every document in it the dataset, index, position and text. Steps are counted from 1.

    [bold]Examples[/]

      ./deepy.py what-was-in runs/a 1200

      ./deepy.py what-was-in runs/a 1198-1201 --rank 3 --limit 80
    """
    from megatron.utils.progress import WaitAnnouncer

    wanted = parse_steps(steps)
    found: list[dict[str, Any]] = []
    with WaitAnnouncer(print_to_stderr, f"reading the data of {run}"):
        from megatron.training.batch_contents import BatchHistory

        history = BatchHistory(run)
        for step in wanted:
            for attempt in history.find_attempts(step):
                described = describe_attempt(history, attempt, rank, limit)
                if as_json:
                    found.append(described)
                else:
                    print("\n".join(format_attempt(described)), flush=True)
    if as_json:
        print(json.dumps(found, indent=2))


def parse_steps(texts: list[str]) -> list[int]:
    """Return the steps that numbers and ranges name, without repetitions. Raises UserError."""
    steps: dict[int, None] = {}
    for text in texts:
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
        if match is None:
            raise UserError(f"STEP {text!r}: expected a step or a range, for example 1200 or 1198-1201")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(f"STEP {text}: the range is empty; write {last}-{first}")
        if last - first >= 10_000:
            raise UserError(f"STEP {text}: a range has at most 10,000 steps")
        steps.update(dict.fromkeys(range(first, last + 1)))
    return list(steps)


def describe_attempt(history: BatchHistory, attempt: StepAttempt, rank: int | None, limit: int) -> dict[str, Any]:
    """Return a batch as plain values: its step, loss and rows with their documents. limit: characters of a text."""
    order = attempt.order
    if rank is not None and rank >= order.num_ranks:
        raise UserError(f"--rank {rank}: step {attempt.step} has data-parallel ranks 0 to {order.num_ranks - 1}")
    loss = None if attempt.is_rolled_back else history.find_loss(attempt.step)
    return {
        "step": attempt.step,
        "rolled_back": attempt.is_rolled_back,
        "note": attempt.note,
        "loss": None if loss is None else loss[0],
        "loss_steps": None if loss is None else list(loss[1:]),
        "data_ranks": order.num_ranks,
        "samples_before": attempt.samples,
        "rows": [_describe_row(attempt, row, limit) for row in order.read_rows(attempt.samples, rank)],
    }


def _describe_row(attempt: StepAttempt, row: BatchRow, limit: int) -> dict[str, Any]:
    from megatron.data.document_parts import list_document_parts

    order = attempt.order
    values: dict[str, Any] = {
        "rank": row.rank,
        "micro_batch": row.micro_batch,
        "row": row.row,
        "sample": row.sample,
        "tokens": len(row.tokens),
    }
    if order.config.data.task is not None:
        return values | {"task": order.config.data.task, "token_ids": row.tokens.tolist()}
    tokenizer = order.vocabulary.tokenizer
    assert tokenizer is not None
    assert order.datasets.train is not None
    documents = []
    for part in list_document_parts(order.datasets.train, row.sample, order.slices):
        text = tokenizer.decode(part.tokens.tolist())
        documents.append(
            {
                "corpus": str(part.corpus),
                "document": part.document,
                "document_tokens": part.document_tokens,
                "first_token": part.first_token,
                "column": part.column,
                "tokens": len(part.tokens),
                "text": text if len(text) <= limit else f"{text[:limit]}…",
            }
        )
    return values | {"documents": documents}


def escape_control_characters(text: str) -> str:
    r"""Return a text with every unprintable character as an escape such as \n, so that it cannot control a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def format_attempt(described: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that show a batch."""
    loss = "loss not recorded"
    if described["rolled_back"]:
        loss = "rolled back"
    elif described["loss_steps"] is not None:
        first, last = described["loss_steps"]
        value = "none" if described["loss"] is None else f"{described['loss']:.4f}"
        loss = f"loss {value}" + (f" (mean of steps {first}-{last})" if first < last else "")
    rows, ranks = described["rows"], format_quantity(described["data_ranks"], "data-parallel rank")
    yield f"step {described['step']}: {loss}; {format_quantity(len(rows), 'sequence')}, {ranks}"
    if described["note"]:
        yield f"  note: {described['note']}"
    for row in rows:
        yield (
            f"  rank {row['rank']}, micro-batch {row['micro_batch']}, row {row['row']}: sample {row['sample']}, "
            f"{row['tokens']} tokens"
        )
        if "task" in row:
            more = " …" if len(row["token_ids"]) > SHOWN_TOKENS else ""
            yield f"    {row['task']}: {' '.join(map(str, row['token_ids'][:SHOWN_TOKENS]))}{more}"
        for part in row.get("documents", ()):
            columns = f"{part['column']}-{part['column'] + part['tokens'] - 1}"
            tokens = f"{part['first_token']}-{part['first_token'] + part['tokens'] - 1}"
            yield (
                f"    columns {columns}: {part['corpus']}, document {part['document']}, tokens {tokens} of "
                f"{part['document_tokens']}"
            )
            if part["text"]:
                yield f"      {escape_control_characters(part['text'])}"

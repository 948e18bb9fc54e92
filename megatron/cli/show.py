"""Commands that show: `./deepy.py keys`, `positions` and `tasks`; `status`, `checkpoints` and `show-batch` of runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron.cli.arguments import AsJson, print_facts, print_to_stderr
from megatron.utils.errors import UserError, escape_control_characters
from megatron.utils.formatting import format_quantity

if TYPE_CHECKING:
    from megatron.training.batch_contents import BatchHistory, BatchRow, StepAttempt


def keys(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="TEXT", help="Show only keys with this text in their name or description.", show_default=False
        ),
    ] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/configuration.md.")] = False,
) -> None:
    """Explain the keys of configuration files, including those of GPT-NeoX, KERPLE and DAPE."""
    from megatron.config import reference

    if markdown:
        print(reference.build_reference(), end="")
        return
    from rich.markup import escape

    matches = reference.find_keys(pattern)
    if not matches:
        hint = reference.find_nearest_key(pattern) or "`./deepy.py keys` lists all"
        raise UserError(f"no key contains {pattern!r}; {hint}")
    from megatron.utils.console import PlainConsole

    console = PlainConsole(highlight=False)
    for i, (name, default, values, meaning) in enumerate(matches):
        console.print("\n" * (i > 0) + f"[bold cyan]{escape(name)}[/]")
        print_facts(console, {"default": default, "values": values, "meaning": meaning})


def positions(
    name: Annotated[
        str,
        typer.Argument(
            metavar="TEXT", help="Show only methods with this text in one of their names.", show_default=False
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List encodings, score processors and temperatures: formula, parameters, options, traits, and use."""
    import json

    from megatron.config.method_names import find_methods

    names = find_methods(name)
    from megatron.position.registry import describe_methods

    records, errors = describe_methods(names)
    for error in errors:
        print_to_stderr(f"error: {error}")
    if as_json:
        print(json.dumps(records, indent=2))
    else:
        _print_methods(records, shows_compositions=not name)
    if errors:
        raise typer.Exit(2)


def _print_methods(records: list[dict[str, Any]], *, shows_compositions: bool) -> None:
    from rich.markup import escape

    from megatron.config.method_names import describe_compositions
    from megatron.config.yaml_files import format_value
    from megatron.utils.console import PlainConsole

    console = PlainConsole(highlight=False)
    kinds = {"encoding": "pos_emb", "processor": "score_processor", "temperature": "attention_temperature"}
    for kind, key in kinds.items():
        kind_records = [record for record in records if record["kind"] == kind]
        if not kind_records:
            continue
        console.print(f"[bold underline]{kind}s[/] ({key})")
        for record in kind_records:
            console.print(f"\n[bold cyan]{record['name']}[/]  {escape(record['formula'])}")
            options = ", ".join(f"{name}: {format_value(value)}" for name, value in record["options"].items())
            facts = {"parameters": record["parameters"], "options": options, "traits": ", ".join(record["traits"])}
            print_facts(console, {**facts, "use": record["advice"], "source": record["source"]})
        console.print()
    if shows_compositions:
        console.print("[bold underline]compositions[/] (overlays of configs/position)\n")
        print_facts(console, describe_compositions())


def tasks(
    name: Annotated[
        str, typer.Argument(metavar="TEXT", help="Show only tasks with this text in their names.", show_default=False)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the synthetic tasks for training from scratch: description, options, source."""
    import json

    from megatron.data.tasks.task_config import describe_task, list_tasks
    from megatron.utils.formatting import format_choices

    records = [describe_task(each) for each in list_tasks() if name in each]
    if not records:
        raise UserError(f"no task contains {name!r}; {format_choices(name, list_tasks())}")
    if as_json:
        print(json.dumps(records, indent=2))
        return
    from rich.markup import escape

    from megatron.config.yaml_files import format_value
    from megatron.utils.console import PlainConsole

    console = PlainConsole(highlight=False)
    for number, record in enumerate(records):
        console.print("\n" * (number > 0) + f"[bold cyan]{record['name']}[/]  {escape(record['title'])}")
        options = {
            f"{option}: {format_value(fact['default'])}": fact["meaning"] for option, fact in record["options"].items()
        }
        print_facts(console, {**options, "note": record["note"], "source": record["paper"]})


def checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Verify the checksums of all files.")] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", min=1, help="Keep only this number of newest undamaged checkpoints and those of extra_save_iters."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run with step, size, losses and integrity, and delete old ones.

    The exit code is 1 if a checkpoint is damaged.

    [bold]Example[/]

      ./deepy.py checkpoints runs/a --keep 2
    """
    from megatron.launch.run_status import print_checkpoints, prune_and_report
    from megatron.utils.progress import WaitAnnouncer

    with WaitAnnouncer(print_to_stderr, f"reading the checkpoints of {run}"):
        if keep is not None:
            prune_and_report(run, keep, print)
        are_whole = print_checkpoints(run, verify=verify, as_json=as_json)
    if not are_whole:
        raise typer.Exit(1)


def status(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run folders or folders of runs.", show_default=False)
    ],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Update every 5 seconds until no run trains, or Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show the status of runs: state, step, loss, speed, time left, and last checkpoint.

    [bold]Examples[/]

      ./deepy.py status runs/a

      ./deepy.py status runs --follow
    """
    from megatron.launch.run_status import print_status

    return 0 if print_status(runs, as_json=as_json, follow=follow) else 1


SHOWN_TOKENS = 64
"""Number of token ids printed of a row of a task."""


def show_batch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    steps: Annotated[
        list[str], typer.Argument(metavar="STEP…", help="Steps, or ranges such as 118-121.", show_default=False)
    ],
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Show only this data-parallel rank, counted from 0.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Characters to show of each document.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead of text.")] = False,
) -> None:
    """Show the documents that training read at a step, for example before a loss spike.

    The batch follows from the run's configuration, checkpoints and data. It shows, for every sequence, its rank and
    micro-batch, and for every document in it the dataset, index, position and text. Steps are counted from 1.

    [bold]Examples[/]

      ./deepy.py show-batch runs/a 1200

      ./deepy.py show-batch runs/a 1198-1201 --rank 3 --limit 80
    """
    from megatron.checkpoint.run_folder import find_started_run
    from megatron.utils.progress import WaitAnnouncer

    wanted = parse_steps(steps)
    reject_later_steps(find_started_run(run), wanted)  # before importing torch and reading data, which may take long
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
            raise UserError(f"STEP {text!r}: it must be a step or a range, for example 1200 or 1198-1201")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1:
            raise UserError(f"STEP {text}: steps are counted from 1")
        if last < first:
            raise UserError(f"STEP {text}: the range is empty; write {last}-{first}")
        if last - first >= 10_000:
            raise UserError(f"STEP {text}: a range has at most 10,000 steps")
        steps.update(dict.fromkeys(range(first, last + 1)))
    return list(steps)


def reject_later_steps(run: Path, steps: list[int]) -> None:
    """Reject steps after the last one of a run, according to its configuration and checkpoints. Raises UserError."""
    from megatron.checkpoint.layout import list_checkpoints, parse_step
    from megatron.checkpoint.run_folder import get_config_path, is_saved_config
    from megatron.config.load import read_config

    path = get_config_path(run)
    train_iters = read_config(path).training.train_iters if is_saved_config(path) else None
    if train_iters is None:
        return  # in epochs: only the data tell the number of steps
    last = max([train_iters, *(parse_step(checkpoint) or 0 for checkpoint in list_checkpoints(run))])
    for step in steps:
        if step > last:
            raise UserError(f"step {step} is after the last step; batches are known up to step {last:,}")


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
    from megatron.data.gpt_dataset import list_document_parts

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

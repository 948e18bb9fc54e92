"""`./deepy.py keys`, `positions` and `tasks`: reference of configuration keys, position methods and tasks."""

from typing import Annotated, Any

import typer

from megatron.cli.arguments import AsJson, print_facts, print_to_stderr
from megatron.utils.errors import UserError


def keys(
    pattern: Annotated[
        str, typer.Argument(help="Show only keys with this text in their name or description.", show_default=False)
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
    from megatron.launch.console import PlainConsole

    console = PlainConsole(highlight=False)
    for i, (name, default, values, meaning) in enumerate(matches):
        console.print("\n" * (i > 0) + f"[bold cyan]{escape(name)}[/]")
        print_facts(console, {"default": default, "values": values, "meaning": meaning})


def positions(
    name: Annotated[
        str, typer.Argument(help="Show only methods with this text in one of their names.", show_default=False)
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
    from megatron.launch.console import PlainConsole

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
        str, typer.Argument(help="Show only tasks with this text in their names.", show_default=False)
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
    from megatron.launch.console import PlainConsole

    console = PlainConsole(highlight=False)
    for number, record in enumerate(records):
        console.print("\n" * (number > 0) + f"[bold cyan]{record['name']}[/]  {escape(record['title'])}")
        options = {
            f"{option}: {format_value(fact['default'])}": fact["meaning"] for option, fact in record["options"].items()
        }
        print_facts(console, {**options, "note": record["note"], "source": record["paper"]})

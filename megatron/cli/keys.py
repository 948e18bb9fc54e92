"""`./deepy.py keys`."""

from typing import Annotated

import typer

from megatron.cli.console import print_facts
from megatron.utils.errors import UserError


def keys(
    pattern: Annotated[
        str, typer.Argument(help="Only keys with this text in their name or meaning.", show_default=False)
    ] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/configuration.md.")] = False,
) -> None:
    """Explain the keys of configuration files: ours, and what GPT-NeoX's, KERPLE's and DAPE's mean here."""
    from megatron.config import reference

    if markdown:
        print(reference.build_reference(), end="")
        return
    from rich.markup import escape

    matches = reference.lookup_keys(pattern)
    if not matches:
        raise UserError(f"no key contains {pattern!r}; {reference.find_nearest_key(pattern)}".removesuffix("; "))
    from megatron.launch.console import PlainConsole

    console = PlainConsole(highlight=False)
    for i, (name, default, values, meaning) in enumerate(matches):
        console.print("\n" * (i > 0) + f"[bold cyan]{escape(name)}[/]")
        print_facts(console, {"default": default, "values": values, "meaning": meaning})

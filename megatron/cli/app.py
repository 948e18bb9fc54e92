"""Command-line application with all commands; each command's help names the page with details."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megatron.cli.convert import export, import_, prepare
from megatron.cli.evaluate import analyze, evaluate, generate, report
from megatron.cli.help_page import print_command_help
from megatron.cli.run_command import name_typed_options, pass_errors_through, run_command
from megatron.cli.show import checkpoints, keys, positions, show_batch, status, tasks
from megatron.cli.train import plan, rehearse, sweep, train
from megatron.options.section import read_docstring
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_quantity
from megatron.utils.project import PROGRAM, replace_program_name

COMMANDS: tuple[tuple[Callable[..., Any], str], ...] = (
    (train, "docs/training.md"),
    (plan, "docs/planning.md"),
    (rehearse, "docs/gpu.md"),
    (prepare, "docs/data.md"),
    (import_, "docs/export.md"),
    (evaluate, "docs/evaluation.md"),
    (analyze, "docs/analysis.md"),
    (generate, "docs/export.md"),
    (positions, "docs/positions.md"),
    (tasks, "docs/tasks.md"),
    (sweep, "docs/evaluation.md"),
    (report, "docs/evaluation.md"),
    (export, "docs/export.md"),
    (checkpoints, "docs/training.md"),
    (status, "docs/training.md"),
    (show_batch, "docs/monitoring.md"),
    (keys, "docs/configuration.md"),
)
"""Every command, in the order of the help, with the page that has details.

A command is named after its function, with hyphens, and without the underscore that distinguishes a name from a Python
keyword.
"""


PACKAGES = ("torch", "triton", "deepspeed", "megatron-core", "transformers", "lm-eval")
"""Packages that affect results and should be included in problem reports (`--version`)."""


def print_help(command: Any, context: Any) -> None:
    """Print the help page of a command, or of the program."""
    from megatron.utils.console import PlainConsole

    print_command_help(command, context, PlainConsole())


class Commands(TyperGroup):
    """Command group that accepts names with `.py`, as in GPT-NeoX: `./deepy.py train.py …`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name.removesuffix(".py"))

    def invoke(self, ctx: Any) -> Any:
        with pass_errors_through():
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_help(self, ctx)


class Command(TyperCommand):
    """Command with our help page. It rejects empty arguments and values; an empty path would be the current folder."""

    def invoke(self, ctx: Any) -> Any:
        with name_typed_options(self.params):
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_help(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {
            flag
            for param in self.params
            for flag in param.opts
            if flag.startswith("-") and not getattr(param, "is_flag", False)
        }
        for word, previous in zip(args, ["", *args], strict=False):
            flag, has_value, value = word.partition("=")
            if word == "":
                name = previous if previous in flags else "an argument"
            elif has_value and not value and flag in flags:
                name = flag
            else:
                continue
            if name not in EMPTY_OPTIONS:
                option = max(flags.intersection(EMPTY_OPTIONS), key=len, default=None)
                hint = f"; write {option} '' for an empty text" if option and name == "an argument" else ""
                raise UserError(f"{name} is empty; give a value or omit it{hint}")
        return super().parse_args(ctx, args)


EMPTY_OPTIONS = ("-p", "--prompt")
"""Options whose value may be empty."""


def format_help(text: str) -> str:
    """Format help for rich: wrap paragraphs to the terminal and keep indented lines."""
    blocks = inspect.cleandoc(replace_program_name(text)).split("\n\n")
    return "\n\n".join(block if block.startswith(" ") else " ".join(block.splitlines()) for block in blocks)


app = typer.Typer(
    cls=Commands,
    name="deepy.py",
    help=format_help("""Pretrain GPTs that extrapolate to lengths they were never trained on.

    From text to a table in three steps:

      ./deepy.py prepare python --output data/python

      ./deepy.py train 125M cdape_kerple_log local_setup save=runs/cdape

      ./deepy.py evaluate runs/cdape --lengths 1x,2x,4x,8x,16x

    Help for a command: ./deepy.py train --help"""),
    no_args_is_help=True,
    subcommand_metavar="COMMAND …",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def get_command_name(function: Callable[..., Any]) -> str:
    """Return the name of a function's command."""
    return function.__name__.rstrip("_").replace("_", "-")


def add_command(function: Callable[..., Any], page: str) -> None:
    """Add a command whose help is the function's docstring."""
    text = f"{format_help(read_docstring(function))}\n\nMore: {page}"
    app.command(get_command_name(function), cls=Command, help=text)(function)


for function, page in COMMANDS:
    add_command(function, page)


def _show_versions(is_requested: bool) -> None:
    if is_requested:
        for name, version in list_versions().items():
            print(f"{name} {version}")
        raise typer.Exit


def list_versions() -> dict[str, str]:
    """Return names and versions of installed packages without importing them: farfield first, the device last."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from megatron.utils.project import get_farfield_version

    versions = {"farfield": get_farfield_version(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions | {"device": _describe_device()}


def _describe_device() -> str:
    """Return the device that `device: auto` would use, with the GPU's name if its driver reports it."""
    from megatron.distributed.hardware import LocalHardware, read_gpu_name

    hardware = LocalHardware.detect()
    if not hardware.num_gpus:
        return f"cpu ({format_quantity(hardware.num_cores, 'core')})"
    return f"cuda ({hardware.num_gpus} × {read_gpu_name() or 'GPU'})"


@app.callback()
def handle_global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show installed versions and the device.",
            callback=_show_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Handle options that belong to no command."""


def main() -> int:
    """Run a command; failures are printed to standard error and returned as an exit code."""
    return run_command(app, PROGRAM)
